"""Calls to etcd. They go to one member until it fails, then to the next member.

An answer may be lost and its call repeated, so write each `txn` in a way that its repetition
returns what the first attempt returned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import grpc

from restow.broker.addresses import host_and_port
from restow.broker.client.connection.channel import OWN_PROCESS, Credentials, channel_showing
from restow.broker.client.connection.diagnosis import try_tls
from restow.broker.client.connection.errors import begun, is_cancelled
from restow.broker.errors import AddressInvalidError
from restow.broker.registry.etcd_access import (
    EtcdAccess,
    EtcdError,
    EtcdNoLeaderError,
    EtcdTooOldError,
    EtcdUnreachableError,
    LeaseGoneError,
    TokenEndedError,
    typed_error,
)
from restow.broker.registry.registry import Timing
from restow.broker.trust.key_files import Stamp
from restow.etcd import rpc_pb2, rpc_pb2_grpc

_ABOUT_CERTIFICATE = ": does it accept a certificate of ours (--etcd-cert, --etcd-key)?"
_NOT_SPOKEN = ": it speaks no TLS, which --etcd-ca asks for"
_NOT_ASKED = ": it speaks TLS, and was asked in plaintext (--etcd-ca)"
_OPTIONS = (
    # No pings: etcd refuses more than one ping in five seconds, and calls have their own timeouts.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


class Endpoints:
    """Channels to the members of an etcd, reopened when certificates change. Use on one loop."""

    def __init__(self, addresses: tuple[str, ...], credentials: Credentials) -> None:
        """Prepare; the first call of `channel` opens a channel."""
        self._addresses, self._credentials = addresses, credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stamp: Stamp = ()
        self._index = 0

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._addresses)

    def __iter__(self) -> Iterator[str]:
        """Return the addresses of all members, in the given order."""
        return iter(self._addresses)

    @property
    def current(self) -> str:
        """The address of the member that is asked first."""
        return self._addresses[self._index]

    def give_up(self, address: str) -> None:
        """Ask the next member first, if ``address`` is the current member."""
        if address == self.current:
            self._index = (self._index + 1) % len(self._addresses)

    async def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to a member. Raises `KeyFileError` and `ForkedError`."""
        OWN_PROCESS.check()
        stamp = self._credentials.stamp()
        if stamp != self._stamp:
            await self.close()
            self._stamp = stamp
        if address not in self._channels:
            self._channels[address] = channel_showing(
                self._credentials, grpc.aio, address, _OPTIONS
            )
        return self._channels[address]

    async def close(self) -> None:
        """Close all channels. May be repeated."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def about_tls(self, address: str) -> str:
        """Return in words what is wrong with TLS; an empty text if nothing is.

        gRPC only says that the connection failed.
        """
        try:
            host, port = host_and_port(address)
        except AddressInvalidError:  # gRPC's own forms
            return ""
        try:
            shown = await asyncio.to_thread(try_tls, host, port, self._credentials)
        except (OSError, ValueError):
            return ""
        if not self._credentials.secure:
            return _NOT_ASKED if shown.speaks_tls else ""
        if shown.why_rejected:
            return f": its certificate is not accepted here, {shown.why_rejected} (--etcd-ca)"
        return _ABOUT_CERTIFICATE if shown.speaks_tls else _NOT_SPOKEN


WITH_LEADER = ("hasleader", "true")
"""Makes a member without a leader fail at once instead of waiting for a leader."""

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
Call = Callable[[grpc.aio.Channel, Metadata, float], Awaitable[T]]
"""Makes a call with metadata and a timeout in seconds; may raise `grpc.aio.AioRpcError`."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for etcd."""

    call_s: float = 2.0
    """For a call, over all members."""
    try_s: float = 0.5
    """For one member's answer."""
    pause_s: float = 0.05
    """Pause before members are asked again."""


