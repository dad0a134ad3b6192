"""Layouts that were checked: replicas of an engine register the same one."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from restow.broker.layout import Layout, check_layout, digest
from restow.broker.rpc import wire
from restow.v1 import layout_pb2

MAX_KEPT = 64


class CheckedLayouts:
    """Reads and checks layouts; one that was seen lately is the same value again. Thread-safe."""

    def __init__(self) -> None:
        """Know none."""
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[Layout, str]] = OrderedDict()

    def of(self, message: layout_pb2.Layout) -> tuple[Layout, str]:
        """The layout and its digest. Raises a `LayoutError`, every time."""
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        layout = wire.layout_from_proto(message)
        check_layout(layout)
        checked = layout, digest(layout)
        with self._lock:
            self._known[key] = checked
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        return checked
