"""Why etcd did not do what it was asked. No message holds a password or a token."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from restow.broker.errors import RestowError


class EtcdError(RestowError, status="UNAVAILABLE", reason="ETCD_FAILED"):
    """Base of all errors of calls to etcd; by itself: etcd's own words, which name no other one."""


class EtcdUnreachableError(EtcdError, reason="ETCD_UNREACHABLE"):
    """No etcd answers, or none in time: what was asked may have been done, or be done yet."""


class EtcdNoLeaderError(EtcdError, reason="ETCD_NO_LEADER"):
    """An etcd answers and nobody leads it: it can't agree on anything until a leader is found."""


class EtcdRefusedError(EtcdError, status="PERMISSION_DENIED", reason="ETCD_REFUSED"):
    """Who called is not known there, or may not do what was asked."""


class TokenEndedError(EtcdError, reason="ETCD_TOKEN_ENDED"):
    """A token that etcd knows no more: the next call brings another one."""


class EtcdTooOldError(EtcdError, status="FAILED_PRECONDITION", reason="ETCD_TOO_OLD"):
    """Its release lacks what is needed."""


class LeaseGoneError(EtcdError, status="NOT_FOUND", reason="ETCD_LEASE_GONE"):
    """A lease that has ended; its keys are deleted."""


class CompactedError(EtcdError, status="OUT_OF_RANGE", reason="ETCD_COMPACTED"):
    """Changes that etcd has forgotten: read what there is now, and watch from there."""


class EtcdSettingsError(RestowError, status="FAILED_PRECONDITION", reason="ETCD_SETTINGS_INVALID"):
    """Settings of endpoints, TLS and passwords that do not go together."""


_TOKEN_ENDED = ("invalid auth token", "revision of auth store is old")
_LEADERLESS = ("no leader", "leader changed", "leader failure", "not leader")
_UNKNOWN_USER = ("authentication failed", "user name is empty", "permission denied")
"""A watch that is refused has no code of its own."""
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # What gRPC says of calls that broke on their way.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


def _has(details: str, words: Sequence[str]) -> bool:
    """Whether one of the words stands in what etcd says: it has no other name for most errors."""
    return any(word in details for word in words)


def typed_error(code: grpc.StatusCode, details: str, endpoint: str) -> EtcdError:
    """The error that a failed call stands for."""
    if _has(details, _LEADERLESS):
        return EtcdNoLeaderError(
            f"etcd at {endpoint} has no leader ({details}): are most of its members there, and do "
            f"they reach each other? It goes on by itself",
            endpoint=endpoint,
        )
    if _has(details, _TOKEN_ENDED):
        return TokenEndedError(f"etcd at {endpoint} knows the token no more", endpoint=endpoint)
    if _has(details, ("lease not found",)):
        return LeaseGoneError("the lease has ended", endpoint=endpoint)
    if _has(details, ("has been compacted",)):
        return CompactedError("etcd has forgotten these changes", endpoint=endpoint)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or _has(
        details, _UNKNOWN_USER
    ):
        return EtcdRefusedError(
            f"etcd at {endpoint} refuses the call ({details}): name a user and its password "
            f"(--etcd-user, --etcd-password-file) that may read and write the keys of the brokers",
            endpoint=endpoint,
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return EtcdTooOldError(
            f"what listens at {endpoint} has no such call ({details}): it is no etcd of 3.4 or "
            f"later",
            endpoint=endpoint,
        )
    if code in _PASSING:
        return EtcdUnreachableError(
            f"no etcd answers at {endpoint} ({code.name}: {details})", endpoint=endpoint
        )
    return EtcdError(f"etcd at {endpoint} refuses: {code.name}: {details}", endpoint=endpoint)
