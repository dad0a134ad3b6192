"""What an agent refuses or reports, with stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class AgentError(RestowError):
    """Base of the agents' errors."""


class RegionInvalidError(AgentError, status="INVALID_ARGUMENT", reason="REGION_INVALID"):
    """Memory that can't be a region, or does not lie where it is said to lie."""


class ProgramInvalidError(AgentError, status="INVALID_ARGUMENT", reason="PROGRAM_INVALID"):
    """A program that would touch bytes outside of its pages, or that says nothing sensible."""


class OrderInvalidError(AgentError, status="FAILED_PRECONDITION", reason="ORDER_INVALID"):
    """An order that does not fit what was sent before it."""


class OrderTooLargeError(AgentError, status="RESOURCE_EXHAUSTED", reason="ORDER_TOO_LARGE"):
    """An order that needs more descriptors than an agent makes at once."""


class AgentBusyError(AgentError, status="RESOURCE_EXHAUSTED", reason="AGENT_BUSY"):
    """More orders at once than an agent takes."""


class StagingExhaustedError(AgentError, status="RESOURCE_EXHAUSTED", reason="STAGING_EXHAUSTED"):
    """A run longer than the whole staging pool: give the agent more staging."""


class ReadNotBegunError(AgentError, status="DEADLINE_EXCEEDED", reason="READ_NOT_BEGUN"):
    """The grant ended before anything was read: it can be given again."""


class ReadDeadlineError(AgentError, status="DEADLINE_EXCEEDED", reason="READ_DEADLINE"):
    """The grant ended before the last byte was in place."""


class PeerLostError(AgentError, status="UNAVAILABLE", reason="PEER_LOST"):
    """The peer's process or the way to it is gone."""


class MetadataRefusedError(AgentError, status="FAILED_PRECONDITION", reason="METADATA_REFUSED"):
    """A peer's NIXL metadata is malformed, killed the process that tried it, or is another's."""


class ReadFailedError(AgentError, status="INTERNAL", reason="READ_FAILED"):
    """The transport refused or broke a read for another reason than a lost peer."""


class CopyFailedError(AgentError, status="INTERNAL", reason="COPY_FAILED"):
    """Torch or the device failed: no memory is left, the device broke, or rows overlap."""


class DigestMismatchError(AgentError, status="DATA_LOSS", reason="DIGEST_MISMATCH"):
    """What was read is not what its source hashed before: the state is thrown away."""


class DigestMissingError(AgentError, status="FAILED_PRECONDITION", reason="DIGEST_MISSING"):
    """Content was to be compared with a digest that the source did not make."""


class TransportFailedError(AgentError, status="INTERNAL", reason="TRANSPORT_FAILED"):
    """NIXL could not be set up, or would not register memory."""


class CudaUnavailableError(AgentError, status="FAILED_PRECONDITION", reason="CUDA_UNAVAILABLE"):
    """No such CUDA device here, or no driver that serves it."""


class AgentClosedError(AgentError, status="CANCELLED", reason="AGENT_CLOSED"):
    """The agent was closed before it was done."""


class DaemonUnreachableError(AgentError, status="UNAVAILABLE", reason="DAEMON_UNREACHABLE"):
    """No daemon serves the socket: start one with `restow agent`."""
