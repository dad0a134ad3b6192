"""`restow check` of several brokers: whether a pool has two owners, as far as they tell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from restow.broker.cli.two_owners import two_owners

from broker.fakes import broker, engine, model_layout
from cli.broker_process import run_restow
from restow.broker.cli.output import FOUND
from restow.v1 import admin_pb2 as pb


def told(address: str, *pools: tuple[str, str, int], still: bool = False) -> pb.ListBrokersResponse:
    """What a broker tells: (model, owner, epoch) of each pool; an owner "me" is itself."""
    answer = pb.ListBrokersResponse(membership=pb.Membership(address=address, let_in=True))
    if still:
        answer.membership.still_s = 1.0
    for model, owner, epoch in pools:
        own = owner == "me"
        at = address if own else owner
        answer.pools.add(tenant="t", model=model, owner=at, epoch=epoch, own=own)
    return answer


def found(*answers: pb.ListBrokersResponse) -> list[str]:
    return sorted(map(str, two_owners({one.membership.address: one for one in answers})))


def test_each_pool_with_one_owner_is_sound() -> None:
    assert not found(
        told("a:1", ("m", "me", 5), ("n", "b:1", 7)),
        told("b:1", ("m", "a:1", 5), ("n", "me", 7), ("o", "", 0)),
    )


def test_two_that_own_a_pool_are_named_with_their_epochs() -> None:
    assert found(told("a:1", ("m", "me", 5)), told("b:1", ("m", "me", 9))) == [
        "pool t/m has two owners: a:1 in epoch 5 and b:1 in epoch 9"
    ]


def test_one_that_acts_in_an_epoch_that_is_over_as_a_third_knows_is_named() -> None:
    assert found(told("a:1", ("m", "me", 5)), told("c:1", ("m", "b:1", 9))) == [
        "pool t/m has two owners: a:1 in epoch 5 and b:1 in epoch 9"
    ]


def test_an_old_view_of_others_is_no_finding() -> None:
    assert not found(told("a:1", ("m", "b:1", 5)), told("c:1", ("m", "me", 9)))


def test_one_that_stands_still_acts_in_no_pool() -> None:
    assert not found(told("a:1", ("m", "me", 5), still=True), told("b:1", ("m", "me", 9)))


async def test_brokers_that_are_each_alone_have_two_owners_of_what_both_have() -> None:
    async with broker() as first, broker() as second:
        both = f"{first.address},{second.address}"

        async def check(*more: str) -> Any:
            return await asyncio.to_thread(run_restow, "check", "--broker", both, *more)

        async with engine(first.address, "p", layout=model_layout(1), agents=False):
            sound = await check()
            assert sound.returncode == 0, sound.stdout
            assert "No pool has two owners among 2 brokers." in sound.stdout
            async with engine(second.address, "d", layout=model_layout(1), agents=False):
                split = await check()
        assert split.returncode == FOUND
        assert "has two owners" in split.stdout
        assert all(one.address in split.stdout for one in (first, second))


async def test_of_several_brokers_none_is_drained_unless_it_is_named() -> None:
    async with broker() as first, broker() as second:
        both = f"{first.address},{second.address}"
        done = await asyncio.to_thread(run_restow, "drain", "--yes", "--broker", both)
        assert done.returncode == 2
        assert "one broker is drained at a time" in " ".join(done.stderr.split())
        assert not first.hub.directory.granting.draining


@pytest.mark.parametrize("command", ["engines", "status", "handoffs"])
async def test_a_broker_that_does_not_answer_is_named_on_stderr_and_the_rest_is_shown(
    command: str,
) -> None:
    async with broker() as running, engine(running.address, "p", agents=False):
        both = f"{running.address},127.0.0.1:1"
        done = await asyncio.to_thread(run_restow, command, "--json", "--broker", both)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("127.0.0.1:1 is left out, for it does not answer: ")
    assert running.address in done.stdout or command == "handoffs"
