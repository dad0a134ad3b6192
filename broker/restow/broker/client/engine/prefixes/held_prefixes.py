"""What an engine holds of prefixes: told in batches, and all of it again on each new stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from restow.broker.client.engine.prefixes.chains import HashForm, form_to_proto
from restow.broker.rpc.chains import MAX_BATCH_HASHES
from restow.v1 import broker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks or snapshots of one group that the engine holds from now on, or no longer."""

    form: HashForm
    salt: str
    group: str
    hashes: tuple[bytes, ...]
    held: bool
    parent: bytes = b""
    revision: str = ""
    """Of the weights that computed them; empty: that of the engine's layout."""


Kind = tuple[HashForm, str, str, str]
"""Form, salt, revision and group of what one batch is of."""


class HeldPrefixes:
    """Those of a session. Belongs to one event loop."""

    def __init__(self, send: Callable[[pb.EngineMessage], bool]) -> None:
        """Hold nothing. ``send`` says a message on the stream; False: none is open."""
        self._send = send
        self._held: dict[Kind, dict[bytes, None]] = {}
        """In the order in which they came."""
        self._last = 0
        """The number of the last batch on this stream."""

    def tell(self, change: Change) -> None:
        """Say what has changed; where nothing has, nothing."""
        key = change.form, change.salt, change.revision, change.group
        known = self._held.setdefault(key, {})
        if change.held:
            changed = [one for one in change.hashes if one not in known]
            known.update(dict.fromkeys(change.hashes))
            if changed:
                self._say(change, change.hashes, change.parent)
            return
        gone = [one for one in dict.fromkeys(change.hashes) if one in known]
        for one in gone:
            del known[one]
        if not known:
            del self._held[key]
        if gone:
            self._say(change, gone, b"")

    def _say(self, change: Change, hashes: Sequence[bytes], parent: bytes) -> None:
        key = change.form, change.salt, change.revision, change.group
        for message in self._batches(key, hashes, parent, change.held):
            self._send(message)

    def forget(self) -> None:
        """Hold nothing any more, and begin with batch 1: the broker has forgotten it all."""
        self._held = {}
        self._last = 0

    def everything(self) -> Iterator[pb.EngineMessage]:
        """All that is held, from batch 1 on."""
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