class EtcdCalls:
    """Makes calls to whichever member answers. Use on one loop."""

    def __init__(self, access: EtcdAccess, patience: Patience) -> None:
        """Prepare; the first call connects."""
        self.endpoints = Endpoints(access.endpoints, access.credentials())
        self.patience = patience
        self._access = access
        self._token = ""

    async def any(self, call: Call[T]) -> T:
        """Call any member. Raises an `EtcdError`, `KeyFileError` or `EtcdSettingsError`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.patience.call_s
        told: EtcdError = EtcdUnreachableError("there was no time to ask etcd")
        asked = 0
        while (left_s := due_s - loop.time()) > 0:
            try:
                return await self.ask(
                    self.endpoints.current, call, min(self.patience.try_s, left_s)
                )
            except (EtcdUnreachableError, EtcdNoLeaderError) as error:
                # An answer without a leader says more than no answer.
                if asked == 0 or not isinstance(error, EtcdUnreachableError):
                    told = error
            asked += 1
            if asked % len(self.endpoints) == 0:
                await asyncio.sleep(min(self.patience.pause_s, max(due_s - loop.time(), 0)))
        raise told

    async def ask(self, endpoint: str, call: Call[T], timeout_s: float) -> T:
        """Call this member. Raises like `any`."""
        channel = await self.endpoints.channel(endpoint)
        had_token = bool(self._token)
        try:
            with self.failures(endpoint):
                return await call(channel, await self.metadata(channel, endpoint), timeout_s)
        except TokenEndedError:
            if not had_token:
                raise
        return await self.ask(endpoint, call, timeout_s)

    async def metadata(self, channel: grpc.aio.Channel, endpoint: str) -> Metadata:
        """Return the metadata of a call, after a login if needed. Raises like `any`."""
        if self._access.user and not self._token:
            request = rpc_pb2.AuthenticateRequest(
                name=self._access.user, password=self._access.password()
            )
            with self.failures(endpoint):
                try:
                    said = await rpc_pb2_grpc.AuthStub(channel).Authenticate(
                        # Passwords are slow to compare, on purpose.
                        request,
                        metadata=(WITH_LEADER,),
                        timeout=self.patience.call_s,
                    )
                except grpc.aio.AioRpcError as error:
                    if "authentication is not enabled" in (error.details() or ""):
                        return (WITH_LEADER,)
                    raise
            self._token = said.token
        return (WITH_LEADER, ("token", self._token)) if self._token else (WITH_LEADER,)

    @contextlib.contextmanager
    def failures(self, endpoint: str) -> Iterator[None]:
        """Raise the typed error of a call that fails inside the ``with``."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.failed(endpoint, error.code(), error.details() or "") from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise EtcdUnreachableError(
                f"the connection to etcd {endpoint} was closed because certificates were renewed",
                endpoint=endpoint,
            ) from None

    def failed(self, endpoint: str, code: grpc.StatusCode, details: str) -> EtcdError:
        """Return the typed error. The next call asks another member if this member has failed."""
        error = typed_error(code, details, endpoint)
        if isinstance(error, TokenEndedError):
            self._token = ""
        if isinstance(error, EtcdUnreachableError | EtcdNoLeaderError):
            self.endpoints.give_up(endpoint)
        return error


OLDEST = (3, 4)
"""Older releases have other calls, and nobody tests them."""
PATIENCE = Patience()


def patience_for(timing: Timing) -> Patience:
    """Return how long calls may take. Answers after the end of the lease are useless."""
    return Patience(call_s=timing.lease_s, try_s=timing.lease_s / 2)


class MemberStatus(NamedTuple):
    """The status of a member of etcd."""

    endpoint: str
    version: str
    leads: bool
    has_leader: bool
    errors: tuple[str, ...] = ()
    """Alarms. NOSPACE: the member's quota is used up, and it writes nothing."""


