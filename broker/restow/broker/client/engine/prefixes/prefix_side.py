"""What a session does with prefixes: it tells what is held, answers offers, and hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from restow.broker.client.connection.cancellation import end_task
from restow.broker.client.engine.prefixes.chains import (
    Holders,
    Offer,
    Prefix,
    PrefixChain,
    keep_message,
    offer_from_proto,
    prefix_from_proto,
)
from restow.broker.client.engine.prefixes.hand_over import hand_over
from restow.broker.client.engine.prefixes.held_prefixes import Change, HeldPrefixes
from restow.broker.logs import get_logger
from restow.v1 import broker_pb2 as pb

Find = Callable[[Sequence[PrefixChain]], Awaitable[Holders]]


class PrefixSide:
    """That of one engine. Belongs to one event loop."""

    def __init__(
        self,
        engine_id: str,
        send: Callable[[pb.EngineMessage], bool],
        find: Find,
        on_offer: Callable[[Offer], None] | None,
        on_keep: Callable[[Prefix], None] | None,
        on_drain: Callable[[], Sequence[Prefix]] | None,
        on_forget: Callable[[str], None] | None,
    ) -> None:
        """Hold nothing. ``send`` says a message on the stream; what hears is as sessions say it."""
        self._engine_id, self._send, self._find = engine_id, send, find
        self._on_offer, self._on_keep, self._on_drain = on_offer, on_keep, on_drain
        self._on_forget = on_forget
        self._held = HeldPrefixes(send)
        self._revision = ""
        """Of the engine's weights since they were replaced; empty: they were not."""
        self._handing: asyncio.Task[None] | None = None
        self._log = get_logger("restow.client").bind(engine=engine_id)

    def hear(self, event: pb.EngineEvent) -> None:
        """Hear an event of the broker, if it is one of these."""
        body = event.WhichOneof("body")
        if body == "offer" and self._revision not in ("", event.offer.prefix.revision):
            words = f"its weights are of revision {self._revision!r} now"
            self.decline_offer(event.offer.handoff_id, words)
        elif body == "offer" and self._on_offer is not None:
            offer = offer_from_proto(event.offer)
            if self._on_keep is None:  # no store: an engine has states of one revision
                offer = replace(offer, prefix=replace(offer.prefix, revision=""))
            self._on_offer(offer)
        elif body == "offer":
            self.decline_offer(event.offer.handoff_id, "this engine answers no offers")
        elif body == "forget_states" and self._on_forget is not None:
            self._on_forget(event.forget_states.revision)
        elif body == "keep" and self._on_keep is not None:
            keep = event.keep
            self._on_keep(prefix_from_proto(keep.prefix, keep.position_tokens))
        elif body == "drain":
            self.begin_hand_over()
        elif body == "tell_holdings":
            for message in self._held.everything():
                self._send(message)

    def revise(self, revision: str) -> None:
        """Hold nothing any more: the weights were replaced."""
        self._revision = revision
        self._held.forget()

    def everything(self) -> Iterable[pb.EngineMessage]:
        """All that is held, as it is told on a new stream."""
        return self._held.everything()

    def tell(self, change: Change) -> None:
        """Say what is held from now on, or no longer."""
        self._held.tell(change)

    def keep(self, prefix: Prefix) -> None:
        """Say that a state is worth keeping. Raises `ChainInvalidError`."""
        self._send(keep_message(prefix, self._revision))

    def decline_offer(self, handoff_id: str, detail: str) -> None:
        """Answer an offer with no."""
        declined = pb.DeclineOffer(handoff_id=handoff_id, detail=detail)
        self._send(pb.EngineMessage(decline_offer=declined))

    def begin_hand_over(self) -> asyncio.Task[None]:
        """Hand over what is worth keeping, once at a time; the task is done when it is."""
        if self._handing is None or self._handing.done():
            self._handing = asyncio.create_task(self._hand_over())
            self._handing.add_done_callback(self._handed)
        return self._handing

    async def _hand_over(self) -> None:
        try:
            prefixes = list(self._on_drain()) if self._on_drain is not None else []
            if prefixes:
                taken = await hand_over(prefixes, self._engine_id, self.keep, self._find)
                self._log.info("states handed over", taken=taken, of=len(prefixes))
        finally:
            self._send(pb.EngineMessage(handed_over=pb.HandedOver()))

    def _handed(self, handing: asyncio.Task[None]) -> None:
        """Say why nothing was handed over: a fault of the engine's own, say."""
        if not handing.cancelled() and (fault := handing.exception()) is not None:
            self._log.error("states were not handed over", detail=repr(fault))

    async def close(self) -> None:
        """End what is under way."""
        if self._handing is not None and not self._handing.done():
            await end_task(self._handing)
