"""Members that have said nothing for as long as their lease is, by our own clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from restow.broker.kubernetes.leases import MemberLease


@dataclass(slots=True)
class _Word:
    """The newest that was heard of a life."""

    version: str
    heard_s: float
    gap_s: float
    """So long the API may say nothing to us: where it does not speak, nobody is silent."""


class Silence:
    """When the newest word of each member was first heard here, while the API spoke to us.

    Else, when the API comes back, whoever is first would end all others before they are heard.
    """

    def __init__(self) -> None:
        """Nobody is known."""
        self._words: dict[str, _Word] = {}
        """By life."""
        self._answered_s = float("-inf")

    def answered(self, now_s: float) -> None:
        """The API has said something to us, whatever it was."""
        gap_s, self._answered_s = now_s - self._answered_s, now_s
        for one in self._words.values():
            if gap_s > one.gap_s:
                one.heard_s = now_s

    def hear(self, members: Iterable[MemberLease], now_s: float) -> None:
        """Take all members that are there: a version that is new here is a word."""
        words = {}
        for one in members:
            known = self._words.get(one.life)
            if known is None or known.version != one.version:
                known = _Word(one.version, now_s, one.length_s / 2)
            words[one.life] = known
        self._words = words

    def over(self, members: Iterable[MemberLease], now_s: float) -> list[MemberLease]:
        """Those of whose version nothing newer was heard for the length that it names."""
        silent_s = now_s - self._answered_s
        found = [(one, self._words.get(one.life)) for one in members]
        return [
            one
            for one, word in found
            if word is not None and silent_s <= word.gap_s and now_s - word.heard_s >= one.length_s
        ]

    def wait(self, member: MemberLease, now_s: float) -> None:
        """Begin anew with one that was not as we thought."""
        self._words[member.life].heard_s = now_s
