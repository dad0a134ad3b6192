"""The calls to etcd.

Each may be made twice, as its first answer may be lost: a `txn` has to be such that its second turn
shows what the first one did.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc

from restow.broker.client.connection.errors import begun
from restow.broker.etcd.access import EtcdAccess
from restow.broker.etcd.asking import WITH_LEADER, Asking, Metadata, Patience
from restow.broker.etcd.errors import (
    CompactedError,
    EtcdError,
    EtcdTooOldError,
    EtcdUnreachableError,
    LeaseGoneError,
)
from restow.etcd import rpc_pb2, rpc_pb2_grpc

OLDEST = (3, 4)
"""Before it watches did not say how far they are."""
PATIENCE = Patience()


class MemberStatus(NamedTuple):
    """What one member says of itself."""

    endpoint: str
    version: str
    leads: bool
    has_leader: bool


class EtcdClient:
    """Asks an etcd. On one loop; `close` it in the end.

    All calls raise an `EtcdError`, and `KeyFileError` or `EtcdSettingsError` for files of
    ours that can't be used.
    """

    def __init__(self, access: EtcdAccess, patience: Patience = PATIENCE) -> None:
        """Prepare: the first call connects."""
        self._asking = Asking(access, patience)

    async def close(self) -> None:
        """End all calls. May be repeated."""
        await self._asking.endpoints.close()

    async def range(self, key: bytes, range_end: bytes = b"") -> rpc_pb2.RangeResponse:
        """Read a key, or all of ``[key, range_end)``: what is newest, not what one member knows."""
        request = rpc_pb2.RangeRequest(key=key, range_end=range_end)
        return await self._asking.any(
            lambda channel, how, s: rpc_pb2_grpc.KVStub(channel).Range(
                request, metadata=how, timeout=s
            )
        )

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> rpc_pb2.PutResponse:
        """Write a key. Raises `LeaseGoneError`, too."""
        request = rpc_pb2.PutRequest(key=key, value=value, lease=lease)
        return await self._asking.any(
            lambda channel, how, s: rpc_pb2_grpc.KVStub(channel).Put(
                request, metadata=how, timeout=s
            )
        )

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
        return await self._asking.any(
            lambda channel, how, s: rpc_pb2_grpc.KVStub(channel).Txn(
                request, metadata=how, timeout=s
            )
        )

    async def grant(self, ttl_s: int) -> rpc_pb2.LeaseGrantResponse:
        """Make a lease, of ``ttl_s`` or of as long as etcd makes them at least.

        If an answer is lost, one is left that nobody keeps alive: it ends by itself.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_s)
        return await self._asking.any(
            lambda channel, how, s: rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(
                request, metadata=how, timeout=s
            )
        )

    async def keep_alive(self, lease: int) -> int:
        """Have a lease begin anew, and return its seconds. Raises `LeaseGoneError`, too."""
        ttl_s = await self._asking.any(
            lambda channel, how, s: _keep_alive(rpc_pb2_grpc.LeaseStub(channel), lease, how, s)
        )
        if ttl_s <= 0:
            raise LeaseGoneError("the lease has ended", lease=lease)
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys; one that has ended is left alone."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(LeaseGoneError):
            await self._asking.any(
                lambda channel, how, s: rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(
                    request, metadata=how, timeout=s
                )
            )

    async def watch(
        self, key: bytes, range_end: bytes, start_revision: int
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        """Yield what happens to keys of ``[key, range_end)`` from a revision on, in its order.

        Answers without events say that it goes on. It ends with an `EtcdError` when the member that
        is asked is lost, stands still or knows no leader: then watch again from the revision behind
        the last one seen (`CompactedError`: after reading what there is now).
        """
        endpoint = self._asking.endpoints.current
        channel = await self._asking.endpoints.channel(endpoint)
        how = await self._asking.metadata(channel, endpoint)
        stream = rpc_pb2_grpc.WatchStub(channel).Watch(metadata=how)
        patience = self._asking.patience
        silent_s = patience.watch_every_s + patience.watch_answer_s
        watched = rpc_pb2.WatchCreateRequest(
            key=key, range_end=range_end, start_revision=start_revision
        )
        asked = asyncio.create_task(_ask_how_far(stream, watched, patience.watch_every_s))
        try:
            with self._asking.failures(endpoint):
                async with asyncio.timeout(silent_s):
                    await begun(stream)
                while True:
                    async with asyncio.timeout(silent_s):
                        answer = await stream.read()
                    if not isinstance(answer, rpc_pb2.WatchResponse):
                        code, details = await stream.code(), await stream.details()
                        raise self._asking.failed(endpoint, code, details)
                    if answer.compact_revision:
                        raise CompactedError(
                            f"etcd remembers changes from {answer.compact_revision} on alone",
                            revision=answer.compact_revision,
                        )
                    if answer.canceled:
                        code = grpc.StatusCode.UNAVAILABLE
                        raise self._asking.failed(endpoint, code, answer.cancel_reason)
                    yield answer
        except TimeoutError:
            self._asking.endpoints.give_up(endpoint)
            raise EtcdUnreachableError(
                f"a watch at etcd {endpoint} answers no more", endpoint=endpoint
            ) from None
        finally:
            asked.cancel()
            stream.cancel()

    async def statuses(self) -> list[MemberStatus]:
        """What each member that answers says of itself.

        Raises what the last one failed with if none answers, and `EtcdTooOldError`.
        """
        found, told = list[MemberStatus](), EtcdError("no member was asked")
        for endpoint in self._asking.endpoints:
            try:
                found.append(await self._status(endpoint))
            except EtcdTooOldError:
                raise
            except EtcdError as error:
                told = await self._explained(error)
        if not found:
            raise told
        return found

    async def _status(self, endpoint: str) -> MemberStatus:
        said = await self._asking.one(
            endpoint,
            lambda channel, how, s: rpc_pb2_grpc.MaintenanceStub(channel).Status(
                rpc_pb2.StatusRequest(),
                metadata=tuple(one for one in how if one != WITH_LEADER),
                timeout=s,
            ),
            self._asking.patience.call_s,
        )
        if release_of(said.version) < OLDEST:
            raise EtcdTooOldError(
                f"etcd at {endpoint} is of release {said.version}: 3.4 or a later one is needed",
                endpoint=endpoint,
                version=said.version,
            )
        leads = said.leader == said.header.member_id
        return MemberStatus(endpoint, said.version, leads, said.leader != 0)

    async def _explained(self, error: EtcdError) -> EtcdError:
        """The error; of an etcd that was not reached, with what is the matter with TLS, if so."""
        endpoint = error.subject.get("endpoint", "")
        if not isinstance(error, EtcdUnreachableError) or not endpoint:
            return error
        words = await self._asking.endpoints.about_tls(endpoint)
        return EtcdUnreachableError(f"{error.message}{words}", endpoint=endpoint)


async def _keep_alive(
    stub: rpc_pb2_grpc.LeaseAsyncStub, lease: int, how: Metadata, timeout_s: float
) -> int:
    """Ask once, in a stream of its own: what answers is the answer to this and no earlier one."""
    stream = stub.LeaseKeepAlive(metadata=how, timeout=timeout_s)
    answer: object = None
    with contextlib.suppress(asyncio.InvalidStateError):  # it may end before it is written to
        await stream.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
        await begun(stream)
        answer = await stream.read()
    if isinstance(answer, rpc_pb2.LeaseKeepAliveResponse):
        stream.cancel()
        return int(answer.TTL)
    nothing = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(await stream.code(), nothing, nothing, await stream.details())


async def _ask_how_far(
    stream: grpc.aio.StreamStreamCall[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse],
    watched: rpc_pb2.WatchCreateRequest,
    every_s: float,
) -> None:
    """Begin a watch, and ask from time to time; why that fails is told to who reads."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.write(rpc_pb2.WatchRequest(create_request=watched))
        while True:
            await asyncio.sleep(every_s)
            how_far = rpc_pb2.WatchProgressRequest()
            await stream.write(rpc_pb2.WatchRequest(progress_request=how_far))


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a release; of what is none (0, 0).

    >>> release_of("3.5.1"), release_of("4.0-rc"), release_of("?")
    ((3, 5), (4, 0), (0, 0))
    """
    parts = (version.replace("-", ".") + ".0").split(".")[:2]
    if not all(one.isdecimal() for one in parts):
        return (0, 0)
    return (int(parts[0]), int(parts[1]))
