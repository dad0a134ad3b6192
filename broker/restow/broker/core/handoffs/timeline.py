"""A handoff's timeline: what happened to it, and when."""

from __future__ import annotations

MAX_ENTRIES = 256
MAX_OFTEN = 8
"""Entries of an event that a side can cause as often as it likes."""
WAITS, PLANNED = "waits for a plan", "planned"
"""The events when a handoff begins to wait for the plan of its pair, and when the plan is made."""
MAX_WORDS = 256
"""Longest text of a refusal."""


class Timeline(list[tuple[float, str, object]]):
    """Entries of time, event and unformatted details: handoffs are many, and few are looked at.

    `append` adds an entry of a step that a handoff takes only once before something is noted.
    """

    __slots__ = ()

    def note(self, now_s: float, event: str, detail: object = "") -> None:
        """Add an entry; a long timeline keeps its beginning and its end."""
        self.append((now_s, event, detail))
        while len(self) > MAX_ENTRIES:
            del self[MAX_ENTRIES // 2]

    def note_often(self, now_s: float, event: str, detail: object = "") -> None:
        """Add an entry that may repeat often; the event's first and latest entries are kept."""
        if len(self) >= MAX_OFTEN:
            known = [index for index, entry in enumerate(self) if entry[1] == event]
            if len(known) >= MAX_OFTEN:
                del self[known[1]]
            self.note(now_s, event, detail)
        else:
            self.append((now_s, event, detail))

    def note_wait_for_plan(self, now_s: float) -> None:
        """Add the beginning of the wait for a plan, unless it has begun."""
        if not self.waits_for_plan:
            self.note(now_s, WAITS)

    def note_planned(self, now_s: float) -> None:
        """Add the end of the wait for a plan, if it has begun."""
        since_s = self._waits_since_s()
        if since_s is not None:
            self.note(now_s, PLANNED, now_s - since_s)

    def _waits_since_s(self) -> float | None:
        for at_s, event, _ in reversed(self):
            if event in (WAITS, PLANNED):
                return at_s if event == WAITS else None
        return None

    @property
    def waits_for_plan(self) -> bool:
        """Return whether the wait for a plan has begun and not ended."""
        return self._waits_since_s() is not None

    @property
    def refusal(self) -> str:
        """Return what was refused last, to whom and why; empty if nothing was refused."""
        refusals = [detail for _, event, detail in self if event == "refused"]
        return in_words("refused", refusals[-1]) if refusals else ""

    def note_refused(self, now_s: float, engine_id: str, reason: str, words: str) -> None:
        """Add a refusal of a side's message with its reason."""
        self.note_often(now_s, "refused", (reason, engine_id, words[:MAX_WORDS]))


def in_words(event: str, detail: object) -> str:
    """Format an entry's details for people."""
    match event, detail:
        case "published", int(position):
            return f"whole, at position {position}"
        case "fenced", int(rank):
            return f"rank {rank}"
        case "fenced early", (int(rank), int(tokens)):
            return f"rank {rank}, {tokens} tokens"
        case "read early", int(tokens):
            return f"up to token {tokens}"
        case "requested", int(held):
            return f"holding {held} tokens"
        case "looked up", (int(count), int(tokens)):
            return f"engines that hold its {tokens} tokens: {count}"
        case "granted", (float(seconds), tuple(strategies)):
            return f"for {seconds:.3f} s" + (f", by {' and '.join(strategies)}" * bool(strategies))
        case "planned", float(seconds):
            return f"after {seconds:.3f} s"
        case "staged", (int(src_rank), int(dst_rank)):
            return f"rank {src_rank} gathered for rank {dst_rank}"
        case "refused", (str(reason), str(engine), str(words)):
            return f"{reason} to {engine}: {words}"
        case "settled", (int(rank), int(size_bytes), int(elapsed_us)):
            return f"rank {rank} read {size_bytes} bytes in {elapsed_us} us"
    return str(detail)
