"""The operator's view of brokers: one set of calls, made blocking or with ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import grpc

from restow.broker.addresses import checked_targets
from restow.broker.client import admin_calls as calls
from restow.broker.client.admin_calls import AdminCall, admin_options
from restow.broker.client.connection.channel import (
    OWN_PROCESS,
    Credentials,
    broker_address,
    channel_showing,
)
from restow.broker.client.connection.diagnosis import explained, explained_soon
from restow.broker.client.connection.errors import BrokerUnreachableError, decoded, from_rpc_error
from restow.broker.client.tries import Tries, most_telling
from restow.broker.errors import AddressInvalidError, RestowError
from restow.v1 import admin_pb2_grpc, broker_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")


Errors = dict[str, RestowError]
"""By address."""
Join = Callable[[Mapping[str, Any]], Any]


class _End(NamedTuple):
    """One broker."""

    channel: Any
    admin: Any
    broker: Any


class _Admin:
    """What both clients have: where brokers are, and who asks."""

    _grpc: ClassVar[Any]
    """The module whose channels are used."""

    def __init__(
        self,
        broker: str | None = None,
        timeout_s: float = 5.0,
        tenant: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Prepare; the first call connects.

        ``broker`` is HOST:PORT, or as gRPC writes addresses, or several with commas between them;
        None: RESTOW_BROKER or the default. ``timeout_s`` is how long each call may take, at each
        broker. ``tenant`` None is that of the identity, or the broker's default one.
        ``credentials`` None: those of the environment. Raises a `TrustError` of theirs, and
        `AddressInvalidError`; like every call `ForkedError`, in a process that was forked after
        the first client, session or agent.
        """
        OWN_PROCESS.check()
        self.addresses = tuple(dict.fromkeys(checked_targets(broker_address(broker))))
        self.address = ",".join(self.addresses)
        self.unanswered: dict[str, RestowError] = {}
        """Which of several did not answer the last call that all of them were asked."""
        self._credentials = credentials or Credentials.of()
        self._ends: dict[str, _End] = {}
        self._first = self.addresses[0]
        """Who is asked first where one knows: who knew the last time."""
        self._timeout_s = timeout_s
        self._metadata = (("restow-tenant", tenant),) if tenant is not None else ()
        for address in self.addresses:
            self._end(address)

    @property
    def _several(self) -> bool:
        return len(self.addresses) > 1

    def _end(self, address: str) -> _End:
        """The broker at an address that was given, or that another one named."""
        if address not in self._ends:
            options = admin_options(self._several)
            channel = channel_showing(self._credentials, self._grpc, address, options)
            admin = admin_pb2_grpc.AdminStub(channel)
            self._ends[address] = _End(channel, admin, broker_pb2_grpc.BrokerStub(channel))
        return self._ends[address]

    def _method(self, address: str, call: AdminCall[Any]) -> Any:
        end = self._end(address)
        return getattr(end.broker if call.of_broker else end.admin, call.method)

    def _how(self, call: AdminCall[Any]) -> dict[str, Any]:
        return {"timeout": max(self._timeout_s, call.least_s), "metadata": self._metadata}

    def _check_one(self, call: AdminCall[Any]) -> None:
        """Raise `AddressInvalidError` for what is about one broker, where several were given."""
        if call.of_one and self._several:
            raise AddressInvalidError(
                f"{call.method} is about one broker, and {self.address} are several: name one",
                address=self.address,
            )

    def _error(self, error: grpc.RpcError, address: str) -> RestowError:
        return from_rpc_error(error, address, self._credentials.secure)

    def _refused(self, errors: Errors) -> tuple[str, RestowError] | None:
        """The error that a call of all of them ends with; None: some have answered."""
        self.unanswered = errors
        for address, error in errors.items():
            if not isinstance(error, BrokerUnreachableError):
                return address, error
        return most_telling(list(errors.items())) if len(errors) == len(self.addresses) else None

    def _of_several(self, error: RestowError) -> RestowError:
        """The error; where nobody answers, with the names of all."""
        if not self._several or not isinstance(error, BrokerUnreachableError):
            return error
        words = f"{error.message}; none of {', '.join(self.addresses)} answers"
        return BrokerUnreachableError(words, broker=self.address)


