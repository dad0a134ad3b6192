"""The prefixes that an engine holds: reported in batches, and repeated on each new stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from restow.broker.client.connection.errors import end_task
from restow.broker.client.engine.chains import (
    HashForm,
    Holders,
    Offer,
    Prefix,
    PrefixChain,
    form_to_proto,
    keep_message,
    offer_from_proto,
    prefix_from_proto,
)
from restow.broker.client.engine.commands import StateOrder, order_of
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.rpc.wire import MAX_BATCH_HASHES
from restow.v1 import broker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks or snapshots of a group that the engine now holds, or no longer holds."""

    form: HashForm
    salt: str
    group: str
    hashes: tuple[bytes, ...]
    held: bool
    parent: bytes = b""
    revision: str = ""
    """Revision of the weights that computed them; empty: that of the engine's layout."""


Kind = tuple[HashForm, str, str, str]
"""Form, salt, revision and group of a batch."""


class HeldPrefixes:
    """The prefixes of a session. Belongs to one event loop."""

    def __init__(self, send: Callable[[pb.EngineMessage], bool]) -> None:
        """Begin empty. ``send`` sends a message on the stream, or returns False if none is open."""
        self._send = send
        self._held: dict[Kind, dict[bytes, None]] = {}
        """Hashes in the order of their arrival."""
        self._last = 0
        """Number of the last batch on this stream."""

    def tell(self, change: Change) -> None:
        """Report a change; report nothing if nothing changed."""
        key = change.form, change.salt, change.revision, change.group
        known = self._held.setdefault(key, {})
        if change.held:
            changed = [hashed for hashed in change.hashes if hashed not in known]
            known.update(dict.fromkeys(change.hashes))
            if changed:
                self._say(change, change.hashes, change.parent)
            return
        gone = [hashed for hashed in dict.fromkeys(change.hashes) if hashed in known]
        for hashed in gone:
            del known[hashed]
        if not known:
            del self._held[key]
        if gone:
            self._say(change, gone, b"")

    def _say(self, change: Change, hashes: Sequence[bytes], parent: bytes) -> None:
        key = change.form, change.salt, change.revision, change.group
        for message in self._batches(key, hashes, parent, change.held):
            self._send(message)

    def forget(self) -> None:
        """Forget all, and begin with batch 1 again, because the broker has forgotten all too."""
        self._held = {}
        self._last = 0

    def everything(self) -> Iterator[pb.EngineMessage]:
        """Yield all that is held, from batch 1 on."""
        self._last = 0
        for key, hashes in self._held.items():
            yield from self._batches(key, list(hashes), b"", True, chained=False)

    def _batches(
        self,
        key: Kind,
        hashes: Sequence[bytes],
        parent: bytes,
        held: bool,
        chained: bool = True,
    ) -> Iterator[pb.EngineMessage]:
        form, salt, revision, group = key
        for first in range(0, len(hashes), MAX_BATCH_HASHES):
            piece = hashes[first : first + MAX_BATCH_HASHES]
            run = pb.HeldRun(group=group, hashes=b"".join(piece), parent=parent if held else b"")
            parent = piece[-1] if chained else b""
            self._last += 1
            batch = pb.Holdings(
                number=self._last, form=form_to_proto(form), salt=salt, revision=revision
            )
            (batch.held if held else batch.evicted).append(run)
            yield pb.EngineMessage(holdings=batch)


AT_ONCE = 4
LOOK_EVERY_S = 0.05
PATIENCE_S = 3.0
"""Time after which states that nobody took are given up: no store, or no room in it."""


