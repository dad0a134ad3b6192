"""Conversion and checks of what engines say, with W3C trace contexts, layouts and limits."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from restow.broker.core.common.events import Chunk, Failure, KnownEnd, Wish
from restow.broker.core.common.keys import Counterpart, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.handoffs.demand import MAX_MESSAGES
from restow.broker.core.handoffs.handoff import MAX_DELIVERIES, MAX_READERS
from restow.broker.core.ledger.handoff_table import MAX_ID_LENGTH
from restow.broker.errors import ContentNotNamedError, RequestError, ScalesUnknownError
from restow.broker.layout import Layout, check_layout, digest
from restow.broker.layout.values import MAX_GROUPS, UNKNOWN_SCALES
from restow.broker.printable import is_word
from restow.broker.rpc import wire
from restow.broker.rpc.status import cut
from restow.broker.server.base.outbox import STATE_NUMBERS
from restow.broker.server.services.prefix_messages import named_of, revision_of
from restow.v1 import broker_pb2 as pb
from restow.v1 import layout_pb2

_PARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def known_trace(trace_parent: str) -> str:
    """Return the trace context, or nothing if it is not valid (W3C Trace Context, version 00)."""
    return trace_parent if trace_parent and _PARENT.fullmatch(trace_parent) else ""


MAX_KEPT = 1024


class CheckedLayouts:
    """Reads and checks layouts, and keeps a copy of each layout that engines have. Thread-safe."""

    def __init__(self) -> None:
        """Begin without layouts."""
        self._lock = threading.Lock()
        self._digests: OrderedDict[bytes, str] = OrderedDict()
        """Layout digests by the digest of their message."""
        self._layouts: WeakValueDictionary[str, Layout] = WeakValueDictionary()

    def find(self, message: layout_pb2.Layout) -> tuple[Layout, str] | None:
        """Return the layout and its digest, if an engine has it."""
        key = _key_of(message)
        with self._lock:
            known = self._digests.get(key, "")
            layout = self._layouts.get(known)
            if layout is None:
                return None
            self._digests.move_to_end(key)
            return layout, known

    def of(self, message: layout_pb2.Layout) -> tuple[Layout, str]:
        """Return the layout and its digest. Raises a `LayoutError`, every time."""
        if (known := self.find(message)) is not None:
            return known
        encoded = message.SerializeToString(deterministic=True)
        layout = replace(wire.layout_from_proto(message), encoded=encoded)
        check_layout(layout)
        check_scales(layout)
        layout_digest = digest(layout)
        with self._lock:
            self._digests[_key_of(message)] = layout_digest
            if len(self._digests) > MAX_KEPT:
                self._digests.popitem(last=False)
            # Different messages may describe the same layout.
            return self._layouts.setdefault(layout_digest, layout), layout_digest


def check_scales(layout: Layout) -> None:
    """Raise `ScalesUnknownError` for a layout that is for looking at."""
    for field in layout.model.fields:
        if field.scales == UNKNOWN_SCALES:
            raise ScalesUnknownError(
                f"{field.name}: nothing identifies its scales, so the layout is for looking at: "
                f"name them by a text that is equal on P and D exactly when they are",
                field=field.name,
            )


def _key_of(message: layout_pb2.Layout) -> bytes:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


MAX_VERSION_LENGTH = 64
_VERSION = re.compile(rf"[0-9A-Za-z.+_-]{{0,{MAX_VERSION_LENGTH}}}")
MIN_CONTENT_BYTES, MAX_CONTENT_BYTES = 16, 64
_ENDS = {number: state for state, number in STATE_NUMBERS.items() if state.ended}


def lease_s_of(lease_ms: int, limits: Limits) -> float:
    """Return how long a lease lasts. Raises `RequestError`."""
    if not 0 <= lease_ms <= limits.max_lease_s * 1000:
        raise RequestError(
            f"lease_ms is {lease_ms}; it must be 0 to {int(limits.max_lease_s * 1000)}",
            field="lease_ms",
        )
    return lease_ms / 1000 if lease_ms else limits.lease_s


def readers_of(readers: int) -> int:
    """Check and return the number of readers. Raises `RequestError`."""
    if not 0 <= readers <= MAX_READERS:
        raise RequestError(
            f"readers is {readers}; it must be 0 to {MAX_READERS}: publish again for more readers",
            field="readers",
        )
    return readers


def version_of(text: str) -> str:
    """Check and return the version of a peer's software. Raises `RequestError`."""
    if not _VERSION.fullmatch(text):
        raise RequestError(
            f"version may have only letters, digits and .+-_, at most {MAX_VERSION_LENGTH}",
            field="version",
        )
    return text


