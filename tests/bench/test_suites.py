"""`./run bench`: its options, its list of suites and its page, and what its simulations count."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.engine_pairs import RunningPairs, page_counts
from bench.main import SUITES, Suite, app
from bench.model_sizes import tiny_hybrid
from bench.page import PAGE, fresh
from bench.store.counting_engines import COMPUTED, HELD, MOVED
from bench.store.eviction import (
    SHAPES,
    TRACES,
    LeastRecentlyUsed,
    Trace,
    read_trace,
    simulate,
    turns_of,
    working_set_bytes,
)
from bench.store.router_sessions import Outcome, Sizes, play
from restow.agents.store.kept import Kept
from restow.agents.store.room import Room


def test_help_has_one_line_for_each_suite() -> None:
    done = CliRunner().invoke(app, ["--help"])
    lines = [line.split() for line in done.stdout.splitlines()]
    for suite in SUITES:
        assert [line for line in lines if line[:1] == [suite.name] and len(line) > 2]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_every_suite_has_its_function(suite: Suite) -> None:
    module, function = suite.function.split(":")
    assert callable(getattr(importlib.import_module(f"bench.{module}"), function))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suite", "nothing"), "there is no suite 'nothing'"),
        (("--case", "nano"), "name suites too"),
        (("--suite", "planning", "--sets", "2"), "name suites too"),
        (("--suite", "planning", "--trace", __file__), "name the suite eviction too"),
    ],
)
def test_wrong_options_are_refused(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert words in done.output


def test_rows_are_written_with_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--suite", "host-copies", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0
    written = json.loads(file.read_text())
    assert "Linux" in written["machine"]
    assert {row["suite"] for row in written["rows"]} == {"host-copies"}
    assert all(row["ratio"] == row["reference_value"] / row["value"] for row in written["rows"])


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert fresh(page) == page, "docs/benchmarks.md is older than bench/results: run bench/page.py"


TOKENS, PROMPTS = 100, 8
LAYOUT = tiny_hybrid(2)
PAIRS = RunningPairs("pairs", TOKENS, PROMPTS, True, {}, {}, {"pair": (LAYOUT, LAYOUT)})


def test_handoffs_under_way_at_once_have_no_block_in_common() -> None:
    # A broker refuses a request for blocks that another open handoff will write.
    places = [PAIRS.blocks_of_place(LAYOUT, place) for place in range(PROMPTS)]
    for group, count in page_counts(LAYOUT, TOKENS, PROMPTS).items():
        used = [block for blocks in places for block in blocks[group]]
        assert sorted(used) == list(range(count))


def test_a_prompts_blocks_are_drawn_from_the_room_of_two() -> None:
    drawn = PAIRS.blocks(LAYOUT, np.random.default_rng(0))
    for group, count in page_counts(LAYOUT, TOKENS).items():
        assert len(drawn[group]) == len(set(drawn[group])) == count // 2
        assert all(0 <= block < count for block in drawn[group])


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_seed_makes_the_same_trace_in_order_of_time(trace: Trace) -> None:
    requests = list(trace(3, 60))
    assert requests == list(trace(3, 60)) != list(trace(4, 60))
    assert sorted(requests, key=lambda one: one.at_s) == requests


@pytest.mark.parametrize("name", SHAPES)
def test_the_stores_rule_finds_more_than_lru_and_less_than_endless_room(name: str) -> None:
    turns, shape = list(turns_of(TRACES["prompts"](0, 120))), SHAPES[name]
    size = working_set_bytes(turns, shape)
    lru = simulate(turns, LeastRecentlyUsed(shape, Room(shape.page_bytes, size // 10)))
    ours = simulate(turns, Kept(shape, Room(shape.page_bytes, size // 10)))
    endless = simulate(turns, Kept(shape, Room(shape.page_bytes, 2 * size)))
    assert lru.hit_tokens < ours.hit_tokens < endless.hit_tokens < endless.tokens


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_of_a_file_is_found_up_to_whole_blocks(tmp_path: Path, packed: bool) -> None:
    asked = ((1300, [1, 2, 3]), (1500, [1, 2, 4]), (1600, [1, 2, 3, 5]), (1100, [1, 2, 9]))
    lines = "".join(
        json.dumps({"timestamp": 7, "input_length": tokens, "output_length": 9, "hash_ids": ids})
        + "\n"
        for tokens, ids in asked
    )
    path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
    path.write_bytes(gzip.compress(lines.encode()) if packed else lines.encode())
    turns = list(turns_of(read_trace(path)))
    assert [turn.ends for turn in turns] == [(1024,), (1024,), (1024, 1536), (1024,)]
    for shape in SHAPES.values():
        outcome = simulate(turns, Kept(shape, Room(shape.page_bytes, 1 << 30)))
        assert outcome.hit_tokens == 3 * 1024
        assert outcome.tokens == sum(tokens - 1 for tokens, _ in asked)


SMALL = Sizes(users=6, system_prompts=2, system_tokens=128, at_once=2, find_s=5.0)
TURNS = 3


def test_a_router_that_finds_computes_and_moves_less() -> None:
    finding, without = Outcome(), Outcome()
    asyncio.run(play(finding, SMALL, seed=1, turns=TURNS, finds=True))
    asyncio.run(play(without, SMALL, seed=0, turns=TURNS, finds=False))
    for one in (finding, without):
        assert one.prefill.keys() <= {COMPUTED, HELD}
        assert one.decode.keys() <= {MOVED, HELD}
        assert one.prefill.total() == one.decode.total()
        assert len(one.first_s) == SMALL.users * (TURNS - 1)
    assert finding.found > without.found
    assert finding.prefill[COMPUTED] < without.prefill[COMPUTED]
    assert finding.decode[MOVED] < without.decode[MOVED]
