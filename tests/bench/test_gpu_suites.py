"""The benches of a GPU: what they check, and what they do without a GPU or after a failure."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from bench.gpu.device import on_gpu
from bench.gpu.engine_work import KERNELS, OTHER, DecodingSteps, write_late
from bench.known_state import KnownState, Pages
from bench.main import Suite, app
from bench.model_sizes import tiny_hybrid
from bench.report import Put, Row
from restow.broker.layout import Layout

TOKENS, BLOCKS = 40, 8
LAYOUT = tiny_hybrid(2)
OF_A_RANK = Layout(LAYOUT.model, LAYOUT.ranks[1:])
STATE = KnownState(OF_A_RANK, TOKENS)
PLACES = [{"attention": [5, 0, 3], "state": [2]}, {"attention": [1, 2, 6], "state": [7]}]


def memory() -> Pages:
    """Return a rank's pages, with other bytes than the state's."""
    return {
        region.name: (region.group, torch.full((BLOCKS, region.page_stride_bytes), OTHER).byte())
        for region in OF_A_RANK.ranks[0].regions
    }


def test_a_byte_of_the_state_that_is_wrong_is_counted_and_padding_is_not() -> None:
    pages = memory()
    for blocks in PLACES:
        STATE.write(pages, blocks)
    assert STATE.wrong_bytes(pages, PLACES) == 0
    there = next(there for group, there in pages.values() if group == "attention")
    there[3, -1] ^= 1  # of a token behind the last one
    assert STATE.wrong_bytes(pages, PLACES) == 0
    there[5, 0] ^= 1
    there[1, 0] ^= 1
    assert STATE.wrong_bytes(pages, PLACES) == 2
    assert STATE.wrong_bytes(pages, PLACES[:1]) == 1


def test_a_late_write_reaches_the_named_blocks_when_its_event_has_passed() -> None:
    pages = memory()
    for blocks in PLACES:
        STATE.write(pages, blocks)
    write_late(pages, PLACES[:1], late_s=0.01).synchronize()
    for group, there in pages.values():
        assert (there[PLACES[0][group]] == OTHER).all()
    assert STATE.wrong_bytes(pages, PLACES[:1])
    assert STATE.wrong_bytes(pages, PLACES[1:]) == 0


def test_steps_with_another_result_are_counted() -> None:
    steps = DecodingSteps(torch.device("cpu"), layers=2, width=16)
    first = steps.run(KERNELS, 0.0)
    assert first["wrong"] == 0
    assert 0 < first["p50"] <= first["p99"]
    steps._weights[0][:, 3] += 1
    assert steps.run(KERNELS, 0.0)["wrong"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_without_a_gpu_a_rehearsal_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not on_gpu()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="no GPU on this machine"):
        on_gpu()


def test_a_suite_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(suite: Suite, put: Put, repeats: int, *chosen: object) -> None:
        ran.append(suite.name)
        if suite.name == "gpu-kernels":
            raise RuntimeError("the device is broken")
        put(Row(suite.name, "a case", 0, 1.0, "another", 1.0, 1.0))

    monkeypatch.setattr(Suite, "run", run)
    done = CliRunner().invoke(app, ["--suite", "gpu", "--case", "nano"])
    assert ran == ["gpu-host-work", "gpu-kernels", "gpu-decoding", "gpu-at-once", "gpu-strategies"]
    assert done.exit_code == 1
    assert "FAILED: gpu-kernels" in done.stdout
    assert "gpu-strategies: a case" in done.stdout
