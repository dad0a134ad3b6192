"""Carry out the broker's orders, each in its own task, and answer every order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import structlog

from restow.agents.execute import orders
from restow.agents.execute.executor import Executor
from restow.agents.memory.errors import AgentBusyError, AgentError, OrderInvalidError
from restow.broker.errors import RestowError
from restow.broker.rpc import wire_program
from restow.broker.rpc.status import cut
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import program_pb2

MAX_ORDERS = 4096
Key = tuple[str, int, int]
"""The kind of an order, the number of its handoff or probe, and its part."""


class OrderTasks:
    """Runs the work of orders concurrently. Belongs to one event loop."""

    def __init__(self, rank: int) -> None:
        """Begin without orders; ``rank`` is the rank that they are for."""
        self._rank = rank
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Return the number of orders under way."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys of orders under way."""
        return iter(self._tasks)

    def check_load(self) -> None:
        """Raise `AgentBusyError` if too many orders are under way."""
        if len(self._tasks) > MAX_ORDERS:
            raise AgentBusyError(
                f"rank {self._rank} already works on {MAX_ORDERS} orders: repeat it later"
            )

    def begin(self, key: Key, work: Coroutine[Any, Any, None]) -> None:
        """Start the work of an order, unless the same order is under way."""
        if key in self._tasks:
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def cancel(self, *kinds: str, number: int | None = None) -> None:
        """Cancel the work of these kinds of orders, for one handoff or probe, or for all."""
        for (kind, of, _), task in list(self._tasks.items()):
            if kind in kinds and number in (None, of):
                task.cancel()

    async def drain(self, *kinds: str) -> None:
        """Cancel the work of these kinds of orders, and wait for all work to end."""
        self.cancel(*kinds)
        if self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)


Answer: TypeAlias = pb.Staged | pb.Settled | pb.Probed


