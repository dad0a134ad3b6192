"""All errors that Restow raises on purpose, each with its gRPC status and stable reason.

A message names the cause, the object and the next step. ``subject`` has the same facts as strings
(field, axis, ranks, ...); it travels as ``ErrorInfo.metadata``. One interceptor maps a class to a
gRPC status. Nothing parses the text of a message.
"""

from __future__ import annotations

from restow.broker.printable import shown


class RestowError(Exception):
    """Base of all typed errors.

    ``status`` is the name of the gRPC status code under which the error travels. ``reason`` is a
    stable upper-case word for scripts. ``subject`` says what the error is about, as strings.
    """

    status = "INTERNAL"
    reason = "INTERNAL"

    def __init_subclass__(cls, status: str = "", reason: str = "") -> None:
        """Set the status and reason of a subclass; an empty argument keeps the base's value."""
        cls.status = status or cls.status
        cls.reason = reason or cls.reason

    def __init__(self, message: str, **subject: object) -> None:
        """Store the message and ``subject`` with escapes: peers may have written parts of them."""
        self.message = shown(message)
        super().__init__(self.message)
        self.subject = {name: shown(str(value)) for name, value in subject.items()}


class LayoutError(RestowError, status="INVALID_ARGUMENT", reason="LAYOUT_INVALID"):
    """The layout is invalid."""


class LayoutFormError(LayoutError, reason="LAYOUT_MALFORMED"):
    """The layout's description is malformed: a key is missing, or a type or a name is wrong."""


class LayoutHoleError(LayoutError, reason="LAYOUT_HOLE"):
    """No rank holds some element of a field."""


class LayoutOverlapError(LayoutError, reason="LAYOUT_OVERLAP"):
    """Two shards overlap without being replicas of each other."""


class LayoutStrideError(LayoutError, reason="LAYOUT_STRIDE"):
    """A stride is negative, maps two elements to the same bytes, or leaves the page."""


class ScalesUnknownError(LayoutError, reason="SCALES_UNKNOWN"):
    """Nothing identifies the scales of quantised keys and values: the layout is for looking at."""


class LayoutMemoryError(LayoutError, reason="LAYOUT_MEMORY_SHARED"):
    """Two shards of a rank claim the same bytes of a page."""


class RanksDisagreeError(LayoutError, reason="LAYOUT_RANKS_DISAGREE"):
    """Two ranks of an engine describe the same field, group or model differently."""


class TpSizeError(LayoutError, reason="TP_SIZE_NOT_ALLOWED"):
    """The model's heads or groups cannot be divided by the tensor-parallel size."""


class StageError(LayoutError, reason="STAGES_NOT_ALLOWED"):
    """The model's layers cannot be divided into the pipeline stages."""


class UnknownModelError(LayoutError, reason="MODEL_TYPE_UNKNOWN"):
    """No family describes the model type of the config."""


class PlanError(RestowError, status="FAILED_PRECONDITION", reason="PLAN_INVALID"):
    """No plan exists between two layouts."""


class ModelMismatchError(PlanError, reason="MODEL_MISMATCH"):
    """The two engines serve different models."""


class CostsInvalidError(PlanError, status="INVALID_ARGUMENT", reason="COSTS_INVALID"):
    """A measured or configured cost is impossible; ``subject`` names the cost."""


class ScalesMismatchError(PlanError, reason="SCALES_MISMATCH"):
    """The two sides multiply a field's elements by different scales."""


class BlockTokensMismatchError(PlanError, reason="BLOCK_TOKENS_MISMATCH"):
    """D keeps whole blocks, and P may have freed the beginning of a block of D's size."""


class CastUnsupportedError(PlanError, reason="CAST_UNSUPPORTED"):
    """A field has different types on the two sides, and no cast between these types exists."""


class NarrowingError(PlanError, reason="NARROWING_NOT_ALLOWED"):
    """D's type of a field would round P's values, and the operator has not allowed that."""


