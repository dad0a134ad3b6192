"""Actions that the state machines request. The server translates each action to a message."""

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
from restow.broker.state_commands import Answer, Verb

if TYPE_CHECKING:
    from restow.broker.core.common.events import Command, NamedPrefix


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
    """The number of the demand that ended, 0 if it has none; None if a publication ended."""
    delivered: int = 0
    """Readers that have received the state."""
    position: int = 0
    """Tokens that P's state has absorbed; 0 if P had not published the whole state."""
    compared: bool = False
    """Whether both sides named the content and the broker compared it."""
    counterparts: tuple[Counterpart, ...] = ()
    """The other side of the handoff: P, or every D."""
    sampled: int | None = None
    """The sampled token of P's publication; sent to P only."""
    readers: int = 0
    """Readers that the handoff was for; 0 if nobody named a number."""


class TellSampled(NamedTuple):
    """Tell D which token P sampled; ``demand`` is the number of D's message."""

    engine: EngineKey
    handoff_id: str
    demand: int
    token: int


class TellHoldings(NamedTuple):
    """Ask an engine to announce all of its holdings again, starting with batch 1."""

    engine: EngineKey


class SendOffer(NamedTuple):
    """Offer a demand to an engine that announced that it holds the prefix."""

    engine: EngineKey
    handoff_id: str
    prefix: NamedPrefix
    within_s: float
    """Time for an answer; after that the next holder gets the offer."""


class TellDrain(NamedTuple):
    """Ask an engine that is to leave to hand over what it holds."""

    engine: EngineKey


class SendKeep(NamedTuple):
    """Tell a store about a state that it may ask for, which a request may have ``marked``."""

    engine: EngineKey
    prefix: NamedPrefix
    marked: bool = False


class SendCommand(NamedTuple):
    """Give a store a command; ``verb`` is what this store has to do for it."""

    engine: EngineKey
    command: Command
    verb: Verb


class TellCommand(NamedTuple):
    """Tell the callers that wait for a command, and the log, that it has ended."""

    command: Command
    answer: Answer


class TellForget(NamedTuple):
    """Tell a store to drop the states of a revision."""

    engine: EngineKey
    revision: str


class SendProgram(NamedTuple):
    """Send an agent a program, or the part that ``src_rank`` gathers if that is set.

    ``hashed`` says that the program also hashes.
    """

    agent: AgentKey
    program: Program
    src_rank: int | None
    hashed: bool = False


class SendPeer(NamedTuple):
    """Introduce ``peer`` to an agent that will read from that peer."""

    agent: AgentKey
    peer: AgentKey


class SendForget(NamedTuple):
    """Tell an agent to forget a peer that is gone."""

    agent: AgentKey
    agent_name: str


class StagePart(NamedTuple):
    """The part of a gathering that is for a single destination rank."""

    program_id: str
    dst_rank: int


class SendStage(NamedTuple):
    """Tell a source's agent to gather or hash in a launch for several destination ranks."""

    agent: AgentKey
    handoff: int
    parts: tuple[StagePart, ...]
    blocks: tuple[GroupIds, ...]
    first_token: int
    stop_token: int
    hashed: bool = False


class SourceRun(NamedTuple):
    """A source rank to read from: its staged run (0: none) and the digest of what is read."""

    src_rank: int
    agent_name: str
    staged_address: int
    staged_bytes: int
    digest: bytes = b""


class SendExecute(NamedTuple):
    """Tell a destination's agent to fill its pages."""

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
    """Tell a source's agent to free the staging memory of a handoff."""

    agent: AgentKey
    handoff: int


class SendProbe(NamedTuple):
    """Tell an agent to measure copying, and reading from ``peer`` at ``address`` if that is set."""

    agent: AgentKey
    number: int
    size_bytes: int
    peer: AgentKey | None = None
    address: int = 0
    name_transport: bool = False
    """Measure nothing: read once from ``peer`` and report the transport."""


class SendUnprobe(NamedTuple):
    """Tell an agent to free the memory of a probe."""

    agent: AgentKey
    number: int


class TellExamined(NamedTuple):
    """Tell the operator who asked how an agent reads from another agent, or why it cannot."""

    number: int
    source_rank: int
    destination_rank: int
    transport: str
    method: str
    reason: str
    detail: str


class SendUnfence(NamedTuple):
    """Tell an agent of P to stop reporting the fence of a handoff."""

    agent: AgentKey
    handoff_id: str


class MakePlan(NamedTuple):
    """Plan between two layouts and report the plan to `Granting.plan_made`.

    If ``costs`` is None, the costs of the broker's settings apply.
    """

    pair: PairKey
    source: Layout
    destination: Layout
    costs: CostModel | None
    ahead: bool = False
    """Whether no handoff waits for the plan yet."""


class CloseSession(NamedTuple):
    """Close the stream of an engine that is gone, after its queued messages were sent."""

    engine: EngineKey
    error: RestowError


class CloseAgent(NamedTuple):
    """Close the stream of an agent that is gone, after its queued messages were sent."""

    agent: AgentKey
    error: RestowError


Action = (
    TellEnded
    | TellSampled
    | TellHoldings
    | SendOffer
    | SendKeep
    | SendCommand
    | TellCommand
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
