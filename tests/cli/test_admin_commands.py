"""The operator's commands against a broker that runs as a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, model_layout, pair
from cli.broker_process import broker_process, run_restow
from cli.typed import document, document_aside, failed, printed, printed_aside
from restow.broker.cli.commands.serve import is_loopback
from restow.broker.client import EngineSession
from restow.broker.layout import Layout
from restow.broker.planner import CostModel
from restow.broker.reasons import REASONS


@dataclass(frozen=True, slots=True)
class Shown:
    """What the commands printed while engines were connected."""

    texts: dict[str, str]
    documents: dict[str, Any]
    handoff: dict[str, Any]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with broker_process("--log-format", "json") as where:
        yield where


@pytest.fixture(scope="module")
def shown(address: str) -> Shown:
    """Return the output of every command, run while three handoffs are known."""

    async def hold() -> Shown:
        async with pair(address, 2, 1, hosts=("host-p", "host-d")) as both:
            await both.hand_over("a-good-one")
            both.p.publish("waits-for-d", P_BLOCKS, POSITION)
            refused = both.d.request("nobody-publishes-it", D_BLOCKS, timeout_ms=60)
            assert (await refused).reason == "NOT_PUBLISHED"
            async with engine(address, "lonely", layout=model_layout(1), agents=False):
                return await asyncio.to_thread(look)

    def look() -> Shown:
        where = ("--broker", address)
        commands = ("status", "engines", "agents", "handoffs", "costs")
        texts = {
            f"{name} {columns}": printed(name, *where, columns=columns)
            for name in commands
            for columns in (80, 200)
        }
        for name in ("a-good-one", "nobody-publishes-it"):
            texts[name] = printed("handoff", name, *where, columns=80)
        texts["waiting"] = printed("handoffs", "--state", "waiting", *where, columns=80)
        texts["one"] = printed("handoffs", "--limit", "1", *where, columns=80)
        documents = {name: document(name, *where) for name in commands}
        return Shown(texts, documents, document("handoff", "a-good-one", *where))

    return asyncio.run(hold())


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fit_their_terminal(shown: Shown, columns: int) -> None:
    for name, text in shown.texts.items():
        if name.endswith(str(columns)):
            assert max(map(len, text.splitlines())) <= columns, name


def test_status_counts(shown: Shown, address: str) -> None:
    status = shown.documents["status"]
    assert set(status) == {
        *("broker", "version", "broker_epoch", "uptime_s", "engines", "agents", "plans"),
        *("handoffs_live", "handoffs_quarantined", "handoffs_ended", "bytes_read"),
        *("handoffs_checked", "digest_mismatches", "draining", "requires_content"),
        *("membership", "models"),
    }
    assert status["broker"] == address
    assert status["membership"] is None, "it is alone"
    assert (status["engines"], status["agents"]) == (3, 3)
    assert status["plans"] >= 2, "and what was planned ahead"
    assert status["handoffs_live"] == 1
    assert status["handoffs_ended"] == {"DONE": 1, "FAILED": 0, "EXPIRED": 1, "CANCELLED": 0}
    assert status["bytes_read"] == 100
    assert (status["handoffs_checked"], status["digest_mismatches"]) == (0, 0)
    assert "1 DONE   0 FAILED   1 EXPIRED   0 CANCELLED" in shown.texts["status 80"]


async def test_an_engine_that_replaced_another_names_both_lives() -> None:
    async with (
        broker() as running,
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (older, _),
        engine(running.address, "twin", layout=model_layout(1), agents=False) as (newer, _),
    ):
        (twin,) = (await document_aside("engines", "--broker", running.address))["engines"]
        assert twin["incarnation"] == newer.ref.incarnation
        assert twin["replaced"] == [older.ref.incarnation]
        assert twin["age_s"] >= 0
        text = await printed_aside("engines", "--broker", running.address)
        assert f"twin: this life replaced {older.ref.incarnation} " in text


def of(revision: str, adapter: str = "") -> Layout:
    layout = model_layout(2)
    return replace(layout, model=replace(layout.model, revision=revision, adapter=adapter))


async def test_mixed_weights_are_told_by_status_and_engines() -> None:
    async with broker() as running:
        where = ("--broker", running.address)

        async def words_of(command: str) -> str:
            return " ".join((await printed_aside(command, *where)).split())

        async with (
            EngineSession("d1", "life", of("v1"), running.address),
            EngineSession("p1", "life", of("v1"), running.address),
        ):
            assert "weights" not in await words_of("status") + await words_of("engines")
            async with (
                EngineSession("p2", "life", of("v2"), running.address),
                EngineSession("p3", "life", of("", "lora"), running.address),
            ):
                words = "p3 of no revision lora; d1, p1 of v1; p2 of v2: nothing is handed over"
                assert f"weights {of('').model.name}: {words}" in await words_of("status")
                told = f"Mixed weights: {of('').model.name}: {words}"
                assert told in await words_of("engines")
                models = (await document_aside("status", *where))["models"]
                assert [(model["revision"], model["engines"]) for model in models] == [
                    ("", ["p3"]),
                    ("v1", ["d1", "p1"]),
                    ("v2", ["p2"]),
                ]


def test_engines_without_agents_stand_out(shown: Shown) -> None:
    by_id = {one["engine_id"]: one for one in shown.documents["engines"]["engines"]}
    assert [(one, by_id[one]["agents"], by_id[one]["ranks"]) for one in by_id] == [
        ("d", 1, 1),
        ("lonely", 0, 1),
        ("p", 2, 2),
    ]
    assert all(one["session"] for one in by_id.values())
    assert {one["revision"] for one in by_id.values()} == {"v1"}
    assert all("revision" in shown.texts[f"engines {columns}"] for columns in (80, 200))
    assert "0 of 1" in shown.texts["engines 80"]
    digest = by_id["p"]["layout_digest"]
    assert digest not in shown.texts["engines 80"]
    assert digest in shown.texts["engines 200"]


def test_agents_show_their_memory(shown: Shown) -> None:
    agents = shown.documents["agents"]["agents"]
    assert [(one["engine_id"], one["rank"]) for one in agents] == [("d", 0), ("p", 0), ("p", 1)]
    assert agents[0]["staging_bytes"] == 1 << 20
    assert "1.0 MiB" in shown.texts["agents 80"]


def test_costs_show_what_was_measured(shown: Shown) -> None:
    costs = shown.documents["costs"]
    assert costs["measured"] is True
    (one,) = costs["hosts"]
    assert (one["source_host"], one["destination_host"]) == ("host-p", "host-d")
    assert one["costs"]["seconds_per_descriptor"] == 2e-6
    assert one["costs"].keys() == asdict(CostModel()).keys()
    assert costs["otherwise"] == asdict(CostModel())
    assert "2.00 us" in shown.texts["costs 80"]


def test_costs_that_an_operator_gives_stand_for_all(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"seconds_per_stage": 0.25}))
    with broker_process("--costs", str(costs)) as address:
        told = document("costs", "--broker", address)
    assert (told["measured"], told["hosts"]) == (False, [])
    assert told["otherwise"] == asdict(CostModel(seconds_per_stage=0.25))


def test_handoffs_show_sides_state_and_reason(shown: Shown) -> None:
    listed = shown.documents["handoffs"]
    assert listed["left_out"] == 0
    by_id = {one["handoff_id"]: one for one in listed["handoffs"]}
    assert list(by_id) == ["waits-for-d", "nobody-publishes-it", "a-good-one"]
    good, lost, waits = by_id["a-good-one"], by_id["nobody-publishes-it"], by_id["waits-for-d"]
    assert set(good) == {
        *("handoff_id", "number", "state", "source_engine", "destination_engine", "bytes"),
        *("position_tokens", "reason", "detail", "age_s", "waits_for", "lease_s", "patience_s"),
        *("transfer_s", "strategies", "content", "tenant", "ended_ago_s", "expected_bytes"),
        *("reading_ranks", "settled_ranks", "readers", "delivered"),
        *("prefix_tokens", "offers", "offers_declined"),
    }
    assert (good["strategies"], waits["strategies"]) == (["slices"], [])
    assert 0 < good["transfer_s"] < 60
    assert (good["waits_for"], good["lease_s"], good["patience_s"]) == (None, None, None)
    assert waits["waits_for"] == "ranks [0, 1] of engine p have not fenced it"
    assert 0 < waits["lease_s"] <= 30
    assert waits["patience_s"] is None
    assert (good["state"], good["source_engine"], good["destination_engine"]) == ("DONE", "p", "d")
    found = lost["state"], lost["source_engine"], lost["reason"]
    assert found == ("EXPIRED", None, "NOT_PUBLISHED")
    assert (waits["state"], waits["destination_engine"], waits["reason"]) == ("WAITING", None, None)
    for columns, detail in ((80, False), (200, True)):
        text = shown.texts[f"handoffs {columns}"]
        assert "NOT_PUBLISHED" in text
        assert ("nobody published it" in text) == detail


def test_handoffs_can_be_narrowed(shown: Shown) -> None:
    assert "waits-for-d" in shown.texts["waiting"]
    assert "a-good-one" not in shown.texts["waiting"]
    assert "... and 2 more: raise --limit" in shown.texts["one"]


def test_a_handoff_tells_its_whole_story(shown: Shown) -> None:
    events = [entry["event"] for entry in shown.handoff["timeline"]]
    assert {"published", "fenced", "requested", "ready"} <= set(events[:-3])
    assert events[-3:] == ["granted", "settled", "ended"]
    times = [entry["at_ms"] for entry in shown.handoff["timeline"]]
    assert times == sorted(times)
    assert shown.handoff["state"] == "DONE"
    text = shown.texts["a-good-one"]
    assert "rank 0 read 100 bytes" in text
    assert (shown.handoff["meaning"], shown.handoff["next_step"]) == (None, None)
    refused = " ".join(shown.texts["nobody-publishes-it"].split())
    assert "NOT_PUBLISHED: D's request timed out" in refused
    assert f"Next: {REASONS['NOT_PUBLISHED'].next_step}" in refused


def test_a_tenant_sees_only_its_own(address: str, shown: Shown) -> None:
    other = ("--broker", address, "--tenant", "other")
    assert printed("engines", *other) == "No engine is registered.\n"
    assert printed("agents", *other) == "No agent is connected.\n"
    assert printed("handoffs", *other) == "No handoff.\n"


def test_an_unknown_handoff_is_an_error_with_a_reason(address: str) -> None:
    outcome = failed("handoff", "never-heard-of", "--broker", address)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("error: HANDOFF_UNKNOWN: handoff never-heard-of")
    outcome = failed("handoff", "never-heard-of", "--broker", address, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["reason"] == "HANDOFF_UNKNOWN"
    assert outcome.json["error"]["subject"] == {"handoff": "never-heard-of"}


@pytest.mark.parametrize("command", [("status",), ("handoffs",), ("handoff", "h")])
def test_a_broker_that_is_not_there(command: tuple[str, ...]) -> None:
    outcome = failed(*command, "--broker", "127.0.0.1:1")
    assert outcome.code == 3
    assert "no broker answers at 127.0.0.1:1" in outcome.err
    assert "restow serve" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("handoffs", "--state", "LOST"),
        ("handoffs", "--limit", "0"),
        ("handoff",),
        ("serve", "--lease-s", "0"),
        ("serve", "--strategy", "magic"),
        ("agent",),
        ("no-such-command",),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    outcome = failed(*arguments)
    assert outcome.code == 2
    assert "Usage: " in outcome.err


@pytest.mark.parametrize(
    "command", [("handoff", "\udcff"), ("release", "\udcff"), ("engines", "--tenant", "\udcff")]
)
def test_bytes_that_are_no_text_are_refused(command: tuple[str, ...], address: str) -> None:
    outcome = failed(*command, "--broker", address, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["reason"] == "ARGUMENT_INVALID"
    assert "no text in UTF-8" in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "0.0.0.0:0"), ("--insecure",)),
        (("--listen", "0.0.0.0:0", "--tokens", "tokens.json"), ("plaintext",)),
        (
            ("--etcd", "127.0.0.1:1,etcd.example:2379"),
            ("etcd.example:2379 is another", "--etcd-ca"),
        ),
    ],
)
def test_plaintext_beyond_this_machine_must_be_asked_for(
    options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    outcome = failed("serve", *options)
    assert outcome.code == 2
    assert all(word in outcome.err for word in words)


def test_only_this_machine_reaches_loopback() -> None:
    assert all(map(is_loopback, ("localhost:1", "127.9.9.9:1", "[::1]:1", "unix:x")))
    assert not any(map(is_loopback, ("host:1", "[::]:1", "10.0.0.1:1", ":1")))


def test_an_address_in_use_is_said(address: str) -> None:
    outcome = run_restow("serve", "--listen", address)
    assert outcome.returncode == 1
    assert f"LISTEN_FAILED: can't listen on {address}" in outcome.stderr


def test_settings_and_the_broker_come_from_the_environment_too(address: str) -> None:
    outcome = run_restow("status", "--json", env={"RESTOW_BROKER": address})
    assert outcome.returncode == 0
    assert json.loads(outcome.stdout)["broker"] == address
    outcome = run_restow("serve", env={"RESTOW_LEASE_S": "-1"})
    assert outcome.returncode == 2
    assert "lease_s" in outcome.stderr


def test_version() -> None:
    assert printed("--version").startswith("restow ")


def test_an_agent_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "restow.agents.daemon.cli", None)
    outcome = failed("agent", "--socket", "agent.sock")
    assert outcome.code == 1
    assert "EXTRA_MISSING" in outcome.err
    assert "pip install 'restow[agent]'" in outcome.err