class PrefixSide:
    """Reports an engine's prefixes, and answers the broker's events about them. Use on one loop."""

    def __init__(
        self,
        engine_id: str,
        send: Callable[[pb.EngineMessage], bool],
        find: Callable[[Sequence[PrefixChain]], Awaitable[Holders]],
        on_offer: Callable[[Offer], None] | None,
        on_keep: Callable[[Prefix], None] | None,
        on_drain: Callable[[], Sequence[Prefix]] | None,
        on_forget: Callable[[str], None] | None,
        on_command: Callable[[StateOrder], None] | None,
    ) -> None:
        """Begin empty. ``send`` sends on the stream; the callbacks are those of `EngineSession`."""
        self._engine_id, self._send, self._find = engine_id, send, find
        self._on_offer, self._on_keep, self._on_drain = on_offer, on_keep, on_drain
        self._on_forget, self._on_command = on_forget, on_command
        self.held = HeldPrefixes(send)
        self._revision = ""
        """Revision of the engine's weights after they were replaced; empty before."""
        self._handing: asyncio.Task[None] | None = None
        self._log = get_logger("restow.client").bind(engine=engine_id)

    def hear(self, event: pb.EngineEvent) -> None:
        """Handle an event of the broker, if it concerns prefixes."""
        body = event.WhichOneof("body")
        if body == "offer" and self._revision not in ("", event.offer.prefix.revision):
            words = f"the engine's weights now have revision {self._revision!r}"
            self.decline_offer(event.offer.handoff_id, words)
        elif body == "offer" and self._on_offer is not None:
            offer = offer_from_proto(event.offer)
            if self._on_keep is None:  # only a store has states of several revisions
                offer = replace(offer, prefix=replace(offer.prefix, revision=""))
            self._on_offer(offer)
        elif body == "offer":
            self.decline_offer(event.offer.handoff_id, "this engine answers no offers")
        elif body == "forget_states" and self._on_forget is not None:
            self._on_forget(event.forget_states.revision)
        elif body == "command" and self._on_command is not None:
            self._on_command(order_of(event.command))
        elif body == "keep" and self._on_keep is not None:
            keep = event.keep
            prefix = prefix_from_proto(keep.prefix, keep.position_tokens)
            self._on_keep(replace(prefix, marked=keep.marked))
        elif body == "drain":
            self.begin_hand_over()
        elif body == "tell_holdings":
            for message in self.held.everything():
                self._send(message)

    def revise(self, revision: str) -> None:
        """Forget all that is held, because the weights were replaced."""
        self._revision = revision
        self.held.forget()

    def decline_offer(self, handoff_id: str, detail: str) -> None:
        """Decline an offer."""
        declined = pb.DeclineOffer(handoff_id=handoff_id, detail=detail)
        self._send(pb.EngineMessage(decline_offer=declined))

    def begin_hand_over(self) -> asyncio.Task[None]:
        """Hand states over, unless that is under way; the task ends when all are handed over."""
        if self._handing is None or self._handing.done():
            self._handing = asyncio.create_task(self._hand_over())
            self._handing.add_done_callback(self._handed)
        return self._handing

    async def _hand_over(self) -> None:
        try:
            prefixes = list(self._on_drain()) if self._on_drain is not None else []
            if prefixes:
                taken = await self._let_others_hold(prefixes)
                self._log.info("states handed over", taken=taken, of=len(prefixes))
        finally:
            self._send(pb.EngineMessage(handed_over=pb.HandedOver()))

    async def _let_others_hold(self, prefixes: Sequence[Prefix]) -> int:
        """Let others hold ``prefixes``; return how many prefixes others hold then.

        They are offered in order, a few at a time. If none of these is taken in time, the rest is
        given up.
        """
        taken = 0
        for first in range(0, len(prefixes), AT_ONCE):
            batch = prefixes[first : first + AT_ONCE]
            for prefix in batch:
                self._send(keep_message(prefix, self._revision))
            held = await self._await_held(batch)
            if not held:
                break
            taken += held
        return taken

    async def _await_held(self, prefixes: Sequence[Prefix]) -> int:
        """Return how many of the prefixes others hold after a while."""
        chains = [prefix.chain for prefix in prefixes]
        end_s = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                holders_by_chain = await self._find(chains)
            except RestowError:
                holders_by_chain = [[] for _ in chains]
            held = sum(
                any(
                    holder.engine_id != self._engine_id and holder.tokens == prefix.position_tokens
                    for holder in holders
                )
                for prefix, holders in zip(prefixes, holders_by_chain, strict=True)
            )
            if held == len(prefixes) or asyncio.get_running_loop().time() > end_s:
                return held
            await asyncio.sleep(LOOK_EVERY_S)

    def _handed(self, handing: asyncio.Task[None]) -> None:
        """Log why nothing was handed over, such as a fault of the engine."""
        if not handing.cancelled() and (fault := handing.exception()) is not None:
            self._log.error("states were not handed over", detail=repr(fault))

    async def close(self) -> None:
        """Cancel the handing over."""
        if self._handing is not None and not self._handing.done():
            await end_task(self._handing)
