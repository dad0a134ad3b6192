"""What an agent refuses or reports, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class AgentError(RestowError):
    """Base of the agents' errors."""


class RegionInvalidError(AgentError):
    """Memory that can't be a region, or does not lie where it is said to lie."""

    status = "INVALID_ARGUMENT"
    reason = "REGION_INVALID"


class ProgramInvalidError(AgentError):
    """A program that would touch bytes outside of its pages, or that says nothing sensible."""

    status = "INVALID_ARGUMENT"
    reason = "PROGRAM_INVALID"


class OrderInvalidError(AgentError):
    """An order that does not fit what was sent before it."""

    status = "FAILED_PRECONDITION"
    reason = "ORDER_INVALID"


class OrderTooLargeError(AgentError):
    """An order that needs more descriptors than an agent makes at once."""

    status = "RESOURCE_EXHAUSTED"
    reason = "ORDER_TOO_LARGE"


class AgentBusyError(AgentError):
    """More orders at once than an agent takes."""

    status = "RESOURCE_EXHAUSTED"
    reason = "AGENT_BUSY"


class StagingExhaustedError(AgentError):
    """A run longer than the whole staging pool: give the agent more staging."""

    status = "RESOURCE_EXHAUSTED"
    reason = "STAGING_EXHAUSTED"


class ReadNotBegunError(AgentError):
    """The grant ended before anything was read: it can be given again."""

    status = "DEADLINE_EXCEEDED"
    reason = "READ_NOT_BEGUN"


class ReadDeadlineError(AgentError):
    """The grant ended before the last byte was in place."""

    status = "DEADLINE_EXCEEDED"
    reason = "READ_DEADLINE"


class PeerLostError(AgentError):
    """The peer's process or the way to it is gone."""

    status = "UNAVAILABLE"
    reason = "PEER_LOST"


class ReadFailedError(AgentError):
    """The transport refused or broke a read for another reason than a lost peer."""

    status = "INTERNAL"
    reason = "READ_FAILED"


class CopyFailedError(AgentError):
    """The kernels could not copy: rows overlap, or the device broke."""

    status = "INTERNAL"
    reason = "COPY_FAILED"


class DigestMismatchError(AgentError):
    """What was read is not what its source hashed before: the state is thrown away."""

    status = "DATA_LOSS"
    reason = "DIGEST_MISMATCH"


class DigestMissingError(AgentError):
    """Content was to be compared with a digest that the source did not make."""

    status = "FAILED_PRECONDITION"
    reason = "DIGEST_MISSING"


class TransportFailedError(AgentError):
    """NIXL could not be set up, or would not register memory."""

    status = "INTERNAL"
    reason = "TRANSPORT_FAILED"


class CudaUnavailableError(AgentError):
    """No such CUDA device here, or no driver that serves it."""

    status = "FAILED_PRECONDITION"
    reason = "CUDA_UNAVAILABLE"


class AgentClosedError(AgentError):
    """The agent was closed before it was done."""

    status = "CANCELLED"
    reason = "AGENT_CLOSED"


class DaemonUnreachableError(AgentError):
    """No daemon serves the socket: start one with `restow agent`."""

    status = "UNAVAILABLE"
    reason = "DAEMON_UNREACHABLE"