def _blocking(make: Callable[P, AdminCall[T]]) -> Callable[Concatenate[AdminClient, P], T]:
    @wraps(make)
    def call(self: AdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        OWN_PROCESS.check()
        one = make(*words, **more)
        self._check_one(one)
        if one.join is None or not self._several:
            return self._ask_one(one)
        return self._ask_all(one, one.join)

    return call


def _awaited(
    make: Callable[P, AdminCall[T]],
) -> Callable[Concatenate[AsyncAdminClient, P], Awaitable[T]]:
    @wraps(make)
    async def call(self: AsyncAdminClient, /, *words: P.args, **more: P.kwargs) -> T:
        OWN_PROCESS.check()
        one = make(*words, **more)
        self._check_one(one)
        if one.join is None or not self._several:
            return await self._ask_one(one)
        return await self._ask_all(one, one.join)

    return call


class AdminClient(_Admin):
    """Makes calls of `restow.v1.Admin`: the operator's view of brokers. A context.

    Each call waits for its answer, and is tried again while the broker is away, for a moment. It
    raises `BrokerCallError` with the broker's refusal, or `BrokerUnreachableError`. Of answers
    that are messages docs/api.md says what their fields mean.

    Where several brokers are given, what lists or counts is asked of all of them and joined
    (``unanswered`` has those that did not answer); what is about one engine or handoff is asked of
    one after the other, until one knows it.
    """

    _grpc: ClassVar = grpc

    status = _blocking(calls.status)
    tenants = _blocking(calls.tenants)
    engines = _blocking(calls.engines)
    layout = _blocking(calls.layout)
    agents = _blocking(calls.agents)
    holdings = _blocking(calls.holdings)
    find = _blocking(calls.find)
    handoffs = _blocking(calls.handoffs)
    handoff = _blocking(calls.handoff)
    brokers = _blocking(calls.brokers)
    costs = _blocking(calls.costs)
    probe_pair = _blocking(calls.probe_pair)
    audit = _blocking(calls.audit)
    release = _blocking(calls.release)
    set_draining = _blocking(calls.set_draining)
    drain_engine = _blocking(calls.drain_engine)
    forget_engine = _blocking(calls.forget_engine)
    forget_states = _blocking(calls.forget_states)
    abandon = _blocking(calls.abandon)

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channels."""
        self.close()

    def close(self) -> None:
        """Close the channels."""
        OWN_PROCESS.check()
        for end in self._ends.values():
            end.channel.close()

    def _ask_one(self, call: AdminCall[T]) -> T:
        """Ask one after the other, until one knows."""
        tries = Tries(self.addresses, self._first)
        for address in tries:
            try:
                answer = self._method(address, call)(call.request, **self._how(call))
            except grpc.RpcError as error:
                tries.failed(address, self._error(error, address))
            else:
                self._first = address
                return call.pick(answer)
        raise self._explained(*tries.unmet)

    def _ask_all(self, call: AdminCall[T], join: Join) -> T:
        """Ask all at once, and join what they answer."""
        how, answers, errors = self._how(call), dict[str, Any](), Errors()
        asked = {at: self._method(at, call).future(call.request, **how) for at in self.addresses}
        for address, one in asked.items():
            try:
                answers[address] = one.result()
            except grpc.RpcError as error:
                errors[address] = self._error(error, address)
        if refused := self._refused(errors):
            raise self._explained(*refused)
        return call.pick(join(answers))

    def _explained(self, address: str, error: RestowError) -> RestowError:
        return self._of_several(explained(error, address, self._credentials))


class AsyncAdminClient(_Admin):
    """Makes the calls of `AdminClient` with ``await``, on one event loop. A context."""

    _grpc: ClassVar = grpc.aio

    status = _awaited(calls.status)
    tenants = _awaited(calls.tenants)
    engines = _awaited(calls.engines)
    layout = _awaited(calls.layout)
    agents = _awaited(calls.agents)
    holdings = _awaited(calls.holdings)
    find = _awaited(calls.find)
    handoffs = _awaited(calls.handoffs)
    handoff = _awaited(calls.handoff)
    brokers = _awaited(calls.brokers)
    costs = _awaited(calls.costs)
    probe_pair = _awaited(calls.probe_pair)
    audit = _awaited(calls.audit)
    release = _awaited(calls.release)
    set_draining = _awaited(calls.set_draining)
    drain_engine = _awaited(calls.drain_engine)
    forget_engine = _awaited(calls.forget_engine)
    forget_states = _awaited(calls.forget_states)
    abandon = _awaited(calls.abandon)

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the channels."""
        await self.close()

    async def close(self) -> None:
        """Close the channels."""
        OWN_PROCESS.check()
        await asyncio.gather(*(end.channel.close() for end in self._ends.values()))

    async def _ask_one(self, call: AdminCall[T]) -> T:
        """Ask one after the other, until one knows."""
        tries = Tries(self.addresses, self._first)
        for address in tries:
            try:
                answer = await self._answer(address, call)
            except RestowError as error:
                tries.failed(address, error)
            except asyncio.CancelledError:  # by whoever has no more patience with this one
                self._first = next(iter(tries), self.addresses[0])
                raise
            else:
                self._first = address
                return call.pick(answer)
        raise await self._explained(*tries.unmet)

    async def _ask_all(self, call: AdminCall[T], join: Join) -> T:
        """Ask all at once, and join what they answer."""
        answers, errors = dict[str, Any](), Errors()

        async def ask(address: str) -> None:
            try:
                answers[address] = await self._answer(address, call)
            except RestowError as error:
                errors[address] = error

        await asyncio.gather(*map(ask, self.addresses))
        if refused := self._refused(errors):
            raise await self._explained(*refused)
        return call.pick(join({at: answers[at] for at in self.addresses if at in answers}))

    async def _answer(self, address: str, call: AdminCall[T]) -> Any:
        try:
            return decoded(
                await self._method(address, call)(call.request, **self._how(call)), address
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, address) from None

    async def _explained(self, address: str, error: RestowError) -> RestowError:
        return self._of_several(await explained_soon(error, address, self._credentials))