def chunk_of(publication: pb.Publication, limits: Limits, number: int = 0) -> Chunk:
    """Return a part of P's publication; ``number`` is its message's. Raises `RequestError`."""
    if len(publication.blocks) > MAX_GROUPS:
        raise _too_many_lists(len(publication.blocks))
    blocks = []
    for listed in publication.blocks:
        blocks.append((listed.group, listed.first_block, listed.block_ids))
    content = b""
    if publication.final and (publication.content or limits.require_content):
        content = _named_content(publication, "publishes it")
    return Chunk(
        tuple(blocks),
        publication.position_tokens,
        publication.final,
        lease_s_of(publication.lease_ms, limits) if publication.lease_ms else limits.lease_s,
        known_trace(publication.trace_parent) if publication.trace_parent else "",
        content,
        publication.repeated,
        readers_of(publication.readers) if publication.readers else 0,
        _sampled(publication) if publication.HasField("sampled_token") else None,
        publication.anew,
        revision_of(publication.revision) if publication.revision else "",
        number,
    )


def wish_of(demand: pb.Demand, number: int, limits: Limits) -> Wish:
    """Return D's demand; ``number`` is its message's. Raises `RequestError`."""
    timeout_ms, held_tokens = demand.timeout_ms, demand.held_tokens
    if demand.position_tokens < 0:
        raise RequestError(
            f"position_tokens {demand.position_tokens} must not be negative",
            field="position_tokens",
        )
    if held_tokens < 0 or not 0 <= timeout_ms <= limits.max_lease_s * 1000:
        raise RequestError(
            f"timeout_ms {timeout_ms} and held_tokens {held_tokens} must not be negative, nor "
            f"a timeout above {int(limits.max_lease_s * 1000)}",
            field="timeout_ms",
        )
    if demand.content and not demand.position_tokens:
        raise RequestError(
            "a demand that names content must have position_tokens, up to which the content counts",
            field="position_tokens",
        )
    if demand.takes_sampled_token and not demand.position_tokens:
        raise RequestError(
            "a demand that takes P's sampled token must have position_tokens, after which it comes",
            field="position_tokens",
        )
    if demand.write_mark < 0:
        raise RequestError(
            f"write_mark {demand.write_mark} must not be negative", field="write_mark"
        )
    prefix = None
    if demand.HasField("prefix"):
        if demand.content or demand.readers or demand.takes_sampled_token:
            raise RequestError(
                "a demand that names a prefix must not have content or readers, and cannot take a "
                "sampled token",
                field="prefix",
            )
        prefix = named_of(demand.prefix, demand.position_tokens)
    if len(demand.blocks) > MAX_GROUPS:
        raise _too_many_lists(len(demand.blocks))
    blocks = []
    for listed in demand.blocks:
        if listed.first_block:
            raise RequestError(
                "a demand must name all blocks, from block 0 on", field="first_block"
            )
        blocks.append((listed.group, listed.block_ids))
    content = b""
    if prefix is None and (demand.content or limits.require_content):
        content = _named_content(demand, "asks for it")
    timeout_s = timeout_ms / 1000 if timeout_ms else limits.timeout_s
    return Wish(
        tuple(blocks),
        held_tokens,
        timeout_s,
        demand.position_tokens,
        demand.repeated,
        known_trace(demand.trace_parent) if demand.trace_parent else "",
        content,
        number,
        readers_of(demand.readers) if demand.readers else 0,
        prefix,
        demand.takes_sampled_token,
        revision_of(demand.revision) if demand.revision else "",
        demand.write_mark,
    )


