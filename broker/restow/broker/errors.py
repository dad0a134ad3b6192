"""Every error that Restow raises on purpose, with its gRPC status and stable reason.

An error names cause, object and next step in its message, and carries what it is about in
``subject`` (field, axis, ranks, ...), which travels as ``ErrorInfo.metadata``. One interceptor
maps a class to a status; nobody parses the text.
"""

from __future__ import annotations

from restow.broker.printable import shown


class RestowError(Exception):
    """Base of all typed errors.

    ``status`` is the name of the gRPC status code that it travels as, ``reason`` a stable
    upper-case word for scripts, and ``subject`` what it is about, as strings.
    """

    status = "INTERNAL"
    reason = "INTERNAL"

    def __init_subclass__(cls, status: str = "", reason: str = "") -> None:
        """Give the class a status and a reason of its own; without: those of its base."""
        cls.status = status or cls.status
        cls.reason = reason or cls.reason

    def __init__(self, message: str, **subject: object) -> None:
        """Keep the message, and everything in ``subject`` as text, printable: it may be others'."""
        self.message = shown(message)
        super().__init__(self.message)
        self.subject = {name: shown(str(value)) for name, value in subject.items()}


class LayoutError(RestowError, status="INVALID_ARGUMENT", reason="LAYOUT_INVALID"):
    """A layout that can't be accepted."""


class LayoutFormError(LayoutError, reason="LAYOUT_MALFORMED"):
    """The description itself is malformed: a missing key, a wrong type, an unknown name."""


class LayoutHoleError(LayoutError, reason="LAYOUT_HOLE"):
    """No rank holds some element of a field."""


class LayoutOverlapError(LayoutError, reason="LAYOUT_OVERLAP"):
    """Two shards overlap without being replicas of each other."""


class LayoutStrideError(LayoutError, reason="LAYOUT_STRIDE"):
    """A stride is negative, folds elements onto each other, or leaves the page."""


class LayoutMemoryError(LayoutError, reason="LAYOUT_MEMORY_SHARED"):
    """Two shards of a rank claim the same bytes of a page."""


class RanksDisagreeError(LayoutError, reason="LAYOUT_RANKS_DISAGREE"):
    """Two ranks of an engine describe the same thing differently."""


class TpSizeError(LayoutError, reason="TP_SIZE_NOT_ALLOWED"):
    """A tensor-parallel size that the model's heads or groups do not allow."""


class StageError(LayoutError, reason="STAGES_NOT_ALLOWED"):
    """Pipeline stages that the model's layers can't be cut into."""


class UnknownModelError(LayoutError, reason="MODEL_TYPE_UNKNOWN"):
    """A model config of a type that no family describes."""


class PlanError(RestowError, status="FAILED_PRECONDITION", reason="PLAN_INVALID"):
    """Two layouts between which nothing can be planned."""


class ModelMismatchError(PlanError, reason="MODEL_MISMATCH"):
    """The two engines serve different models."""


class CostsInvalidError(PlanError, status="INVALID_ARGUMENT", reason="COSTS_INVALID"):
    """Costs that can't be; the subject names one."""


class ScalesMismatchError(PlanError, reason="SCALES_MISMATCH"):
    """A field whose elements are multiplied by other scales on the two sides."""


class BlockTokensMismatchError(PlanError, reason="BLOCK_TOKENS_MISMATCH"):
    """A D that keeps whole blocks, of which a P with other blocks may lack the beginning."""


class CastUnsupportedError(PlanError, reason="CAST_UNSUPPORTED"):
    """A field whose types differ on the two sides, and no cast exists between them."""


class NarrowingError(PlanError, reason="NARROWING_NOT_ALLOWED"):
    """A field whose type on D rounds what P's can hold, and the operator has not allowed it."""


class TooManyPiecesError(PlanError, status="RESOURCE_EXHAUSTED", reason="TOO_MANY_PIECES"):
    """Two layouts between which a plan would fall into more pieces than can be handled."""


class StrategyRefusedError(PlanError, reason="STRATEGY_REFUSED"):
    """The strategy asked for can't serve this pair of layouts."""


class PagesError(RestowError, status="INVALID_ARGUMENT", reason="PAGES_INVALID"):
    """Page ids that do not fit the layout or the positions."""


class PageRangeError(PagesError, status="OUT_OF_RANGE", reason="PAGE_OUT_OF_RANGE"):
    """A block or page id that is none of the engine's: negative, too large, or no whole number."""


class PageCountError(PagesError, reason="PAGE_COUNT"):
    """Too few or too many page ids for the tokens that they should hold."""


class PageRepeatedError(PagesError, reason="PAGE_REPEATED"):
    """A page id that a list names twice, or two open handoffs of which one has it written."""


class NullBlockError(PagesError, reason="NULL_BLOCK"):
    """The engine's null block where bytes would be read or written."""


class RequestError(RestowError, status="INVALID_ARGUMENT", reason="ARGUMENT_INVALID"):
    """A call whose arguments are unusable."""


class AddressInvalidError(RestowError, status="INVALID_ARGUMENT", reason="ADDRESS_INVALID"):
    """Where to connect or to listen is not written as addresses are."""


class MessageTooLargeError(RestowError, status="INVALID_ARGUMENT", reason="MESSAGE_TOO_LARGE"):
    """What is said at once is more than a message may carry: nothing was sent."""


class WordUnknownError(RestowError, status="INVALID_ARGUMENT", reason="WORD_UNKNOWN"):
    """A value that is none of the words that a setting or a value has."""


