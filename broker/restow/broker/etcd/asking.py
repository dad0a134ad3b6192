"""How a call is made: of one member after another, with a token, until one answers or time is over.

An answer may be lost and its call made again: so only what may be done twice is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc

from restow.broker.client.connection.errors import is_cancelled
from restow.broker.etcd.access import EtcdAccess
from restow.broker.etcd.endpoints import Endpoints
from restow.broker.etcd.errors import (
    EtcdError,
    EtcdNoLeaderError,
    EtcdUnreachableError,
    TokenEndedError,
    typed_error,
)
from restow.etcd import rpc_pb2, rpc_pb2_grpc

WITH_LEADER = ("hasleader", "true")
"""Has a member that knows no leader say so at once, where it would wait for one."""

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]
Call = Callable[[grpc.aio.Channel, Metadata, float], Awaitable[T]]
"""Makes a call with this metadata, within so many seconds; may raise `grpc.aio.AioRpcError`."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for etcd."""

    call_s: float = 2.0
    """For a call, on all members together."""
    try_s: float = 0.5
    """For one member's answer."""
    pause_s: float = 0.05
    """Before members are asked once more."""
    watch_every_s: float = 1.0
    """A watch is asked so often how far it is."""
    watch_answer_s: float = 2.0
    """One that does not answer for so long is given up."""


class Asking:
    """Makes calls. On one loop."""

    def __init__(self, access: EtcdAccess, patience: Patience) -> None:
        """Prepare: the first call connects."""
        self.endpoints = Endpoints(access.endpoints, access.credentials())
        self.patience = patience
        self._access = access
        self._token = ""

    async def any(self, call: Call[T]) -> T:
        """Have one member answer. Raises an `EtcdError`, `KeyFileError` or `EtcdSettingsError`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.patience.call_s
        told: EtcdError = EtcdUnreachableError("there was no time to ask etcd")
        asked = 0
        while (left_s := due_s - loop.time()) > 0:
            try:
                return await self.one(
                    self.endpoints.current, call, min(self.patience.try_s, left_s)
                )
            except (EtcdUnreachableError, EtcdNoLeaderError) as error:
                # That somebody answered says more than that another one did not.
                if asked == 0 or not isinstance(error, EtcdUnreachableError):
                    told = error
            asked += 1
            if asked % len(self.endpoints) == 0:
                await asyncio.sleep(min(self.patience.pause_s, max(due_s - loop.time(), 0)))
        raise told

    async def one(self, endpoint: str, call: Call[T], timeout_s: float) -> T:
        """Have this member answer. Raises like `any`."""
        channel = await self.endpoints.channel(endpoint)
        had_token = bool(self._token)
        try:
            with self.failures(endpoint):
                return await call(channel, await self.metadata(channel, endpoint), timeout_s)
        except TokenEndedError:
            if not had_token:
                raise
        return await self.one(endpoint, call, timeout_s)

    async def metadata(self, channel: grpc.aio.Channel, endpoint: str) -> Metadata:
        """What a call is made with. Raises like `any`."""
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
                        return (WITH_LEADER,)  # it is about to be, perhaps
                    raise
            self._token = said.token
        return (WITH_LEADER, ("token", self._token)) if self._token else (WITH_LEADER,)

    @contextlib.contextmanager
    def failures(self, endpoint: str) -> Iterator[None]:
        """Raise the typed error of a call that fails inside."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.failed(endpoint, error.code(), error.details() or "") from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise EtcdUnreachableError(
                f"the connection to etcd {endpoint} was given up, for certificates were renewed",
                endpoint=endpoint,
            ) from None

    def failed(self, endpoint: str, code: grpc.StatusCode, details: str) -> EtcdError:
        """The typed error; the next call asks another member if this one is of no use now."""
        error = typed_error(code, details, endpoint)
        if isinstance(error, TokenEndedError):
            self._token = ""
        if isinstance(error, EtcdUnreachableError | EtcdNoLeaderError):
            self.endpoints.give_up(endpoint)
        return error
