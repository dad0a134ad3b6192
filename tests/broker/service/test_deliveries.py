"""A demand has one end of its own, may be given up, and says when its pages are D's again."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from itertools import count

import pytest

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, model_layout, pair, silent
from restow.agents.link.settings import AgentSettings
from restow.agents.reading.reader import RETIRED_S
from restow.broker.client import BlockingSession, HandoffEnded, PagesNotFreeError
from restow.broker.client.engine.handoff_futures import Delivery
from restow.broker.client.engine.open_handoffs import (
    DEFAULT_TIMEOUT_S,
    KNOWN_S,
    SILENCE_S,
    OpenHandoffs,
)
from restow.broker.errors import HandoffConflictError, RequestError, RestowError
from restow.broker.rpc.sizes import NOTICED_S
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb

DONE = HandoffEnded("h", "DONE", "", "", 1, 1)


class Notes:
    """Open handoffs on a clock that stands still, and what they have sent."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.connected = True
        self.sent: list[pb.EngineMessage] = []
        self.open = OpenHandoffs(self.send, lambda: self.now_s)

    def send(self, message: pb.EngineMessage) -> bool:
        self.sent.append(message)
        return self.connected

    def ask(self, timeout_ms: int = 500, name: str = "h") -> Delivery:
        demand = pb.Demand(handoff_id=name, timeout_ms=timeout_ms)
        return self.open.ask(name, pb.EngineMessage(request=demand))

    def publish(self, name: str = "h", final: bool = True) -> asyncio.Future[HandoffEnded]:
        return self.publish_this(pb.Publication(handoff_id=name, final=final, lease_ms=3000))

    def publish_this(self, publication: pb.Publication) -> asyncio.Future[HandoffEnded]:
        return self.open.publish(pb.EngineMessage(publish=publication), hold_ms=7000)

    def late(self, connected: bool = False) -> list[tuple[str, int]]:
        """Return what is cancelled by now because the broker has not ended it in time."""
        del self.sent[:]
        self.open.give_up_late(connected)
        return self.cancelled()

    def cancelled(self) -> list[tuple[str, int]]:
        """Return the handoffs that are cancelled, each with the number of its demand."""
        found = [one.cancel for one in self.sent if one.HasField("cancel")]
        return [(one.handoff_id, one.demand) for one in found]

    def renewed(self) -> list[int]:
        """Return the leases in ms of the handoffs that are renewed by now."""
        del self.sent[:]
        self.open.renew()
        return [one.renew.lease_ms for one in self.sent]


async def test_an_end_is_that_of_the_demand_that_it_names() -> None:
    notes = Notes()
    one, two = notes.ask(), notes.ask()
    notes.open.finish(DONE, 1)
    assert one.result() == DONE
    assert not two.done()
    assert not two.pages_free.done()
    notes.open.refuse(pb.Refused(message_id=2, handoff_id="h", reason="HANDOFF_CONFLICT"))
    assert two.exception() is not None
    assert two.pages_free.done()
    assert notes.open.empty


async def test_the_ends_of_the_last_minute_are_told_first_on_each_stream() -> None:
    notes = Notes()
    other = pb.Counterpart(engine_id="p", incarnation="1", message_ids=[7])
    for name in ("old", "h", "refused"):
        told = [] if name == "refused" else [other]
        notes.open.hear_end(pb.Ended(handoff_id=name, demand=1, counterparts=told))
        notes.now_s += KNOWN_S / 3 + 1
    notes.ask()
    said = list(notes.open.everything())
    assert [one.WhichOneof("body") for one in said] == ["known_end", "request"]
    assert said[0].known_end.handoff_id == "h"


async def test_who_is_p_and_d_of_one_hears_two_ends() -> None:
    notes = Notes()
    published, asked = notes.publish(), notes.ask()
    notes.open.finish(DONE, 0)
    assert published.result() == DONE
    assert not asked.done()
    notes.open.finish(DONE, 2)
    assert asked.result() == DONE


