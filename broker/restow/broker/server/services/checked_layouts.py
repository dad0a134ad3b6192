"""Layouts that were checked: replicas of an engine register the same one."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace
from weakref import WeakValueDictionary

from restow.broker.layout import Layout, check_layout, digest
from restow.broker.rpc import wire
from restow.v1 import layout_pb2

MAX_KEPT = 1024


class CheckedLayouts:
    """Reads and checks layouts; of those that engines have each is there once. Thread-safe."""

    def __init__(self) -> None:
        """Know none."""
        self._lock = threading.Lock()
        self._digests: OrderedDict[bytes, str] = OrderedDict()
        """By the digest of the message."""
        self._layouts: WeakValueDictionary[str, Layout] = WeakValueDictionary()

    def find(self, message: layout_pb2.Layout) -> tuple[Layout, str] | None:
        """The layout and its digest, if an engine has it."""
        key = _key_of(message)
        with self._lock:
            known = self._digests.get(key, "")
            found = self._layouts.get(known)
            if found is None:
                return None
            self._digests.move_to_end(key)
            return found, known

    def of(self, message: layout_pb2.Layout) -> tuple[Layout, str]:
        """The layout and its digest. Raises a `LayoutError`, every time."""
        if (found := self.find(message)) is not None:
            return found
        encoded = message.SerializeToString(deterministic=True)
        layout = replace(wire.layout_from_proto(message), encoded=encoded)
        check_layout(layout)
        layout_digest = digest(layout)
        with self._lock:
            self._digests[_key_of(message)] = layout_digest
            if len(self._digests) > MAX_KEPT:
                self._digests.popitem(last=False)
            # Messages may differ, and say the same.
            return self._layouts.setdefault(layout_digest, layout), layout_digest


def _key_of(message: layout_pb2.Layout) -> bytes:
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
