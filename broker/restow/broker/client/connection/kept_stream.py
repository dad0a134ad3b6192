"""A stream that is opened again whenever it breaks, for engines, agents and daemons' clients."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import grpc

from restow.broker.client.connection.brokers import Backoff, Brokers, EpochOverError
from restow.broker.client.connection.channel import Credentials, RenewedChannel
from restow.broker.client.connection.diagnosis import explained_soon
from restow.broker.client.connection.errors import (
    MAY_PASS,
    NoWelcomeError,
    OtherServerError,
    begun,
    decoded,
    end_task,
    from_rpc_error,
    unreachable,
)
from restow.broker.errors import MessageTooLargeError, RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc.sizes import Sized, check_size, take_batch
from restow.broker.trust.errors import TrustError

UNKNOWN_PAUSE_S = 0.25

Message = TypeVar("Message", bound=Sized)
Request = TypeVar("Request", bound=Sized)
Response = TypeVar("Response")


class KeptStream(ABC, Generic[Message, Request, Response]):
    """Keeps a stream open. Belongs to one event loop, on which all methods run."""

    max_batch = 1024
    """Messages in a batch at most."""

    def __init__(self, address: str, log_name: str, credentials: Credentials) -> None:
        """Prepare; `start` connects."""
        self.refusal: RestowError | None = None
        """Why the stream is not open, or None if the server has not said."""
        self.brokers = Brokers(address)
        """The servers that may be on the other side."""
        self.channel = RenewedChannel(self.brokers, credentials)
        self._credentials = credentials
        self._outbox: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._open = asyncio.Event()
        self._connected = False
        self.was_open = False
        """Whether a server has given its welcome at least once."""
        self._backoff = Backoff()
        self._runner: asyncio.Task[None] | None = None
        self._log = get_logger(log_name).bind(address=address)

    async def prepare(self) -> None:
        """Make the calls that must come before the stream, on `channel`, which is connected.

        Raises a `RestowError` or `grpc.aio.AioRpcError` if no stream can be opened now.
        """

    @abstractmethod
    def call(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Request, Response]:
        """Begin the call."""

    @abstractmethod
    async def opening(self) -> Request:
        """Return the first batch."""

    @abstractmethod
    def batch(self, messages: Sequence[Message]) -> Request:
        """Return a batch of messages."""

    @abstractmethod
    def hear(self, response: Response) -> None:
        """Handle a response; call `opened` on the welcome."""

    def begin(self) -> None:
        """Connect, without waiting; `refusal` has the reason if the server refuses."""
        self._runner = asyncio.create_task(self._run(patient=True))

    async def start(self, timeout_s: float) -> None:
        """Connect, and wait for the welcome.

        Raises `BrokerCallError` with the server's reason if it refuses, `BrokerUnreachableError` if
        nobody answers within ``timeout_s``, `NoWelcomeError` if the server answers but still waits
        for the engine, a `TrustError` for unusable files, and `MessageTooLargeError` if the first
        message cannot be sent. The stream is closed then.
        """
        runner = self._runner = asyncio.create_task(self._run(patient=False))
        welcome = asyncio.create_task(self._open.wait())
        await asyncio.wait(
            {runner, welcome}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._open.is_set():
            welcome.cancel()
            refusal = self.refusal or self.late(timeout_s)
            await self.close()
            raise await explained_soon(refusal, self.brokers.current, self._credentials)

    @property
    def is_open(self) -> bool:
        """Whether the server has given its welcome."""
        return self._open.is_set()

    def opened(self) -> None:
        """Note that the server has given its welcome."""
        self._backoff.began()
        self.brokers.works()
        self.refusal = None
        self.was_open = True
        self._open.set()

    def send(self, message: Message) -> bool:
        """Queue a message; return False if no stream is open.

        The message is lost if the stream breaks before it is written.
        """
        if self._open.is_set():
            self._outbox.append(message)
            self._wake.set()
        return self._open.is_set()

    def give_up(self, refusal: RestowError) -> None:
        """End the stream for good, for the reason given."""
        self._broke(refusal)
        if self._runner is not None:
            self._runner.cancel()

    async def close(self) -> None:
        """End the stream, and close its channel. May be called again."""
        runner, self._runner = self._runner, None
        try:
            if runner is not None:
                await end_task(runner)
                await self.leave()
        finally:
            await self.channel.close()

    async def leave(self) -> None:
        """Tell the server that no stream follows, before the channel is closed."""

    def lost(self, refusal: RestowError) -> None:
        """Note that the stream has ended for good, after it had been open."""

    # -- inside -----------------------------------------------------------------------------------

    async def _run(self, patient: bool) -> None:
        """Open a stream again and again, until the server says that retrying is useless.

        If not ``patient``, a caller waits for the first stream; then a wrong server ends it too.
        """
        while True:
            moved = False
            try:
                if await self.channel.connects():
                    self._connected = True
                    await self.prepare()
                    await self._stream(await self.channel.channel())
                    self._log.warning("the server ended the stream")
                else:
                    self._broke(self._unreached("not connected in time"))
                    # With a single server, the attempt to connect has taken time already.
                    moved = not self.brokers.several
            except grpc.aio.AioRpcError as error:
                refusal = from_rpc_error(error, self.brokers.current, self._credentials.secure)
                self._broke(refusal)
                moved = self.brokers.refused(refusal)
            except (TrustError, MessageTooLargeError, EpochOverError, OtherServerError) as error:
                self._broke(error)
            except Exception as error:  # nobody awaits this task, and peers rely on it
                if asyncio.current_task() is not self._runner:
                    raise  # the task's loop is gone, and the coroutine is being cleaned up
                self._log.error("the stream broke because of a fault here", exc_info=error)
                self._broke(RestowError(f"the stream broke: {error!r}"))
            finally:
                self._connected = False
                self._open.clear()
            if self.refusal is not None and self.is_final(self.refusal, patient):
                await self.channel.close()
                if self.was_open:
                    self.lost(self.refusal)
                return
            if not (moved or self._try_next()):
                await asyncio.sleep(self._pause_s())

    def _try_next(self) -> bool:
        """Return whether to retry at once, with another broker or after a long attempt."""
        if self.refusal is not None and self.refusal.reason == "ENGINE_UNKNOWN":
            return False
        return self.brokers.failed()

    def late(self, timeout_s: float) -> RestowError:
        """Return the error of a server that gave no welcome within ``timeout_s``."""
        if not self._connected:
            return self._unreached(f"not connected within {timeout_s:g} s")
        return NoWelcomeError(
            f"{self.brokers.current} answered, but gave no welcome within {timeout_s:g} s: is the "
            f"engine registered?",
            broker=self.brokers.current,
        )

    def _unreached(self, details: str) -> RestowError:
        return unreachable(self.brokers.current, details, self._credentials.secure)

    def _broke(self, refusal: RestowError) -> None:
        before, self.refusal = self.refusal, refusal
        if before is None or before.reason != refusal.reason:
            self._log.warning("stream broke", reason=refusal.reason, detail=refusal.message)

    def _pause_s(self) -> float:
        """Return the pause before a retry; an engine that is not known yet may register soon."""
        if self.refusal is not None and self.refusal.reason == "ENGINE_UNKNOWN":
            return UNKNOWN_PAUSE_S
        return self._backoff.wait_s()

    def is_final(self, refusal: RestowError, patient: bool) -> bool:
        """Return whether retrying is useless. It is not if the engine may still register."""
        if refusal.reason in ("ENGINE_REPLACED", "ENGINE_UNKNOWN"):
            return refusal.reason == "ENGINE_REPLACED"
        may_pass = refusal.status in MAY_PASS or (patient and isinstance(refusal, OtherServerError))
        return not (self.was_open or may_pass)

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        opening = await self.opening()
        check_size("the introduction", opening.ByteSize())
        self._outbox.clear()
        call = self.call(channel)
        writer = asyncio.create_task(self._write(call, opening))
        try:
            await begun(call)
            async for response in call:
                self.hear(decoded(response, self.brokers.current))
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[Request, Response], opening: Request
    ) -> None:
        await call.write(opening)
        while True:
            while not self._outbox:
                self._wake.clear()
                await self._wake.wait()
            await call.write(self.batch(take_batch(self._outbox, self.max_batch)))