def _sampled(said: pb.Publication | pb.Ended) -> int:
    """Check and return the token that P sampled. Raises `RequestError`."""
    if said.sampled_token < 0:
        raise RequestError(
            f"sampled_token {said.sampled_token} must not be negative",
            field="sampled_token",
        )
    return said.sampled_token


def known_end_of(ended: pb.Ended) -> KnownEnd:
    """Return an end that an engine reports. Raises `RequestError` if no broker can have told it."""
    state = _ENDS.get(ended.state)
    done = state is State.DONE
    counterparts = ended.counterparts
    sizes = [len(counterpart.message_ids) for counterpart in counterparts]
    names = [
        name
        for counterpart in counterparts
        for name in (counterpart.engine_id, counterpart.incarnation)
    ]
    if (
        state is None
        or done != (not ended.reason)
        or ended.position_tokens < 0
        or len(counterparts) > MAX_DELIVERIES
        or max(sizes, default=0) > MAX_MESSAGES
        or any(len(counterpart.agents) > MAX_CONTENT_BYTES for counterpart in counterparts)
        or max(map(len, names), default=0) > MAX_ID_LENGTH
    ):
        raise RequestError("known_end is not an end that a broker tells", field="known_end")
    reason, detail = failure_of(ended.reason, ended.detail)
    return KnownEnd(
        of_demand=ended.demand != 0,
        failure=None if done else Failure(state, reason, detail),
        bytes=max(ended.bytes, 0),
        position=ended.position_tokens,
        compared=ended.content_compared,
        counterparts=tuple(
            Counterpart(
                counterpart.engine_id,
                counterpart.incarnation,
                tuple(counterpart.message_ids),
                counterpart.agents,
            )
            for counterpart in counterparts
        ),
        sampled=_sampled(ended) if ended.HasField("sampled_token") else None,
        readers=readers_of(ended.readers),
    )


def failure_of(reason: str, detail: str) -> tuple[str, str]:
    r"""Return an agent's failure in words that may be shown; an empty reason means success.

    >>> failure_of("READ_FAILED", "no\nroute")
    ('READ_FAILED', 'no\\nroute')
    >>> failure_of("read failed", "no route")
    ('INTERNAL', "the agent gave 'read failed' as its reason: no route")
    """
    if reason and not is_word(reason):
        reason, detail = "INTERNAL", f"the agent gave {reason[:64]!r} as its reason: {detail}"
    return reason, cut(detail)


def _named_content(said: pb.Publication | pb.Demand, verb: str) -> bytes:
    """Check and return the content that a side names.

    Raises `ContentNotNamedError` if it names none, and `RequestError` if that is no hash.
    """
    content = said.content
    if not content:
        raise ContentNotNamedError(
            f"handoff {said.handoff_id[:64]}: the engine {verb} without naming its content, but "
            f"this broker requires content to compare: give content and position_tokens",
            handoff=said.handoff_id,
        )
    if not MIN_CONTENT_BYTES <= len(content) <= MAX_CONTENT_BYTES:
        raise RequestError(
            f"content has {len(content)} bytes, but a hash has {MIN_CONTENT_BYTES} to "
            f"{MAX_CONTENT_BYTES}",
            field="content",
        )
    return content


def _too_many_lists(count: int) -> RequestError:
    """Return the error for more block lists than an engine may have groups."""
    return RequestError(
        f"{count} lists of blocks, but an engine has at most {MAX_GROUPS} groups", field="blocks"
    )
