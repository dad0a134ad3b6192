"""What a picture shows, said in words that are made from the plan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter

from restow.broker.draw.explain import holders
from restow.broker.draw.layer_state import LayerState
from restow.broker.draw.piece_counts import Per, PieceCount
from restow.broker.layout import Box, Field
from restow.broker.planner.plan import Move, Place


def remarks(
    state: LayerState,
    fields: dict[str, Field],
    pieces: dict[int, tuple[PieceCount, ...]],
    word: str,
) -> tuple[str, ...]:
    """Sentences about a state: its pieces and why they are so many; who keeps which tokens; what is
    shared, cast, zeroed and rebuilt.

    ``pieces`` are those of every destination rank; ``word`` is what one of them is called.
    """
    return (
        *_pieces(state, fields, pieces, word),
        *_tokens(state),
        *_shared(state),
        *_casts(state),
        *_rebuilt(state),
        *_zeroed(state),
    )


def listed(words: Iterable[str]) -> str:
    """Words as people list them.

    >>> listed(["x", "B", "C"])
    'x, B and C'
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _pieces(
    state: LayerState,
    fields: dict[str, Field],
    pieces: dict[int, tuple[PieceCount, ...]],
    word: str,
) -> Iterable[str]:
    """How many pieces, and the reason."""
    totals = {rank: sum(one.count for one in found) for rank, found in pieces.items()}
    rank = max(totals, key=lambda rank: totals[rank])
    found, moves = pieces[rank], [move for move in state.moves if move.dst_rank == rank]
    least, most = min(totals.values()), totals[rank]
    per = {one.per for one in found}
    unit_word = "token" if Per.TOKEN in per else "page" if Per.PAGE in per else state.word
    span = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    reasons = "; ".join(_reasons(state, fields, found, moves))
    yield f"{span} {word}{'s' * (most > 1)} a {unit_word} for each rank of D: {reasons}"


def _reasons(
    state: LayerState, fields: dict[str, Field], found: Sequence[PieceCount], moves: Sequence[Move]
) -> Iterable[str]:
    names = state.classes()
    largest = {names[m.field]: m for m in sorted(moves, key=lambda move: move.elements)}
    by_reason: dict[str, list[str]] = defaultdict(list)
    single: list[str] = []
    for several in _joined(found):
        those = [one for one in found if several[0] in one.names]
        sources = {src for one in those for src in one.sources}
        alike = {move.field for move in moves if names[move.field] == several[0]}
        runs = sum(one.count for one in those) // (len(sources) * len(alike))
        move = largest[several[0]]
        field = fields[move.field]
        if those[0].elements:
            here, there = (_innermost(field, move.box, place) for place in (move.src, move.dst))
            reason = f"fall into single elements, as innermost is {here} on P and {there} on D"
            by_reason[reason] += several
        elif runs > 1:
            reason = f"lie apart for each {_axes(field, move, runs)}"
            by_reason[f"lie side by side, but {reason[4:]}" if len(several) > 1 else reason] += (
                several
            )
        elif len(several) > 1:
            by_reason["follow each other on both sides"] += several
        else:
            single += several
    for reason, several_names in by_reason.items():
        yield _said(several_names, reason)
    if single:
        yield _apart(single, moves, names)
    if any(len(one.names) > 1 and one.names not in _joined(found) for one in found):
        yield "neighbours on both sides count as one"


def _said(names: Sequence[str], reason: str) -> str:
    """Of one name in the singular."""
    verb, rest = reason.split(" ", 1)
    return f"{listed(names)} {verb + 's' if len(names) == 1 else verb} {rest}"


def _joined(found: Sequence[PieceCount]) -> list[tuple[str, ...]]:
    """Names that are always joined in one piece together; all others alone."""
    joins: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for one in found:
        for name in one.names:
            joins[name].add(one.names)
    units: dict[tuple[str, ...], None] = {}
    for name, groups in joins.items():
        (group, *others) = groups
        always = not others and all(joins[other] == groups for other in group)
        units[group if always else (name,)] = None
    return list(units)


def _apart(single: Sequence[str], moves: Sequence[Move], names: dict[str, str]) -> str:
    """Names whose part from one source is one piece, and on which side they lie apart."""
    by_source: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        if names[move.field] in single:
            by_source[move.src_rank].append(move)
    ranks = f" from each of {len(by_source)} ranks of P" if len(by_source) > 1 else ""
    if len(single) == 1:
        return f"{single[0]} in one piece{ranks}"
    on_p, on_d = (
        any(_gaps(group, place) for group in by_source.values())
        for place in (attrgetter("src"), attrgetter("dst"))
    )
    if on_p and on_d:
        return f"{listed(single)} lie apart on both sides{ranks and ', in one piece each'}{ranks}"
    here, there = ("P", "D") if on_p else ("D", "P")
    return f"{listed(single)} follow each other on {there}, but their parts lie apart on {here}"


