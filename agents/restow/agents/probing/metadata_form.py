"""NIXL's metadata as NIXL 1.5 and UCX 1.23 write it, walked to the last field.

Both take some fields at their word: an index that is too large leads them beyond their tables, and
whether the process dies of that is chance.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = b"nixlSerDes|"
KINDS = {0, 1}
"""Of memory, as NIXL numbers them: host and device memory. Agents register no other."""
MEMORY_TYPES = 9
"""As UCX numbers them, in remote keys."""
PLACE_BYTES = 24
"""Before a remote key: address, length, device."""


class FormError(ValueError):
    """What is wrong, in words."""


@dataclass(slots=True)
class _Fields:
    """Fields that follow each other: a tag, eight bytes of length, the value, a bar."""

    data: bytes
    at: int = 0

    def value(self, tag: bytes) -> bytes:
        begin = self.at + len(tag) + 8
        end = begin + int.from_bytes(self.data[begin - 8 : begin], "little")
        if not self.data.startswith(tag, self.at) or self.data[end : end + 1] != b"|":
            raise FormError(f"no field {tag.decode()!r} at byte {self.at}")
        self.at = end + 1
        return self.data[begin:end]

    def number(self, tag: bytes, size_bytes: int = 8) -> int:
        value = self.value(tag)
        if len(value) != size_bytes:
            raise FormError(f"a number {tag.decode()!r} of {len(value)} bytes")
        return int.from_bytes(value, "little")

    def word(self, tag: bytes, expected: bytes) -> None:
        if (found := self.value(tag)) != expected:
            raise FormError(f"{found!r}, where {expected!r} was to be")


def malformed(metadata: bytes) -> str:
    """What of it NIXL does not write, after "the metadata"; empty: nothing."""
    try:
        _check(metadata)
    except FormError as error:
        return f"is malformed: {error}"
    return ""


def _check(metadata: bytes) -> None:
    if not metadata.startswith(MAGIC):
        raise FormError("it does not begin as metadata does")
    fields = _Fields(metadata, len(MAGIC))
    fields.value(b"Agent")
    # A count that is too large runs out of fields.
    for _ in range(fields.number(b"Conns")):
        fields.value(b"t")
        fields.value(b"c")
    fields.word(b"", b"MemSection")
    for _ in range(fields.number(b"nixlSecElms")):
        fields.value(b"bknd")
        fields.word(b"nixlDList", b"nixlSDList")
        if (kind := fields.number(b"t", 4)) not in KINDS:
            raise FormError(f"memory of kind {kind}")
        for _ in range(fields.number(b"n")):
            _check_key(fields.value(b"")[PLACE_BYTES:])
    if fields.at != len(metadata):
        raise FormError("it goes on behind its last field")


def _check_key(key: bytes) -> None:
    """A map of UCX's memory domains, a type of memory, a key for each domain, and distances."""
    domains = int.from_bytes(key[:8], "little").bit_count()
    if len(key) < 9 + domains or key[8] >= MEMORY_TYPES:
        raise FormError("a remote key of a type that is none")
    at = 9
    for _ in range(domains):
        at += 1 + key[at] if at < len(key) else len(key)
    if at > len(key):
        raise FormError("a remote key that ends too early")
