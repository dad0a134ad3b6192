"""What the state machines want done. The server translates each into one message."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from restow.broker.core.common.keys import (
    AgentKey,
    Counterpart,
    EngineKey,
    GroupIds,
    PairKey,
    State,
)
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.planner import CostModel, Program

if TYPE_CHECKING:
    from restow.broker.core.common.events import NamedPrefix


class TellEnded(NamedTuple):
    """Tell an engine how a handoff ended."""

    engine: EngineKey
    handoff_id: str
    state: State
    reason: str
    detail: str
    bytes: int
    transfer_us: int
    demand: int | None = None
    """D's message that it is the end of, 0 if that has no number; None: that of the publication."""
    delivered: int = 0
    """How many have the state."""
    position: int = 0
    """Tokens that P's state has absorbed; 0: P had not published the whole."""
    compared: bool = False
    """Whether both sides named the content, and it was compared."""
    counterparts: tuple[Counterpart, ...] = ()
    """The other side: P, or each D that it is the end of."""
    sampled: int | None = None
    """To P: the token that it had published as sampled."""
    readers: int = 0
    """How many readers the handoff had; 0: nobody named any."""


class TellSampled(NamedTuple):
    """Tell D, by its message ``demand``, the token that P sampled."""

    engine: EngineKey
    handoff_id: str
    demand: int
    token: int


class TellHoldings(NamedTuple):
    """Ask an engine to tell all that it holds, from batch 1 on."""

    engine: EngineKey


class SendOffer(NamedTuple):
    """Offer a demand to an engine that says that it holds the state of its prefix."""

    engine: EngineKey
    handoff_id: str
    prefix: NamedPrefix
    within_s: float
    """When it goes to the next."""


class TellDrain(NamedTuple):
    """Have an engine hand over what it holds: it is to leave."""

    engine: EngineKey


class SendKeep(NamedTuple):
    """Tell a store of a state that it may ask for."""

    engine: EngineKey
    prefix: NamedPrefix


class TellForget(NamedTuple):
    """Have a store drop the states of a revision."""

    engine: EngineKey
    revision: str


class SendProgram(NamedTuple):
    """Give an agent a program; the part that ``src_rank`` gathers, if that is set.

    ``hashed``: that it hashes, too.
    """

    agent: AgentKey
    program: Program
    src_rank: int | None
    hashed: bool = False


class SendPeer(NamedTuple):
    """Introduce ``peer`` to an agent that will read from it."""

    agent: AgentKey
    peer: AgentKey


class SendForget(NamedTuple):
    """Make an agent forget a peer that is gone."""

    agent: AgentKey
    agent_name: str


class StagePart(NamedTuple):
    """What is gathered for one destination rank."""

    program_id: str
    dst_rank: int


class SendStage(NamedTuple):
    """Have a source's agent gather, and hash, for some destination ranks, all in one launch."""

    agent: AgentKey
    handoff: int
    parts: tuple[StagePart, ...]
    blocks: tuple[GroupIds, ...]
    first_token: int
    stop_token: int
    hashed: bool = False


class SourceRun(NamedTuple):
    """Whom to read from, the run staged there (0: none), and the digest of all that is read."""

    src_rank: int
    agent_name: str
    staged_address: int
    staged_bytes: int
    digest: bytes = b""


class SendExecute(NamedTuple):
    """Have a destination's agent fill its pages."""

    agent: AgentKey
    handoff: int
    handoff_id: str
    program_id: str
    src_blocks: tuple[GroupIds, ...]
    dst_blocks: tuple[GroupIds, ...]
    first_token: int
    stop_token: int
    sources: tuple[SourceRun, ...]
    grant_ms: int
    hashed: bool = False
    write_mark: int = 0


class SendUnstage(NamedTuple):
    """Have a source's agent give staging back."""

    agent: AgentKey
    handoff: int


class SendProbe(NamedTuple):
    """Have an agent measure copying, and reading what ``peer``, if set, holds at ``address``."""

    agent: AgentKey
    number: int
    size_bytes: int
    peer: AgentKey | None = None
    address: int = 0
    name_transport: bool = False
    """Measure nothing: read from ``peer`` once, and say over what."""


class SendUnprobe(NamedTuple):
    """Have an agent give the memory of a probe back."""

    agent: AgentKey
    number: int


class TellExamined(NamedTuple):
    """Tell the operator who asked how an agent reads from another; or why it could not."""

    number: int
    source_rank: int
    destination_rank: int
    transport: str
    method: str
    reason: str
    detail: str


class SendUnfence(NamedTuple):
    """Have an agent of P say the fence of a handoff no more."""

    agent: AgentKey
    handoff_id: str


class MakePlan(NamedTuple):
    """Plan between two layouts, then report to `Granting.plan_made`.

    ``costs`` None: those of the broker's settings.
    """

    pair: PairKey
    source: Layout
    destination: Layout
    costs: CostModel | None
    ahead: bool = False
    """Whether no handoff waits for it yet."""


class CloseSession(NamedTuple):
    """End the stream of an engine that is gone, once it has heard what is queued."""

    engine: EngineKey
    error: RestowError


class CloseAgent(NamedTuple):
    """End the stream of an agent that is gone, once it has heard what is queued."""

    agent: AgentKey
    error: RestowError


Action = (
    TellEnded
    | TellSampled
    | TellHoldings
    | SendOffer
    | SendKeep
    | TellForget
    | TellDrain
    | SendProgram
    | SendPeer
    | SendForget
    | SendStage
    | SendExecute
    | SendUnstage
    | SendProbe
    | SendUnprobe
    | SendUnfence
    | TellExamined
    | MakePlan
    | CloseSession
    | CloseAgent
)