async def test_chunks_that_are_taken_back_are_not_said_again_and_what_follows_says_so() -> None:
    notes = Notes()
    lists = [pb.BlockList(group="kv", block_ids=bytes(4))]
    first = pb.Publication(handoff_id="h", lease_ms=3000, readers=2, blocks=lists)
    ends = [notes.publish_this(first)]
    notes.open.take_back("h", "preempted")
    taken = notes.sent[-1].publish
    assert (taken.handoff_id, taken.anew, len(taken.blocks), taken.readers) == ("h", True, 0, 2)
    whole = pb.Publication(handoff_id="h", lease_ms=3000, final=True)
    whole.blocks.add(group="kv", block_ids=bytes([1, 0, 0, 0]))
    ends.append(notes.publish_this(whole))
    again = [one.publish for one in notes.open.everything()]
    assert [(one.anew, len(one.blocks)) for one in again] == [(True, 0), (True, 1)]
    notes.open.finish(DONE)
    assert [one.result() for one in ends] == [DONE, DONE]


async def test_a_whole_publication_is_given_up_where_it_is_taken_back() -> None:
    notes = Notes()
    notes.publish()
    notes.open.take_back("h", "preempted")
    assert notes.cancelled() == [("h", 0)]
    notes.open.take_back("of nobody", "")
    assert len(notes.sent) == 2


async def test_a_demand_that_is_given_up_has_its_pages_when_it_has_ended() -> None:
    notes = Notes()
    asked = notes.ask()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked, 0.01)
    assert asked.cancelled()
    assert notes.cancelled() == [("h", 1)]
    assert not asked.pages_free.done()
    notes.open.finish(HandoffEnded("h", "CANCELLED", "CANCELLED", "", 0, 0), 1)
    assert asked.pages_free.result() is None


async def test_what_was_never_said_is_given_up_at_once_and_never_said() -> None:
    notes = Notes()
    notes.connected = False
    asked = notes.ask()
    asked.cancel()
    assert notes.cancelled() == []
    assert asked.pages_free.done()
    assert list(notes.open.everything()) == []


async def test_what_was_given_up_is_not_said_again() -> None:
    notes = Notes()
    asked = notes.ask()
    asked.cancel()
    assert [one.WhichOneof("body") for one in notes.open.everything()] == ["cancel"]


async def test_of_two_demands_that_are_given_up_each_is_cancelled_by_its_number() -> None:
    notes = Notes()
    one, two, three = notes.ask(), notes.ask(), notes.ask()
    for asked in (one, two):
        asked.cancel()
    assert notes.cancelled() == [("h", 1), ("h", 2)]
    said = list(notes.open.everything())
    assert [message.cancel.demand for message in said] == [1, 2, 0]
    assert said[2].WhichOneof("body") == "request"
    assert not three.done()


async def test_without_a_broker_d_waits_no_longer_than_its_patience() -> None:
    notes = Notes()
    asked = notes.ask()
    notes.now_s += 0.4
    assert notes.late() == []
    assert not asked.done()
    notes.now_s += 0.2
    assert notes.late() == []
    assert (asked.result().state, asked.result().reason) == ("EXPIRED", "BROKER_SILENT")
    assert not asked.pages_free.done(), "a rank may still write"
    (said,) = notes.open.everything()
    assert (said.cancel.handoff_id, said.cancel.demand) == ("h", 1)
    notes.now_s += SILENCE_S
    assert notes.late() == []
    assert asked.pages_free.result() is None
    assert notes.open.empty


async def test_a_broker_that_is_there_again_says_when_the_pages_of_a_late_demand_are_free() -> None:
    # It told the end while no stream was open.
    notes = Notes()
    asked = notes.ask()
    notes.now_s += 0.6
    notes.late()
    assert len(list(notes.open.everything())) == 1
    notes.open.finish(DONE, 1)
    assert asked.result().reason == "BROKER_SILENT"
    assert asked.pages_free.result() is None
    assert notes.open.empty


async def test_a_broker_that_is_there_is_given_time_to_say_how_it_ended() -> None:
    notes = Notes()
    asked, default = notes.ask(), notes.ask(timeout_ms=0, name="i")
    notes.now_s += 0.5 + SILENCE_S - 0.1
    assert notes.late(connected=True) == []
    assert not asked.done()
    notes.now_s += 0.2
    assert notes.late(connected=True) == [("h", 1)]
    assert asked.result().reason == "BROKER_SILENT"
    notes.now_s += DEFAULT_TIMEOUT_S
    assert notes.late(connected=True) == [("i", 2)]
    assert default.result().reason == "BROKER_SILENT"