class EtcdClient:
    """A client of etcd. Use it on one loop, and `close` it in the end.

    All calls raise an `EtcdError`, and `KeyFileError` or `EtcdSettingsError` for files that
    cannot be used.
    """

    def __init__(self, access: EtcdAccess, patience: Patience = PATIENCE) -> None:
        """Prepare; the first call connects."""
        self._asking = EtcdCalls(access, patience)

    async def close(self) -> None:
        """End all calls. May be repeated."""
        await self._asking.endpoints.close()

    async def _any(
        self, method: Callable[[grpc.aio.Channel], Callable[..., Awaitable[T]]], request: object
    ) -> T:
        """Call a method of one message and one answer, of any member."""
        return await self._asking.any(
            lambda channel, metadata, timeout_s: method(channel)(
                request, metadata=metadata, timeout=timeout_s
            )
        )

    async def range(self, key: bytes, range_end: bytes = b"") -> rpc_pb2.RangeResponse:
        """Read a key, or ``[key, range_end)``, as the majority of members has it."""
        request = rpc_pb2.RangeRequest(key=key, range_end=range_end)
        return await self._any(lambda channel: rpc_pb2_grpc.KVStub(channel).Range, request)

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> rpc_pb2.PutResponse:
        """Write a key. Raises `LeaseGoneError`, too."""
        request = rpc_pb2.PutRequest(key=key, value=value, lease=lease)
        return await self._any(lambda channel: rpc_pb2_grpc.KVStub(channel).Put, request)

    async def txn(
        self,
        compare: Sequence[rpc_pb2.Compare],
        success: Sequence[rpc_pb2.RequestOp],
        failure: Sequence[rpc_pb2.RequestOp] = (),
    ) -> rpc_pb2.TxnResponse:
        """Do ``success`` if all of ``compare`` holds, else ``failure``, at once.

        Raises `LeaseGoneError`, too.
        """
        request = rpc_pb2.TxnRequest(compare=compare, success=success, failure=failure)
        return await self._any(lambda channel: rpc_pb2_grpc.KVStub(channel).Txn, request)

    async def grant(self, ttl_s: int) -> rpc_pb2.LeaseGrantResponse:
        """Make a lease of ``ttl_s``, or of etcd's minimum if that is longer.

        If the answer is lost, its lease ends by itself because nobody keeps it alive.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)
        return await self._any(lambda channel: rpc_pb2_grpc.LeaseStub(channel).LeaseGrant, request)

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease, and return its length in seconds. Raises `LeaseGoneError`, too."""
        ttl_s = await self._asking.any(
            lambda channel, metadata, timeout_s: _keep_alive(
                rpc_pb2_grpc.LeaseStub(channel), lease, metadata, timeout_s
            )
        )
        if ttl_s <= 0:
            raise LeaseGoneError("the lease has ended", lease=lease)
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Ignores a lease that has ended."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(LeaseGoneError):
            await self._any(lambda channel: rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke, request)

    async def statuses(self) -> list[MemberStatus]:
        """Return the status of each member that answers.

        Raises the last member's error if no member answers, and `EtcdTooOldError`.
        """
        statuses, told = list[MemberStatus](), EtcdError("no member was asked")
        for endpoint in self._asking.endpoints:
            try:
                statuses.append(await self._status(endpoint))
            except EtcdTooOldError:
                raise
            except EtcdError as error:
                told = await self._explained(error)
        if not statuses:
            raise told
        return statuses

    async def warnings(self) -> tuple[str, ...]:
        """Return the alarms of etcd's members, such as NOSPACE. Raises like `statuses`."""
        statuses = await self.statuses()
        return tuple(
            f"{status.endpoint}: {words}" for status in statuses for words in status.errors
        )

    async def _status(self, endpoint: str) -> MemberStatus:
        said = await self._asking.ask(
            endpoint,
            lambda channel, metadata, timeout_s: rpc_pb2_grpc.MaintenanceStub(channel).Status(
                rpc_pb2.StatusRequest(),
                metadata=tuple(pair for pair in metadata if pair != WITH_LEADER),
                timeout=timeout_s,
            ),
            self._asking.patience.call_s,
        )
        if release_of(said.version) < OLDEST:
            raise EtcdTooOldError(
                f"etcd at {endpoint} is of release {said.version}: 3.4 or later is needed",
                endpoint=endpoint,
                version=said.version,
            )
        leads = said.leader == said.header.member_id
        return MemberStatus(endpoint, said.version, leads, said.leader != 0, tuple(said.errors))

    async def _explained(self, error: EtcdError) -> EtcdError:
        """Return the error, with a note on TLS if etcd was not reached because of TLS."""
        endpoint = error.subject.get("endpoint", "")
        if not isinstance(error, EtcdUnreachableError) or not endpoint:
            return error
        words = await self._asking.endpoints.about_tls(endpoint)
        return EtcdUnreachableError(f"{error.message}{words}", endpoint=endpoint)


async def _keep_alive(
    stub: rpc_pb2_grpc.LeaseAsyncStub, lease: int, metadata: Metadata, timeout_s: float
) -> int:
    """Renew a lease on a new stream, so that its answer belongs to this call."""
    stream = stub.LeaseKeepAlive(metadata=metadata, timeout=timeout_s)
    answer: object = None
    with contextlib.suppress(asyncio.InvalidStateError):  # the stream may have ended
        await stream.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
        await begun(stream)
        answer = await stream.read()
    if isinstance(answer, rpc_pb2.LeaseKeepAliveResponse):
        stream.cancel()
        return int(answer.TTL)
    nothing = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(await stream.code(), nothing, nothing, await stream.details())


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a release, or (0, 0) if the text is no release.

    >>> release_of("3.5.1"), release_of("4.0-rc"), release_of("?")
    ((3, 5), (4, 0), (0, 0))
    """
    parts = (version.replace("-", ".") + ".0").split(".")[:2]
    if not all(part.isdecimal() for part in parts):
        return (0, 0)
    return (int(parts[0]), int(parts[1]))