class EngineUnknownError(RestowError, status="NOT_FOUND", reason="ENGINE_UNKNOWN"):
    """No engine of that id is registered: register first."""


class EngineReplacedError(RestowError, status="ABORTED", reason="ENGINE_REPLACED"):
    """A newer incarnation of the engine registered; this one has to stop."""


class EngineDrainingError(RestowError, status="FAILED_PRECONDITION", reason="ENGINE_DRAINING"):
    """An engine that is about to leave, and takes part in nothing new."""


class EngineConnectedError(RestowError, status="FAILED_PRECONDITION", reason="ENGINE_CONNECTED"):
    """An engine that is there: what is there is not forgotten."""


class AgentUnknownError(RestowError, status="NOT_FOUND", reason="AGENT_UNKNOWN"):
    """An agent for a rank that the engine's layout does not have."""


class AgentMismatchError(RestowError, status="INVALID_ARGUMENT", reason="AGENT_REGIONS_MISMATCH"):
    """An agent whose regions are not those of its rank's layout."""


class RegionsOverlapError(AgentMismatchError, reason="REGIONS_OVERLAP"):
    """An agent whose regions lie on each other, or on those of another rank of its engine."""


class AgentReleaseError(RestowError, status="FAILED_PRECONDITION", reason="AGENT_RELEASE_DIFFERS"):
    """A broker and an agent whose releases write programs in different forms."""


class SessionReplacedError(RestowError, status="ABORTED", reason="SESSION_REPLACED"):
    """Another stream of the same life of the engine was opened after this one, or came before it.

    A stream that its client gave up may reach the broker after the next one: so it is opened again.
    """


class AgentReplacedError(RestowError, status="ABORTED", reason="AGENT_REPLACED"):
    """A newer stream serves the agent's rank; this one has to stop."""


class PairNotReadyError(RestowError, status="FAILED_PRECONDITION", reason="PAIR_NOT_READY"):
    """Two engines between which nothing can be read now."""


class HandoffUnknownError(RestowError, status="NOT_FOUND", reason="HANDOFF_UNKNOWN"):
    """No handoff of that id is known."""


class HandoffAmbiguousError(RestowError, status="INVALID_ARGUMENT", reason="HANDOFF_AMBIGUOUS"):
    """The beginning of an id is that of several handoffs: type more of it."""


class NotLeaderError(RestowError, status="UNAVAILABLE", reason="NOT_LEADER"):
    """Another broker leads; ``subject["leader"]`` is its address."""


class NoLeaderError(RestowError, status="UNAVAILABLE", reason="NO_LEADER"):
    """No broker leads at the moment, as far as this one knows."""


class HandoffOwnedError(RestowError, status="ALREADY_EXISTS", reason="HANDOFF_OWNED"):
    """Another engine owns this side of the handoff."""


class HandoffConflictError(RestowError, status="FAILED_PRECONDITION", reason="HANDOFF_CONFLICT"):
    """A repeated call that says something else than the first one."""


class RevisionChangedError(RestowError, status="FAILED_PRECONDITION", reason="REVISION_CHANGED"):
    """A state was computed with weights that the engine has no longer."""


class ContentMismatchError(RestowError, status="FAILED_PRECONDITION", reason="CONTENT_MISMATCH"):
    """P's state is of other tokens, or of another adapter, image or salt, than D asks for."""


class ContentNotNamedError(RestowError, status="FAILED_PRECONDITION", reason="CONTENT_NOT_NAMED"):
    """A side names no content, and the broker is told to serve nothing that is not compared."""


class ChainInvalidError(RestowError, status="INVALID_ARGUMENT", reason="CHAIN_INVALID"):
    """Hashes of a prompt that are no chain: of another size, too many, or out of order."""


class ChainFormError(RestowError, status="FAILED_PRECONDITION", reason="CHAIN_FORM_DIFFERS"):
    """Hashes by another algorithm, or after other tokens, than those they are to meet."""


class WeightsUnknownError(RestowError, status="FAILED_PRECONDITION", reason="WEIGHTS_UNKNOWN"):
    """A state is to be found by its content, and nothing tells the model's weights from others."""


class HoldingsError(RestowError, status="INVALID_ARGUMENT", reason="HOLDINGS_INVALID"):
    """What an engine says that it holds, and can't."""


class DirectoryFullError(RestowError, status="RESOURCE_EXHAUSTED", reason="DIRECTORY_FULL"):
    """The broker holds as many handoffs as it may."""


class QuotaExceededError(RestowError, status="RESOURCE_EXHAUSTED", reason="QUOTA_EXCEEDED"):
    """A tenant holds as much as it may, whatever room the broker has for others."""


class FirstMessageLateError(RestowError, status="DEADLINE_EXCEEDED", reason="FIRST_MESSAGE_LATE"):
    """A call whose first message did not come whole in time."""


class QueueFullError(RestowError, status="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"):
    """A peer reads too slowly: its queue of messages is full."""


class ListenError(RestowError, status="UNAVAILABLE", reason="LISTEN_FAILED"):
    """The broker can't listen on its address: in use, or not of this machine."""


class SettingUnknownError(RestowError, status="INVALID_ARGUMENT", reason="SETTING_UNKNOWN"):
    """A variable or a line of a file that would be a setting, if it were not misspelt."""


class ExtraMissingError(RestowError, status="FAILED_PRECONDITION", reason="EXTRA_MISSING"):
    """A command needs an extra of the distribution that is not installed."""


class FileWriteError(RestowError, status="FAILED_PRECONDITION", reason="FILE_NOT_WRITABLE"):
    """A file that a command was asked to write, and can't."""
