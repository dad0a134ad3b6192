"""Random piece tables without overlaps, for Hypothesis."""

import numpy as np
from hypothesis import strategies as st
from kernel_arena import Arena

from restow.kernels import CopyCode, PieceTable
from restow.kernels.codes import DST_BYTES, SRC_BYTES

SOURCE = Arena(1 << 16, seed=1)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 40, max_count: int = 70) -> tuple[PieceTable, Arena]:
    """Draw rows, lay their destinations out without overlap, and shuffle them.

    Rows come in groups of equal shape, as real tables do; a group may be evenly spaced at the
    source, and its destinations interleave or follow one another.
    """
    rows: list[tuple[int, ...]] = []
    end = 0
    while len(rows) < max_rows and draw(st.booleans() if rows else st.just(True)):
        code = draw(st.sampled_from(CopyCode))
        src_unit, dst_unit = int(SRC_BYTES[code]), int(DST_BYTES[code])
        n = draw(st.integers(1, max_rows - len(rows)))
        count = draw(st.sampled_from((0, 1, 2, 3, 5, 8, 32, 63, max_count, 128)))
        src_step = src_unit * draw(st.sampled_from((1, 1, 2, 3, 17)))
        dst_step = dst_unit * draw(st.sampled_from((1, 1, 2, 3)))
        span = max(count - 1, 0) * src_step + src_unit
        room = (len(SOURCE.bytes) - span) // 8 * 8
        if draw(st.booleans()):  # evenly spaced
            gap = draw(st.integers(0, room // n // src_unit)) * src_unit
            src = draw(st.integers(0, (room - n * gap) // 8)) * 8 + np.arange(n) * gap
        else:
            seed = draw(st.integers(0, 9))
            src = np.random.default_rng(seed).integers(0, room // src_unit, n) * src_unit
        if draw(st.booleans()) and n * dst_unit <= dst_step * 3:  # interleaved: row i + 1 in a gap
            dst_step = max(dst_step, n * dst_unit)
            dst = end + np.arange(n) * dst_unit
            end += max(count, 1) * dst_step + n * dst_unit
        else:
            gap = max(count - 1, 0) * dst_step + dst_unit
            gap += draw(st.sampled_from((0, 0, 1, 5))) * dst_unit
            dst = end + np.arange(n) * gap
            end += n * gap
        end += -end % 8 + draw(st.sampled_from((0, 8)))
        rows += [
            (SOURCE.address + int(a), int(b), count, src_step, dst_step, int(code))
            for a, b in zip(src, dst, strict=True)
        ]
    order = draw(st.sampled_from(("as is", "reversed", "shuffled")))
    if order == "reversed":
        rows.reverse()
    elif order == "shuffled":
        draw(st.randoms(use_true_random=False)).shuffle(rows)
    target = Arena(end)
    table = np.array(rows, dtype=np.int64)
    table[:, 1] += target.address
    return PieceTable.checked(table), target
