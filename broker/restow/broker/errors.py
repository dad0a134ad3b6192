"""Every error that Restow raises on purpose, with its gRPC status and stable reason.

An error names cause, object and next step in its message, and carries what it is about in
``subject`` (field, axis, ranks, ...), which travels as ``ErrorInfo.metadata``. One interceptor
maps a class to a status; nobody parses the text.
"""

from __future__ import annotations

from typing import ClassVar


class RestowError(Exception):
    """Base of all typed errors.

    Attributes:
        status: name of the gRPC status code that the error travels as.
        reason: stable upper-case word for scripts, unique to the class.
        subject: what the error is about, as strings.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **subject: object) -> None:
        """Keep the message, and everything in ``subject`` as text."""
        super().__init__(message)
        self.message = message
        self.subject = {name: str(value) for name, value in subject.items()}


class LayoutError(RestowError):
    """A layout that can't be accepted."""

    status = "INVALID_ARGUMENT"
    reason = "LAYOUT_INVALID"


class LayoutFormError(LayoutError):
    """The description itself is malformed: a missing key, a wrong type, an unknown name."""

    reason = "LAYOUT_MALFORMED"


class LayoutHoleError(LayoutError):
    """No rank holds some element of a field."""

    reason = "LAYOUT_HOLE"


class LayoutOverlapError(LayoutError):
    """Two shards overlap without being replicas of each other."""

    reason = "LAYOUT_OVERLAP"


class LayoutStrideError(LayoutError):
    """A stride is negative, folds elements onto each other, or leaves the page."""

    reason = "LAYOUT_STRIDE"


class LayoutMemoryError(LayoutError):
    """Two shards of a rank claim the same bytes of a page."""

    reason = "LAYOUT_MEMORY_SHARED"


class RanksDisagreeError(LayoutError):
    """Two ranks of an engine describe the same thing differently."""

    reason = "LAYOUT_RANKS_DISAGREE"


class TpSizeError(LayoutError):
    """A tensor-parallel size that the model's heads or groups do not allow."""

    reason = "TP_SIZE_NOT_ALLOWED"


class StageError(LayoutError):
    """Pipeline stages that the model's layers can't be cut into."""

    reason = "STAGES_NOT_ALLOWED"


class UnknownModelError(LayoutError):
    """A model config of a type that no family describes."""

    reason = "MODEL_TYPE_UNKNOWN"


class PlanError(RestowError):
    """Two layouts between which nothing can be planned."""

    status = "FAILED_PRECONDITION"
    reason = "PLAN_INVALID"


class ModelMismatchError(PlanError):
    """The two engines serve different models."""

    reason = "MODEL_MISMATCH"


class CostsInvalidError(PlanError):
    """Costs that can't be; the subject names one."""

    status = "INVALID_ARGUMENT"
    reason = "COSTS_INVALID"


class ScalesMismatchError(PlanError):
    """A field whose elements are multiplied by other scales on the two sides."""

    reason = "SCALES_MISMATCH"


class CastUnsupportedError(PlanError):
    """A field whose types differ on the two sides, and no cast exists between them."""

    reason = "CAST_UNSUPPORTED"


class NarrowingError(PlanError):
    """A field whose type on D rounds what P's can hold, and the operator has not allowed it."""

    reason = "NARROWING_NOT_ALLOWED"


class TooManyPiecesError(PlanError):
    """Two layouts between which a plan would fall into more pieces than can be handled."""

    status = "RESOURCE_EXHAUSTED"
    reason = "TOO_MANY_PIECES"


class StrategyRefusedError(PlanError):
    """The strategy asked for can't serve this pair of layouts."""

    reason = "STRATEGY_REFUSED"


class PagesError(RestowError):
    """Page ids that do not fit the layout or the positions."""

    status = "INVALID_ARGUMENT"
    reason = "PAGES_INVALID"


class PageRangeError(PagesError):
    """A page id outside of the registered memory."""

    status = "OUT_OF_RANGE"
    reason = "PAGE_OUT_OF_RANGE"


