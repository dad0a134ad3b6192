"""The global tensors: one bit pattern for every (field, element, token), before any cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from restow.broker.layout import DType, Field, Kind, Model

Patterns = npt.NDArray[np.unsignedinteger]
Floats = npt.NDArray[np.float32]

POISON = 0xA5
FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SCRAMBLE = {1: 167, 2: 40503, 4: 2654435761}  # odd, so that distinct ids stay distinct


@dataclass(frozen=True, slots=True)
class GlobalState:
    """The whole state of a prompt, as no rank ever holds it.

    ``numbers``: elements are numbers that every float type holds exactly, so that they survive
    casts, if their type can be cast; else they are scrambled ids, distinct over all fields as far
    as the type allows.
    """

    model: Model
    tokens: int
    numbers: bool = False
    cold: tuple[Field, ...] = ()
    """What has no value, and is zero."""

    def tensor(self, name: str, dtype: DType) -> Patterns:
        """Return the bit patterns ``[token, *shape]`` of a field; a snapshot has one token."""
        for field in self.cold:
            if field.name == name:
                shape = self._entries(field), *field.shape
                return np.zeros(shape, _UINTS[dtype.itemsize_bytes])
        if self._source(name):
            window = self.weights(name) @ self.read(self._source(name)).T
            return to_bits(window.astype(np.float32), dtype)[None]
        first = 0
        for field in self.model.fields:
            count = self._entries(field) * int(np.prod(field.shape, dtype=np.int64))
            if field.name == name:
                ids = np.arange(first, first + count, dtype=np.uint64)
                numbers = self.numbers and dtype.castable
                bits = _numbers(ids, dtype) if numbers else _scrambled(ids, dtype)
                return bits.reshape(self._entries(field), *field.shape)
            first += count
        raise KeyError(name)

    def read(self, name: str) -> Floats:
        """Return what a mixer read last, ``[tap, hidden]``; zero before the prompt."""
        field = next(field for field in self.model.inputs if field.name == name)
        values = _integers(name, field.shape)
        values[: max(field.shape[0] - self.tokens, 0)] = 0
        return values

    def weights(self, name: str) -> Floats:
        """Return the weights of a window, ``[*shape without tap, hidden]``."""
        field = next(field for field in self.model.fields if field.name == name)
        source = self._source(name)
        hidden = next(one.shape[1] for one in self.model.inputs if one.name == source)
        return _integers(name, (*field.shape[:-1], hidden))

    def _source(self, name: str) -> str:
        """Return the name of the input that a window is made of; empty if the model has none."""
        layer, _, rest = name.partition(".conv.")
        source = f"{layer}.mixer_input"
        return source if rest and any(f.name == source for f in self.model.inputs) else ""

    def _entries(self, field: Field) -> int:
        return self.tokens if field.kind is Kind.PER_TOKEN else 1


def _integers(name: str, shape: tuple[int, ...]) -> Floats:
    """Return small integers: products and their sums are exact in every float type."""
    rng = np.random.default_rng(list(name.encode()))
    values: Floats = rng.integers(-3, 4, shape).astype(np.float32)
    return values


def _scrambled(ids: npt.NDArray[np.uint64], dtype: DType) -> Patterns:
    item = dtype.itemsize_bytes
    bits = (ids * np.uint64(_SCRAMBLE[item])).astype(_UINTS[item])
    poison = int.from_bytes(bytes([POISON] * item), "little")
    bits[bits == poison] = 0  # else a missing write could not be seen
    return bits


def _numbers(ids: npt.NDArray[np.uint64], dtype: DType) -> Patterns:
    """Return numbers with seven bits behind the point and small exponents.

    They are exact in each float type.
    """
    mixed = (ids * np.uint64(2654435761)).astype(np.int64) % (2 * 128 * 21)
    sign, rest = np.divmod(mixed, 128 * 21)
    exponent, fraction = np.divmod(rest, 128)
    value = ((1 - 2 * sign) * (1 + fraction / 128) * 2.0 ** (exponent - 10)).astype(np.float32)
    return to_bits(value, dtype)


def to_bits(values: npt.NDArray[np.float32], dtype: DType) -> Patterns:
    """Return numbers as bit patterns of a float type, rounded to nearest even."""
    if dtype is DType.FLOAT32:
        return values.view(np.uint32)
    if dtype is DType.FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32).astype(np.uint64)
    return ((wide + np.uint64(0x7FFF) + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def to_floats(bits: Patterns, dtype: DType) -> npt.NDArray[np.float32]:
    """Return bit patterns of a float type as numbers."""
    if dtype is DType.FLOAT32:
        return bits.view(np.float32)
    if dtype is DType.FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