class TooManyPiecesError(PlanError, status="RESOURCE_EXHAUSTED", reason="TOO_MANY_PIECES"):
    """The plan between two layouts would have more pieces than the limit."""


class StrategyRefusedError(PlanError, reason="STRATEGY_REFUSED"):
    """The requested strategy cannot serve this pair of layouts."""


class PagesError(RestowError, status="INVALID_ARGUMENT", reason="PAGES_INVALID"):
    """Page ids do not fit the layout or the positions."""


class PageRangeError(PagesError, status="OUT_OF_RANGE", reason="PAGE_OUT_OF_RANGE"):
    """A block or page id is negative, too large or not an integer."""


class PageCountError(PagesError, reason="PAGE_COUNT"):
    """The number of page ids does not match the number of tokens."""


class PageRepeatedError(PagesError, reason="PAGE_REPEATED"):
    """A list repeats a page id, or two open handoffs name a page that a handoff writes."""


class NullBlockError(PagesError, reason="NULL_BLOCK"):
    """A handoff would read or write the engine's null block."""


class RequestError(RestowError, status="INVALID_ARGUMENT", reason="ARGUMENT_INVALID"):
    """The arguments of a call are unusable."""


class AddressInvalidError(RestowError, status="INVALID_ARGUMENT", reason="ADDRESS_INVALID"):
    """An address to connect to or to listen on is malformed."""


class MessageTooLargeError(RestowError, status="INVALID_ARGUMENT", reason="MESSAGE_TOO_LARGE"):
    """A message would exceed the size limit; nothing was sent."""


class WordUnknownError(RestowError, status="INVALID_ARGUMENT", reason="WORD_UNKNOWN"):
    """A value is not among the words that a setting or a field accepts."""


class EngineUnknownError(RestowError, status="NOT_FOUND", reason="ENGINE_UNKNOWN"):
    """No engine with this id is registered; register first."""


class EngineReplacedError(RestowError, status="ABORTED", reason="ENGINE_REPLACED"):
    """A newer incarnation of the engine has registered; this incarnation must stop."""


class EngineDrainingError(RestowError, status="FAILED_PRECONDITION", reason="ENGINE_DRAINING"):
    """The engine is draining and takes part in no new handoffs."""


class EngineConnectedError(RestowError, status="FAILED_PRECONDITION", reason="ENGINE_CONNECTED"):
    """The engine is connected, and a connected engine cannot be removed."""


class AgentUnknownError(RestowError, status="NOT_FOUND", reason="AGENT_UNKNOWN"):
    """The agent's rank does not exist in the engine's layout."""


class AgentMismatchError(RestowError, status="INVALID_ARGUMENT", reason="AGENT_REGIONS_MISMATCH"):
    """The agent's regions differ from its rank's layout."""


class RegionsOverlapError(AgentMismatchError, reason="REGIONS_OVERLAP"):
    """The agent's regions overlap each other, or regions of another rank of its engine."""


class AgentReleaseError(RestowError, status="FAILED_PRECONDITION", reason="AGENT_RELEASE_DIFFERS"):
    """The releases of the broker and the agent use different program formats."""


class SessionReplacedError(RestowError, status="ABORTED", reason="SESSION_REPLACED"):
    """The engine's session has another stream, newer or older than this stream.

    The client opens a new stream, because a stream that it gave up may reach the broker after its
    successor.
    """


class AgentReplacedError(RestowError, status="ABORTED", reason="AGENT_REPLACED"):
    """A newer stream serves the agent's rank; this agent must stop."""


class PairNotReadyError(RestowError, status="FAILED_PRECONDITION", reason="PAIR_NOT_READY"):
    """Nothing can be read between the two engines at present."""


class HandoffUnknownError(RestowError, status="NOT_FOUND", reason="HANDOFF_UNKNOWN"):
    """No handoff with this id is known."""