class PageCountError(PagesError):
    """Too few or too many page ids for the tokens that they should hold."""

    reason = "PAGE_COUNT"


class PageRepeatedError(PagesError):
    """A page id that a list names twice: one of the two would be lost."""

    reason = "PAGE_REPEATED"


class NullBlockError(PagesError):
    """The engine's null block where bytes would be read or written."""

    reason = "NULL_BLOCK"


class RequestError(RestowError):
    """A call whose arguments are unusable."""

    status = "INVALID_ARGUMENT"
    reason = "ARGUMENT_INVALID"


class WordUnknownError(RestowError):
    """A value that is none of the words that a setting or a value has."""

    status = "INVALID_ARGUMENT"
    reason = "WORD_UNKNOWN"


class EngineUnknownError(RestowError):
    """No engine of that id is registered: register first."""

    status = "NOT_FOUND"
    reason = "ENGINE_UNKNOWN"


class EngineReplacedError(RestowError):
    """A newer incarnation of the engine registered; this one has to stop."""

    status = "ABORTED"
    reason = "ENGINE_REPLACED"


class AgentUnknownError(RestowError):
    """An agent for a rank that the engine's layout does not have."""

    status = "NOT_FOUND"
    reason = "AGENT_UNKNOWN"


class AgentMismatchError(RestowError):
    """An agent whose regions are not those of its rank's layout."""

    status = "INVALID_ARGUMENT"
    reason = "AGENT_REGIONS_MISMATCH"


class AgentReleaseError(RestowError):
    """A broker and an agent whose releases write programs in different forms."""

    status = "FAILED_PRECONDITION"
    reason = "AGENT_RELEASE_DIFFERS"


class SessionReplacedError(RestowError):
    """Another stream of the same life of the engine was opened after this one, or came before it.

    A stream that its client gave up may reach the broker after the next one: so it is opened again.
    """

    status = "ABORTED"
    reason = "SESSION_REPLACED"


class AgentReplacedError(RestowError):
    """A newer stream serves the agent's rank; this one has to stop."""

    status = "ABORTED"
    reason = "AGENT_REPLACED"


class PairNotReadyError(RestowError):
    """Two engines between which nothing can be read now."""

    status = "FAILED_PRECONDITION"
    reason = "PAIR_NOT_READY"


class HandoffUnknownError(RestowError):
    """No handoff of that id is known."""

    status = "NOT_FOUND"
    reason = "HANDOFF_UNKNOWN"


class HandoffOwnedError(RestowError):
    """Another engine owns this side of the handoff."""

    status = "ALREADY_EXISTS"
    reason = "HANDOFF_OWNED"


class HandoffConflictError(RestowError):
    """A repeated call that says something else than the first one."""

    status = "FAILED_PRECONDITION"
    reason = "HANDOFF_CONFLICT"


class ContentMismatchError(RestowError):
    """P's state is of other tokens, or of another adapter, image or salt, than D asks for."""

    status = "FAILED_PRECONDITION"
    reason = "CONTENT_MISMATCH"


class DirectoryFullError(RestowError):
    """The broker holds as many handoffs as it may."""

    status = "RESOURCE_EXHAUSTED"
    reason = "DIRECTORY_FULL"


class QuotaExceededError(RestowError):
    """A tenant holds as much as it may, whatever room the broker has for others."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUOTA_EXCEEDED"


class QueueFullError(RestowError):
    """A peer reads too slowly: its queue of messages is full."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"


class ListenError(RestowError):
    """The broker can't listen on its address: in use, or not of this machine."""

    status = "UNAVAILABLE"
    reason = "LISTEN_FAILED"


class ExtraMissingError(RestowError):
    """A command needs an extra of the distribution that is not installed."""

    status = "FAILED_PRECONDITION"
    reason = "EXTRA_MISSING"


class FileWriteError(RestowError):
    """A file that a command was asked to write, and can't."""

    status = "FAILED_PRECONDITION"
    reason = "FILE_NOT_WRITABLE"