class OrderDesk:
    """Takes orders from an agent's link to its executor. Belongs to one event loop.

    Law: every Stage, Execute and Probe is answered, whatever fails, once all its work has ended.
    Only cancelled work is not answered: its order was taken back, or the agent closes.
    """

    def __init__(
        self,
        executor: Executor,
        tasks: OrderTasks,
        send: Callable[[pb.AgentMessage], None],
        expect_work: Callable[[], None],
        unfence: Callable[[str], None],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """Send answers with ``send``; call ``unfence`` for handoffs that have ended."""
        self._executor = executor
        self._tasks = tasks
        self._send = send
        self._expect_work = expect_work
        self._unfence = unfence
        self._log = log

    def take(self, order: pb.AgentOrder) -> None:
        """Carry out an order."""
        body = order.WhichOneof("body")
        # If a program or peer is refused here, the orders that need it are refused when they come.
        with self._edge(partial(self._log_refusal, body)):
            if body == "program":
                self._load(order.program)
            elif body == "peer":
                self._executor.add_peer(orders.peer_from_proto(order.peer))
            elif body == "forget":
                self._executor.forget_peer(order.forget.agent_name)
            elif body == "stage":
                stage = order.stage
                first = stage.parts[0].dst_rank if stage.parts else 0
                self._tasks.begin(("stage", stage.handoff, first), self._stage(stage))
            elif body == "execute":
                execute = order.execute
                self._tasks.begin(("execute", execute.handoff, 0), self._execute(execute))
            elif body == "unstage":
                self._unstage(order.unstage.handoff)
            elif body == "probe":
                probe = order.probe
                kind = "measure" if probe.agent_name else "hold"
                self._tasks.begin((kind, probe.number, 0), self._probe(probe))
            elif body == "unprobe":
                self._unprobe(order.unprobe.number)
            elif body == "unfence":
                self._unfence(order.unfence.handoff_id)
            else:
                raise OrderInvalidError(f"this agent does not know orders of kind {body}")

    @contextmanager
    def _edge(self, refuse: Callable[[RestowError], None]) -> Iterator[None]:
        """Pass whatever fails inside to ``refuse``.

        This is the edge of an order: only the broker waits for it, and it learns of the failure
        from the answer.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - every order must be answered
            if not isinstance(error, RestowError):
                self._log.error("an order failed unexpectedly", exc_info=error)
            refuse(_typed(error))

    def _log_refusal(self, body: str | None, error: RestowError) -> None:
        self._log.error("order refused", order=body, reason=error.reason, detail=error.message)

    def _load(self, message: program_pb2.Program) -> None:
        try:
            self._executor.load(wire_program.program_from_proto(message))
        except Exception as error:
            self._executor.refuse(message.program_id, _typed(error))
            raise

    async def _stage(self, message: pb.Stage) -> None:
        self._expect_work()
        ranks = dict.fromkeys(part.dst_rank for part in message.parts)
        answers = [pb.Staged(handoff=message.handoff, dst_rank=rank) for rank in ranks]
        with self._edge(partial(self._refuse, message.handoff, answers)):
            self._tasks.check_load()
            runs = await self._executor.stage(orders.stage_from_proto(message))
            answers = [orders.staged_to_proto(message.handoff, run) for run in runs]
        for answer in answers:
            self._send(pb.AgentMessage(staged=answer))

    async def _execute(self, message: pb.Execute) -> None:
        settled = pb.Settled(handoff=message.handoff)
        began_s = time.monotonic()
        with self._edge(partial(self._refuse, message.handoff, [settled])):
            self._tasks.check_load()
            order = orders.execute_from_proto(message)
            settled.bytes = await self._executor.execute(order)
            settled.compared = order.hashed
        settled.elapsed_us = int((time.monotonic() - began_s) * 1e6)
        self._send(pb.AgentMessage(settled=settled))

    async def _probe(self, message: pb.Probe) -> None:
        began_s = time.monotonic()
        probed = pb.Probed(number=message.number)
        self._expect_work()
        with self._edge(partial(self._refuse, message.number, [probed])):
            self._tasks.check_load()
            order = orders.probe_from_proto(message)
            if order.name_transport:
                probed.transport, probed.method = await self._executor.name_transport(order)
            elif order.agent_name:
                copying, reading = await self._executor.measure(order)
                probed.reading.CopyFrom(pb.ReadCosts(**asdict(reading)))
                probed.copying.CopyFrom(pb.CopyCosts(**asdict(copying)))
            else:
                held = self._executor.gathering.hold(order.number, order.size_bytes)
                probed.address, probed.bytes, copying = await held
                probed.copying.CopyFrom(pb.CopyCosts(**asdict(copying)))
        probed.elapsed_us = int((time.monotonic() - began_s) * 1e6)
        self._send(pb.AgentMessage(probed=probed))

    def _unprobe(self, number: int) -> None:
        # A measurement that reads ends by itself, because its memory must not be released earlier.
        self._tasks.cancel("hold", number=number)
        self._executor.gathering.let_go(number)

    def _refuse(self, number: int, answers: Sequence[Answer], error: RestowError) -> None:
        event, log = "order failed", self._log.error
        if isinstance(error, AgentError):
            log = self._log.warning
        for answer in answers:
            answer.reason, answer.detail = error.reason, cut(error.message)
            if isinstance(answer, pb.Probed):  # harmless: the peer may have left meanwhile
                event, log = "measuring failed", self._log.info
        log(event, number=number, reason=error.reason, detail=error.message)

    def _unstage(self, handoff: int) -> None:
        self._tasks.cancel("stage", number=handoff)
        self._executor.gathering.unstage(handoff)


def _typed(error: Exception) -> RestowError:
    """Return the error itself if it has a reason, or else an INTERNAL error that quotes it."""
    if isinstance(error, RestowError):
        return error
    return RestowError(f"the agent failed: {type(error).__name__}: {error}")