async def test_pages_are_free_when_a_broker_that_is_there_says_so_and_not_sooner() -> None:
    # A rank that was stopped may begin to read at any later time, and reports when it has ended.
    notes = Notes()
    asked = notes.ask()
    notes.now_s += 100 * SILENCE_S
    assert notes.late(connected=True) == [("h", 1)]
    assert notes.late(connected=True) == [], "it is said once"
    assert asked.result().reason == "BROKER_SILENT"
    assert not asked.pages_free.done(), "a rank may still write"
    notes.open.finish(DONE, 1)
    assert asked.pages_free.result() is None
    assert notes.open.empty


async def test_a_lease_of_the_broker_s_own_length_is_refused() -> None:
    # A P that has lost the broker would not know when its pages are free.
    async with broker(lease_s=100.0) as running, pair(running.address, 1, 1) as both:
        for lease_ms in (0, -1):
            with pytest.raises(RequestError, match="at least"):
                both.p.publish("h", P_BLOCKS, POSITION, lease_ms=lease_ms)


async def test_p_has_its_pages_back_when_the_last_lease_has_run_out() -> None:
    notes = Notes()
    published = notes.publish()
    notes.now_s += 10 + SILENCE_S - 0.1
    assert notes.late() == []
    notes.now_s += 0.2
    assert notes.late() == [("h", 0)]
    assert published.result().reason == "BROKER_SILENT"


async def test_the_first_chunk_is_given_up_no_sooner_than_the_last() -> None:
    # The pages of all chunks are read until the last lease ends.
    notes = Notes()
    first = notes.publish(final=False)
    notes.now_s += 60
    last = notes.publish()
    notes.now_s += 10 + SILENCE_S - 0.1
    assert notes.late(connected=True) == []
    assert not first.done()
    notes.now_s += 0.2
    assert set(notes.late(connected=True)) == {("h", 0)}
    assert first.result().reason == last.result().reason == "BROKER_SILENT"


async def test_a_lease_is_renewed_at_each_third_of_it_and_until_its_hold_ends() -> None:
    # The lease is 3 s long and the publication is held for 7 s.
    notes, said = Notes(), []
    notes.publish()
    for tick in range(100):
        notes.now_s = 100 + tick / 10
        said += [(tick / 10, lease_ms) for lease_ms in notes.renewed()]
    assert said == [(float(second), 3000) for second in range(1, 7)]


async def test_what_has_ended_is_renewed_no_more() -> None:
    notes = Notes()
    notes.publish(final=False)
    notes.ask()
    notes.open.finish(DONE, 0)
    notes.now_s += 2
    assert notes.renewed() == []


@pytest.mark.parametrize(("refused", "renewals"), [(1, 1), (2, 0)])
async def test_what_can_not_become_whole_any_more_is_renewed_no_more(
    refused: int, renewals: int
) -> None:
    # The broker refuses either the first chunk or the final publication.
    notes = Notes()
    notes.publish(final=False)
    notes.publish()
    notes.open.refuse(pb.Refused(message_id=refused, handoff_id="h", reason="NULL_BLOCK"))
    notes.now_s += 2
    assert len(notes.renewed()) == renewals


async def test_what_comes_after_all_was_cancelled_is_refused_with_the_same_reason() -> None:
    notes = Notes()
    notes.open.cancel_all("ENGINE_STOPS", "on its way out")
    asked, published = notes.ask(), notes.publish("other")
    for refused in (asked, published):
        error = refused.exception()
        assert isinstance(error, RestowError)
        assert error.reason == "ENGINE_STOPS"
    assert asked.pages_free.done()
    assert notes.open.empty


async def test_patience_goes_on_where_it_was_when_a_demand_is_said_again() -> None:
    notes = Notes()
    notes.ask(timeout_ms=5000)
    notes.now_s += 2
    (again,) = notes.open.everything()
    assert again.request.repeated
    assert again.request.timeout_ms == 3000


async def test_a_repeated_demand_that_is_refused_keeps_its_pages_until_none_can_write() -> None:
    notes = Notes()
    asked = notes.ask()
    list(notes.open.everything())
    notes.open.refuse(pb.Refused(message_id=1, handoff_id="h", reason="DIRECTORY_FULL"))
    assert asked.exception() is not None
    assert not asked.pages_free.done()
    notes.now_s += 0.5 + SILENCE_S
    notes.late()
    assert asked.pages_free.result() is None


