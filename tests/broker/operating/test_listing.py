"""What an operator of all tenants is listed, and how a list is narrowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from broker.certificates import Authority
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, pair
from broker.guarded import ask, guarded, of_tenant, operator, reason_of
from restow.broker.client import AdminClient, Credentials
from restow.broker.server.gate.callers import ALL_TENANTS
from restow.broker.server.serve import RunningBroker

PLAIN = Credentials()


async def test_all_tenants_are_listed_to_an_operator_of_all_alone(authority: Authority) -> None:
    async with guarded(authority) as running:
        address = running.address
        async with (
            pair(address, 1, 1, credentials=of_tenant(authority, "a")) as mine,
            pair(address, 1, 1, credentials=of_tenant(authority, "b")) as others,
        ):
            await mine.hand_over("one")
            await others.hand_over("one")
            mine.p.publish("two", P_BLOCKS, POSITION)
            await mine.hand_over("three")  # sessions keep their order: `two` is known by now
            every, own = operator(authority, None), operator(authority, "a")
            held = await ask(address, every, AdminClient.tenants)
            assert held.listed == "default"
            assert [(one.tenant, one.engines, one.handoffs_live) for one in held.tenants] == [
                ("a", 2, 1),
                ("b", 2, 0),
            ]
            assert [sum(end.count for end in one.ended) for one in held.tenants] == [2, 1]
            assert [one.bytes_read for one in held.tenants] == [200, 100]
            alone = await ask(address, own, AdminClient.tenants)
            assert (alone.listed, [one.tenant for one in alone.tenants]) == ("a", ["a"])

            both = await ask(address, every, AdminClient.handoffs, tenant=ALL_TENANTS)
            assert [(one.tenant, one.handoff_id) for one in both.handoffs] == [
                ("a", "two"),
                ("a", "three"),
                ("b", "one"),
                ("a", "one"),
            ]
            calls: list[Callable[[AdminClient], Any]] = [AdminClient.engines, AdminClient.agents]
            for call in calls:
                listed = await ask(address, every, call, tenant=ALL_TENANTS)
                assert sorted((one.tenant, one.engine_id) for one in listed) == [
                    ("a", "d"),
                    ("a", "p"),
                    ("b", "d"),
                    ("b", "p"),
                ]
                assert await reason_of(ask(address, own, call, tenant=ALL_TENANTS)) == "FORBIDDEN"
            assert (
                await reason_of(
                    ask(address, every, lambda client: client.handoff("one"), tenant=ALL_TENANTS)
                )
                == "FORBIDDEN"
            )


async def test_a_list_is_narrowed_by_a_beginning_and_to_late_ends(running: RunningBroker) -> None:
    async with pair(running.address, 1, 1) as both:
        for name in ("request-1", "request-2", "prompt-1"):
            await both.hand_over(name)
        both.p.publish("request-3", P_BLOCKS, POSITION)
        await both.d.request("nobody", D_BLOCKS, timeout_ms=50)

        def ids(**more: object) -> list[str]:
            with AdminClient(running.address) as client:
                return [one.handoff_id for one in client.handoffs(**more).handoffs]  # type: ignore[arg-type]

        def look() -> None:
            assert ids(beginning="request") == ["request-3", "request-2", "request-1"]
            assert ids(beginning="prompt-1") == ["prompt-1"]
            assert ids(beginning="neither") == []
            assert ids(ended_within_s=600.0) == ["nobody", "prompt-1", "request-2", "request-1"]
            assert ids(ended_within_s=1e-9) == []

        await ask(running.address, PLAIN, lambda _: look())
