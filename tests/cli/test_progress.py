"""How far a read is, as operators see it."""

from __future__ import annotations

from broker.fakes import POSITION, answer_at_once, broker, engine
from restow.broker.cli.views.tables import handoff_lines
from restow.broker.client.admin import AsyncAdminClient
from restow.broker.display.documents import handoff_json, handoffs_json
from restow.broker.display.rows import progress_text
from restow.broker.families import AttentionSpec, EngineSettings, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.v1 import agent_link_pb2 as link


async def test_a_read_of_no_bytes_has_progress_too() -> None:
    # D holds all of the prompt, and the model keeps nothing else.
    model = ModelSpec("m", (AttentionSpec(0, 2, 16, DType.BFLOAT16),))
    layout = build_layout(model, EngineSettings(tp=2, page_tokens=16))
    async with (
        broker() as running,
        engine(running.address, "p", layout=layout) as (p, p_agents),
        engine(running.address, "d", layout=layout) as (d, d_agents),
    ):
        for agent in d_agents:
            agent.answers = no_settled
        p.publish("held", {"attention": [1, 2, 3]}, POSITION)
        for agent in p_agents:
            await agent.fence("held")
        d.request("held", {"attention": [4, 5, 6]}, held_tokens=POSITION)
        await d_agents[0].order("execute")
        async with AsyncAdminClient(running.address) as client:
            (one,) = handoffs_json(await client.handoffs())["handoffs"]
            whole = handoff_json(await client.handoff("held"))
        assert one["state"] == "READING"
        assert progress_text(one) == "0 B of 0 B, 0 of 2 ranks"
        assert handoff_lines(whole, 80)


def no_settled(order: link.AgentOrder) -> list[link.AgentMessage]:
    """Answer as an agent that is still at work on every read."""
    return [] if order.WhichOneof("body") == "execute" else answer_at_once(order)
