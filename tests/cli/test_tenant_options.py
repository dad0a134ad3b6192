"""What an operator of all tenants is told of those that a list leaves out, and how it sees all."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from typer.testing import Result

from broker.certificates import Authority
from broker.fakes import P_BLOCKS, POSITION, pair
from broker.guarded import guarded, of_tenant, operator
from cli.typed import reason_of, typed_aside
from restow.broker.client import Credentials

SAID = "tenant default alone: another tenant has engines or handoffs too (b): --tenant, or -A\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tenant-options"))


async def test_what_is_hidden_is_said_and_can_be_seen(authority: Authority) -> None:
    async with (
        guarded(authority) as running,
        pair(running.address, 1, 1, credentials=of_tenant(authority, "default")) as mine,
        pair(running.address, 1, 1, credentials=of_tenant(authority, "b")) as others,
    ):
        await mine.hand_over("same")
        await others.hand_over("same")
        await others.hand_over("only-in-b")
        others.p.publish("waits", P_BLOCKS, POSITION)
        await others.hand_over("later")
        every, of_b = operator(authority, None), operator(authority, "b")

        async def shown(*arguments: str, who: Credentials = every) -> Result:
            files = {f"RESTOW_{name.upper()}": str(it) for name, it in asdict(who).items() if it}
            return await typed_aside(*arguments, env={"RESTOW_BROKER": running.address, **files})

        for command in ("handoffs", "engines", "agents", "leases"):
            alone = await shown(command)
            assert alone.stderr == SAID, command
            assert "tenant" not in alone.stdout
            every_one = await shown(command, "-A")
            assert every_one.stderr == ""
            assert every_one.stdout.startswith("tenant ")
            assert (await shown(command, "--json")).stderr == ""
            assert (await shown(command, "-o", "name")).stderr == ""
            assert (await shown(command, who=of_b)).stderr == ""
            assert reason_of(await shown(command, "-A", who=of_b)) == "FORBIDDEN"
            assert (await shown(command, "-A", "--tenant", "b")).exit_code == 2
            assert (await shown(command, "--tenant", "")).exit_code == 2
        assert (await shown("doctor", "--pair", "p:d", "-A")).exit_code == 2
        named = await shown("engines", "--tenant", "b")
        assert named.stderr == SAID.replace("(b)", "(default)").replace("default alone", "b alone")
        listed = json.loads((await shown("tenants", "--json")).stdout)["tenants"]
        assert [(one["tenant"], one["engines"], one["handoffs_live"]) for one in listed] == [
            ("b", 2, 1),
            ("default", 2, 0),
        ]
        assert [one["handoffs_ended"]["DONE"] for one in listed] == [3, 1]
        assert (await shown("tenants", "-o", "name", who=of_b)).stdout == "b\n"

        unknown = str((await shown("handoff", "only-in")).exception)
        assert unknown.endswith(f"begins so; {SAID.strip()}")
        found = json.loads((await shown("handoff", "only-in", "-A", "--json")).stdout)
        assert (found["tenant"], found["handoff_id"]) == ("b", "only-in-b")
        two = await shown("handoff", "same", "-A")
        assert reason_of(two) == "HANDOFF_AMBIGUOUS"
        assert "b/same, default/same; name the tenant with --tenant" in str(two.exception)
        assert (await shown("release", "wai", "-A", "--yes")).exit_code == 0
        released = json.loads((await shown("handoff", "wai", "-A", "--json")).stdout)
        assert (released["tenant"], released["reason"]) == ("b", "RELEASED")

        top = (await shown("top", "-n", "1")).stdout
        assert SAID.strip() in top
        assert "1 of" not in top
        both = (await shown("top", "-n", "1", "-A")).stdout
        assert "alone" not in both
        assert {"b/p", "default/p"} <= set(both.split())
        events = (await shown("events", "-A")).stdout.split()
        assert {"b/only-in-b", "b/same", "default/same"} <= set(events)