async def test_an_id_is_published_once_in_a_session() -> None:
    notes = Notes()
    notes.publish(final=False)
    notes.publish()
    notes.open.finish(DONE, 0)
    with pytest.raises(HandoffConflictError, match="use a new id"):
        notes.publish()
    notes.publish("other")


@pytest.mark.parametrize("said", ["nothing", "a chunk"])
async def test_an_id_that_was_given_up_is_published_no_more(said: str) -> None:
    # A fence may be left of the id, even where nothing was published.
    notes = Notes()
    if said == "a chunk":
        notes.publish(final=False)
    notes.open.cancel("h", "")
    assert notes.cancelled() == [("h", 0)]
    with pytest.raises(HandoffConflictError, match="use a new id"):
        notes.publish()


async def test_a_publication_that_has_ended_is_not_given_up() -> None:
    notes = Notes()
    notes.publish()
    notes.open.finish(DONE, 0)
    notes.open.cancel("h", "")
    assert notes.cancelled() == []


@pytest.mark.parametrize("what", ["position_tokens", "content", "blocks", "final"])
async def test_another_state_under_an_id_that_is_published_whole_is_never_said(what: str) -> None:
    # P's caller would fence the second state, and with it the first one, whose bytes may not be
    # there yet.
    notes = Notes()
    first = notes.publish()
    again = pb.Publication(handoff_id="h", final=True, lease_ms=9)
    assert not notes.publish_this(again).done(), "the same, said once more"
    if what == "blocks":
        again.blocks.add(group="attention", block_ids=bytes(4))
    else:
        setattr(again, what, {"position_tokens": 7, "content": bytes(16), "final": False}[what])
    with pytest.raises(HandoffConflictError, match="use a new id"):
        notes.publish_this(again)
    assert not first.done()


async def test_chunks_may_follow_one_another_until_the_last() -> None:
    notes = Notes()
    for number in range(3):
        chunk = pb.Publication(handoff_id="h", final=number == 2, lease_ms=3000)
        chunk.blocks.add(group="attention", first_block=number, block_ids=bytes(4))
        notes.publish_this(chunk)


# -- with a broker --------------------------------------------------------------------------------


async def test_giving_up_reaches_the_broker_and_pages_come_back_when_the_read_has_ended(
    running: RunningBroker,
) -> None:
    async with pair(running.address, 1, 1) as both:
        answers, both.d_agents[0].answers = both.d_agents[0].answers, silent
        freed = await both.published("h")
        asked = both.d.request("h", D_BLOCKS)
        order = await both.d_agents[0].order("execute")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asked, 0.01)
        assert (await freed).reason == "CANCELLED"
        assert not asked.pages_free.done()
        both.d_agents[0].answers = answers
        execute = type(both.d_agents[0].orders[0])(execute=order)
        await both.d_agents[0].say(*answers(execute))
        await asked.pages_free


async def test_a_session_that_is_closed_tells_whose_pages_are_not_free(
    running: RunningBroker,
) -> None:
    async with pair(running.address, 1, 1) as both:
        both.d_agents[0].answers = silent
        await both.published("h")
        written, waiting = both.d.request("h", D_BLOCKS), both.d.request("i", D_BLOCKS)
        await both.d_agents[0].order("execute")
        await both.d.close()
        assert (await written).reason == "SESSION_CLOSED"
        with pytest.raises(PagesNotFreeError, match="when the engine's agents are closed"):
            await written.pages_free
        assert (await waiting).state == "CANCELLED"
        await waiting.pages_free


async def test_threads_give_up_alike(running: RunningBroker) -> None:

    def work() -> None:
        with BlockingSession("other", "1", model_layout(1), running.address) as session:
            names = (f"n{number}" for number in count())
            asked = session.request(next(names), D_BLOCKS)
            assert asked.cancel()
            with pytest.raises(CancelledError):
                asked.result(10)
            assert asked.pages_free.result(10) is None
            assert not asked.cancel()

    await asyncio.to_thread(work)


def test_silence_is_longer_than_a_late_word_a_lane_and_a_quarantine() -> None:
    # A demand that reached the broker late is at work for longer than D reckons.
    stuck_s = RETIRED_S + AgentSettings().quarantine_s
    assert 2 * NOTICED_S + stuck_s < SILENCE_S
