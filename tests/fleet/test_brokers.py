"""Which of several brokers a client asks."""

from __future__ import annotations

import asyncio
import time

import pytest

from broker.fakes import broker, model_layout
from forked.ports import free_port
from restow.broker.client import BrokerUnreachableError, EngineSession, chain_of
from restow.broker.client.connection import channel
from restow.broker.client.connection.brokers import MAX_HOPS, Brokers
from restow.broker.client.connection.channel import PLAINTEXT, RenewedChannel, patience_s
from restow.broker.errors import AddressInvalidError, EngineUnknownError, NotLeaderError

GIVEN = "a.example:1,b.example:2,c.example:3"
A, B, C = GIVEN.split(",")
OTHER = "d.example:4"
PROMPT = chain_of(range(1, 165))


def sent_to(leader: str) -> NotLeaderError:
    return NotLeaderError("go there", leader=leader)


def test_one_after_the_other_is_asked_and_then_there_is_a_pause() -> None:
    brokers = Brokers(GIVEN)
    for round_ in range(2):
        asked = list[str]()
        for at_once in (True, True, False):
            asked.append(brokers.current)
            assert brokers.failed() is at_once
        assert asked == [A, B, C], round_
    assert brokers.metadata == ()


def test_one_alone_is_asked_again_after_a_pause() -> None:
    brokers = Brokers(A)
    assert not brokers.several
    assert not brokers.failed()
    assert brokers.current == A


def test_the_leader_that_is_named_is_asked_at_once_and_stays() -> None:
    brokers = Brokers(GIVEN)
    assert brokers.refused(sent_to(OTHER))
    assert brokers.current == OTHER
    brokers.works()
    assert brokers.current == OTHER


def test_who_named_a_leader_that_is_not_there_is_told_so() -> None:
    brokers = Brokers(GIVEN)
    brokers.failed()
    brokers.refused(sent_to(A))
    assert brokers.failed()
    assert (brokers.current, brokers.metadata) == (B, (("restow-unreached", A),))
    assert brokers.refused(sent_to(C))
    assert brokers.current == C
    brokers.works()
    assert brokers.metadata == ()


def test_a_leader_that_is_named_again_though_it_is_not_there_is_tried_again_later() -> None:
    brokers = Brokers(B)
    brokers.refused(sent_to(A))
    brokers.failed()
    assert not brokers.refused(sent_to(A))
    assert (brokers.current, brokers.metadata) == (B, ())
    assert brokers.refused(sent_to(A))  # it may be back


def test_two_that_name_each_other_are_not_followed_for_ever() -> None:
    brokers = Brokers(GIVEN)
    followed = [brokers.refused(sent_to((A, B)[hop % 2])) for hop in range(MAX_HOPS + 1)]
    assert followed == [True] * MAX_HOPS + [False]
    assert brokers.current == A


@pytest.mark.parametrize("leader", ["", "nowhere", "x:0", f"{A},{B}", "x:1/y"])
def test_a_word_that_is_no_address_is_not_followed(leader: str) -> None:
    brokers = Brokers(GIVEN)
    assert not brokers.refused(sent_to(leader))
    assert brokers.current == A


def test_other_refusals_name_nobody() -> None:
    assert not Brokers(GIVEN).refused(EngineUnknownError("no", leader=B))


def test_a_list_with_a_fault_is_refused() -> None:
    with pytest.raises(AddressInvalidError, match="''"):
        Brokers("a.example:1,,b.example:2")


def test_rounds_in_which_all_failed_are_counted_until_one_lets_us_in() -> None:
    # With each round a client gives a broker more time: of thousands that come at once some wait.
    brokers = Brokers("a:1,b:1")
    tried = []
    for _ in range(4):
        brokers.failed()
        tried.append(brokers.rounds)
    assert tried == [0, 1, 1, 2]
    brokers.works()
    assert brokers.rounds == 0


def test_who_is_away_for_days_is_given_no_more_than_that() -> None:
    assert [patience_s(rounds) for rounds in (0, 1, 4, 5, 100_000)] == [1, 2, 16, 16, 16]


async def test_a_connection_that_a_busy_loop_hears_of_too_late_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Else thousands of engines that come back at once drop their connections, and begin anew.
    monkeypatch.setattr(channel, "NEXT_S", 0.2)
    async with broker() as running:
        brokers = Brokers(f"{running.address},127.0.0.1:{free_port()}")
        renewed = RenewedChannel(brokers, PLAINTEXT)
        connects = asyncio.create_task(renewed.connects())
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is busy
        assert await connects
        await renewed.close()


async def test_a_session_between_two_brokers_finds_and_closes() -> None:
    async with broker() as running:
        address = f"{running.address},127.0.0.1:{free_port()}"
        session = EngineSession("e", "1", model_layout(1), address)
        await session.start()
        of_session = session._stream.channel
        await of_session.close()  # as when another one is tried
        assert await session.find([PROMPT]) == [[]]
        await of_session.close()
        await session.close()


async def test_a_question_whose_connection_is_given_up_says_so() -> None:
    # gRPC reports that the caller's task was cancelled, which it was not.
    async with broker() as running:
        session = EngineSession("e", "1", model_layout(1), running.address)
        await session.start()
        for end, said in (
            (session._stream.channel.close, BrokerUnreachableError),
            (None, asyncio.CancelledError),
        ):
            asked = asyncio.create_task(session.find([PROMPT]))
            await asyncio.sleep(0)  # it has asked, and nobody has had time to answer
            if end is None:
                asked.cancel()
            else:
                await end()
            with pytest.raises(said):
                await asked
        await session.close()
