"""PROJECT: windows are the products of weights and inputs, everything else keeps its bytes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional
from kernel_arena import Arena, both

from restow.kernels import (
    ProjectColumn,
    ProjectTable,
    ProjectTableError,
    project,
    project_windows,
    reference,
)
from restow.kernels.host_product import padded_rows, repeats

Project = Callable[[ProjectTable, torch.device], None]
CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = [(code, code) for code in range(3)] + [(1, 0), (0, 1), (0, 2), (2, 1)]
on_both = both(project_windows, project.project_windows)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return small integers: every sum of products is exact in each type, in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def row(
    inputs: torch.Tensor, weights: torch.Tensor, dst: int, steps: tuple[int, int], codes: list[int]
) -> list[int]:
    """Return a row for contiguous tensors; ``steps`` are those of channels and taps."""
    item = inputs.element_size()
    (taps, hidden), channels = inputs.shape, len(weights)
    source = [inputs.data_ptr(), inputs.stride(0) * item, taps, hidden]
    return [
        *source,
        weights.data_ptr(),
        weights.stride(0) * item,
        channels,
        dst,
        *steps,
        *codes,
    ]


@on_both
@pytest.mark.parametrize("codes", PAIRS, ids=str)
@pytest.mark.parametrize("taps_inside", [True, False], ids=["DS", "SD"])
def test_windows_of_all_sizes(run: Project, codes: tuple[int, int], taps_inside: bool) -> None:
    target, rows, kept = Arena(1 << 16), [], []
    dtype, dst_dtype = (TYPES[code] for code in codes)
    item, at = dst_dtype.itemsize, 64
    for taps, hidden, channels in ((3, 128, 70), (1, 5, 1), (4, 65, 64), (17, 3, 2), (3, 200, 129)):
        inputs = numbers(taps, hidden + 3, seed=hidden)[:, :hidden].to(dtype)
        weights = numbers(channels, hidden + 1, seed=channels).to(dtype)[:, :hidden]
        steps = (taps * item, item) if taps_inside else (item, channels * item)
        rows.append(row(inputs, weights, target.address + at, steps, list(codes)))
        kept += [inputs, weights]
        at += -(-taps * channels * item // 64) * 64 + 64
    table, want = np.array(rows, np.int64), target.twin()
    elsewhere = table.copy()
    elsewhere[:, ProjectColumn.DST_ADDRESS] += want.address - target.address
    reference.project_windows(ProjectTable.checked(elsewhere))
    run(ProjectTable.checked(table), CPU)
    assert np.array_equal(target.memory, want.memory)


@on_both
@pytest.mark.parametrize("code", range(3))
def test_numbers_as_they_come(run: Project, code: int) -> None:
    # The result is not right to the last bit: another order of additions is another sum.
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 300, generator=generator).to(TYPES[code])
    weights = torch.randn(90, 300, generator=generator).to(TYPES[code])
    out = torch.zeros(3, 90, dtype=TYPES[code])
    item = out.element_size()
    table = [row(inputs, weights, out.data_ptr(), (item, 90 * item), [code, code])]
    run(ProjectTable.checked(np.array(table, np.int64)), CPU)
    exact = inputs.double() @ weights.double().T
    assert torch.allclose(out.double(), exact, rtol=2.0 ** [-18, -7, -10][code], atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("code", "hidden"), [(0, 128), (1, 128), (2, 128), (0, 2688), (2, 2688)])
def test_the_twin_gives_the_bits_of_a_long_prompt(code: int, hidden: int, threads: int) -> None:
    """Check rows of the weights, and the last rows of any prompt that has `padded_rows`.

    Wide rows in bfloat16 are not equal everywhere: `restow.kernels.host_product` says where.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(hidden)
        weights = torch.randn(301, hidden, generator=generator).to(TYPES[code])
        prompt = torch.randn(200, hidden, generator=generator).to(TYPES[code])
        for tokens in (padded_rows(3), 37, 200):
            whole = torch.nn.functional.linear(prompt[None, :tokens], weights)[0, -3:]
            out = torch.zeros(3, 100, dtype=TYPES[code])
            item, part = out.element_size(), weights[77:177]
            made = row(prompt[tokens - 3 : tokens], part, out.data_ptr(), (item, 100 * item), [])
            table = np.array([[*made, code, code]], np.int64)
            project_windows(ProjectTable.checked(table), CPU)
            assert torch.equal(out, whole[:, 77:177]), tokens
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("code", [0, 2])
def test_trying_finds_that_products_repeat(code: int) -> None:
    assert repeats(torch.randn(301, 128).to(TYPES[code]))


@pytest.mark.parametrize("more_than", ["the few rows", 511, 2047])
def test_trying_finds_that_they_do_not(
    monkeypatch: pytest.MonkeyPatch, more_than: int | str
) -> None:
    # The library takes another routine for long prompts, as on a processor with AMX.
    most_rows = padded_rows(1) if isinstance(more_than, str) else more_than  # by the processors
    linear = torch.nn.functional.linear

    def other_routine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        product = linear(rows, weights)
        if rows.shape[-2] > most_rows:
            last = product[..., -1, :]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        return product

    monkeypatch.setattr(torch.nn.functional, "linear", other_routine)
    assert not repeats(torch.randn(301, 128))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (ProjectColumn.TYPE, 3),
        (ProjectColumn.DST_TYPE, -1),
        (ProjectColumn.TAPS, 0),
        (ProjectColumn.HIDDEN, -1),
        (ProjectColumn.CHANNELS, 0),
        (ProjectColumn.SRC_ADDRESS, 0),
        (ProjectColumn.WEIGHT_ADDRESS, 4098),
        (ProjectColumn.DST_ADDRESS, -4),
        (ProjectColumn.DST_STRIDE_BYTES, 0),
        (ProjectColumn.SRC_TAP_STRIDE_BYTES, 6),
    ],
)
def test_a_wrong_row_is_refused(column: ProjectColumn, value: int) -> None:
    good = [4096, 8, 2, 2, 4096, 8, 2, 4096, 4, 8, 0, 0]
    ProjectTable.checked(np.array([good], np.int64))
    good[column] = value
    with pytest.raises(ProjectTableError, match=column.name):
        ProjectTable.checked(np.array([good], np.int64))


def test_a_table_of_another_form_is_refused() -> None:
    with pytest.raises(ProjectTableError, match="want int64"):
        ProjectTable.checked(np.zeros((1, 11), np.int64))
