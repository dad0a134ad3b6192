"""Errors of agents, with their stable reasons."""

from __future__ import annotations

from restow.broker.errors import RestowError


class AgentError(RestowError):
    """Base of the agents' errors."""


class RegionInvalidError(AgentError, status="INVALID_ARGUMENT", reason="REGION_INVALID"):
    """Memory that cannot be a region, or does not lie where it is said to lie."""


class ProgramInvalidError(AgentError, status="INVALID_ARGUMENT", reason="PROGRAM_INVALID"):
    """A program that would touch bytes outside of its pages, or that makes no sense."""


class OrderInvalidError(AgentError, status="FAILED_PRECONDITION", reason="ORDER_INVALID"):
    """An order that does not fit what the broker sent before it."""


class OrderTooLargeError(AgentError, status="RESOURCE_EXHAUSTED", reason="ORDER_TOO_LARGE"):
    """An order that needs more descriptors than an agent makes at once."""


class AgentBusyError(AgentError, status="RESOURCE_EXHAUSTED", reason="AGENT_BUSY"):
    """More orders at once than an agent accepts."""


class StagingExhaustedError(AgentError, status="RESOURCE_EXHAUSTED", reason="STAGING_EXHAUSTED"):
    """A run longer than the whole staging pool: give the agent more staging."""


class ReadNotBegunError(AgentError, status="DEADLINE_EXCEEDED", reason="READ_NOT_BEGUN"):
    """The grant ended before anything was read; the broker may grant again."""


class ReadDeadlineError(AgentError, status="DEADLINE_EXCEEDED", reason="READ_DEADLINE"):
    """The grant ended before the last byte was in place."""


class PeerLostError(AgentError, status="UNAVAILABLE", reason="PEER_LOST"):
    """The peer's process, or the connection to it, is gone."""


class MetadataRefusedError(AgentError, status="FAILED_PRECONDITION", reason="METADATA_REFUSED"):
    """NIXL metadata that is malformed, killed the process that tried it, or names another peer."""


class ReadFailedError(AgentError, status="INTERNAL", reason="READ_FAILED"):
    """The transport refused or broke a read although the peer was not lost."""


class CopyFailedError(AgentError, status="INTERNAL", reason="COPY_FAILED"):
    """Torch or the device failed: out of memory, a broken device, or overlapping rows."""


class DigestMismatchError(AgentError, status="DATA_LOSS", reason="DIGEST_MISMATCH"):
    """The bytes read do not match their source's digest; the state is dropped."""


class DigestMissingError(AgentError, status="FAILED_PRECONDITION", reason="DIGEST_MISSING"):
    """Content was to be compared with a digest that the source did not compute."""


class TransportFailedError(AgentError, status="INTERNAL", reason="TRANSPORT_FAILED"):
    """NIXL could not start, or refused to register memory."""


class CudaUnavailableError(AgentError, status="FAILED_PRECONDITION", reason="CUDA_UNAVAILABLE"):
    """This process does not see the CUDA device, or has no driver that serves it."""


class AgentClosedError(AgentError, status="CANCELLED", reason="AGENT_CLOSED"):
    """The agent was closed before the operation ended."""


class DaemonUnreachableError(AgentError, status="UNAVAILABLE", reason="DAEMON_UNREACHABLE"):
    """No daemon serves the socket: start a daemon with `restow agent`."""