def _gaps(moves: Sequence[Move], place_of: Callable[[Move], Place]) -> bool:
    """Whether runs of bytes do not follow each other in one page."""
    placed = [(place_of(move), move.elements) for move in moves]
    runs = sorted(
        (place.region, place.offset_bytes, elements * place.dtype.itemsize_bytes)
        for place, elements in placed
    )
    return any(one[0] != other[0] or one[1] + one[2] != other[1] for one, other in pairwise(runs))


def _innermost(field: Field, box: Box, place: Place) -> str:
    steps = zip(place.strides_bytes, field.axes, box, strict=True)
    wide = ((step, axis) for step, axis, span in steps if span.size > 1)
    return min(wide, default=(0, "nothing"))[1]


def _axes(field: Field, move: Move, pieces: int) -> str:
    """The outermost axes of a box that make up its number of pieces."""
    order = sorted(range(len(move.box)), key=lambda axis: -move.src.strides_bytes[axis])
    product, used = 1, list[str]()
    for axis in order:
        if product == pieces:
            break
        if move.box[axis].size > 1:
            product *= move.box[axis].size
            used.append(field.axes[axis])
    return " and ".join(used) if used and product == pieces else "row of it"


def _tokens(state: LayerState) -> Iterable[str]:
    """Whose ranks share tokens out, and what that means for D's."""
    moves = [move for move in state.moves if move.per_token]
    cuts = [
        {(held.parts, held.interleave_tokens) for held in some}
        for some in ({move.src.tokens for move in moves}, {move.dst.tokens for move in moves})
    ]
    words = []
    for name, cut in zip("PD", cuts, strict=True):
        for parts, run in sorted(cut):
            if parts > 1:
                words.append(f"{name}'s ranks share the tokens out in {parts} parts, {run} in turn")
    if words:
        alike = all(move.src.tokens == move.dst.tokens for move in moves)
        where = "pages move as pages" if alike else "each token is read from a rank that keeps it"
        yield f"{listed(words)}: {where}"


def _shared(state: LayerState) -> Iterable[str]:
    """What several ranks hold alike."""
    names = state.classes()
    here, there = holders(state.source), holders(state.destination)
    said: dict[tuple[int, int], list[str]] = defaultdict(list)
    for field in state.fields:
        counts = max(map(len, here[field].values())), max(map(len, there[field].values()))
        if max(counts) > 1:
            said[counts].append(names[field])
    for (copies, wanted), several in said.items():
        what = listed(dict.fromkeys(several))
        if copies > 1 and wanted > 1:
            yield (
                f"{copies} ranks of P hold the same {what}, and {wanted} of D want the same: "
                f"each of these is served by one of those"
            )
        elif wanted > 1:
            yield f"{wanted} ranks of D hold the same {what}: one rank of P serves them all"
        else:
            yield f"{copies} ranks of P hold the same {what}: one of them serves each rank of D"


def _casts(state: LayerState) -> Iterable[str]:
    names = state.classes()
    casts: dict[str, dict[str, None]] = defaultdict(dict)
    for move in state.moves:
        if move.src.dtype is not move.dst.dtype:
            cast = f"{move.src.dtype.label} to {move.dst.dtype.label}"
            casts[cast][names[move.field]] = None
    for cast, several in casts.items():
        yield f"cast on the way: {listed(several)} from {cast}"


def _rebuilt(state: LayerState) -> Iterable[str]:
    if state.rebuilt:
        names = state.classes()
        what = listed(dict.fromkeys(names[move.field] for move in state.rebuilt))
        most = max((one.bytes for one in state.inputs), default=0)
        yield f"rebuilt on D from {most:,} bytes of mixer inputs: {what}"


def _zeroed(state: LayerState) -> Iterable[str]:
    sizes = [
        sum(math.prod(one.sizes) * one.dtype.itemsize_bytes for one in rank.scratch)
        for rank in state.destination
    ]
    if most := max(sizes):
        many = f"{most:,}" if min(sizes) == most else f"up to {most:,}"
        yield f"{many} bytes of scratch rows a {state.word} are zeroed on each rank of D"