class HandoffAmbiguousError(RestowError, status="INVALID_ARGUMENT", reason="HANDOFF_AMBIGUOUS"):
    """Several handoffs have an id with this prefix; type more of the id."""


class NotLeaderError(RestowError, status="UNAVAILABLE", reason="NOT_LEADER"):
    """Another broker leads; ``subject["leader"]`` is its address."""


class NoLeaderError(RestowError, status="UNAVAILABLE", reason="NO_LEADER"):
    """No broker leads at the moment, as far as this broker knows."""


class HandoffOwnedError(RestowError, status="ALREADY_EXISTS", reason="HANDOFF_OWNED"):
    """Another engine owns this side of the handoff."""


class HandoffConflictError(RestowError, status="FAILED_PRECONDITION", reason="HANDOFF_CONFLICT"):
    """A repeated call contradicts the first call."""


class CommandConflictError(RestowError, status="FAILED_PRECONDITION", reason="COMMAND_CONFLICT"):
    """A command's id was used before for another command."""


class CommandUnknownError(RestowError, status="NOT_FOUND", reason="COMMAND_UNKNOWN"):
    """No such command was given, or the broker has forgotten it."""


class RevisionChangedError(RestowError, status="FAILED_PRECONDITION", reason="REVISION_CHANGED"):
    """A state was computed with weights that the engine no longer has."""


class ContentMismatchError(RestowError, status="FAILED_PRECONDITION", reason="CONTENT_MISMATCH"):
    """P's state and D's request differ in tokens, adapter, image or salt."""


class ContentNotNamedError(RestowError, status="FAILED_PRECONDITION", reason="CONTENT_NOT_NAMED"):
    """A side names no content, and the broker serves only states whose content is compared."""


class ChainInvalidError(RestowError, status="INVALID_ARGUMENT", reason="CHAIN_INVALID"):
    """The hashes of a prompt form no chain: wrong size, too many hashes, or wrong order."""


class ChainFormError(RestowError, status="FAILED_PRECONDITION", reason="CHAIN_FORM_DIFFERS"):
    """Hashes to compare use different algorithms or numbers of tokens."""


class WeightsUnknownError(RestowError, status="FAILED_PRECONDITION", reason="WEIGHTS_UNKNOWN"):
    """A state was requested by content, but the layout names no revision of the weights."""


class HoldingsError(RestowError, status="INVALID_ARGUMENT", reason="HOLDINGS_INVALID"):
    """An engine announced holdings that it cannot have."""


class DirectoryFullError(RestowError, status="RESOURCE_EXHAUSTED", reason="DIRECTORY_FULL"):
    """The broker holds its maximum number of handoffs, engines or bytes."""


class QuotaExceededError(RestowError, status="RESOURCE_EXHAUSTED", reason="QUOTA_EXCEEDED"):
    """A tenant has reached its quota, whatever room the broker has for other tenants."""


class FirstMessageLateError(RestowError, status="DEADLINE_EXCEEDED", reason="FIRST_MESSAGE_LATE"):
    """The first message of a call did not arrive completely before the deadline."""


class QueueFullError(RestowError, status="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"):
    """The peer reads too slowly: its queue of messages is full."""


class ListenError(RestowError, status="UNAVAILABLE", reason="LISTEN_FAILED"):
    """The broker cannot listen on its address: the address is taken, or not of this machine."""


class SettingUnknownError(RestowError, status="INVALID_ARGUMENT", reason="SETTING_UNKNOWN"):
    """A variable or a line of a file looks like a misspelt setting."""


class ExtraMissingError(RestowError, status="FAILED_PRECONDITION", reason="EXTRA_MISSING"):
    """A command needs an extra of the distribution that is not installed."""


class FileWriteError(RestowError, status="FAILED_PRECONDITION", reason="FILE_NOT_WRITABLE"):
    """A command cannot write the requested file."""
