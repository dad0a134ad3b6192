"""The broker's part of a handoff, in as few lines as it takes."""

from __future__ import annotations

from dataclasses import replace

from agent_harness.fake_broker import AgentStream, FakeBroker
from agent_harness.world import Case
from restow.broker.layout import Layout
from restow.broker.layout.rows import Int64s
from restow.broker.planner import Program, Strategy, compile_programs, make_plan
from restow.broker.planner.program import Form, Step, joined_steps
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2 as pb

KINDS = {False: pb.DIGEST_KIND_UNSPECIFIED, True: pb.DIGEST_KIND_XXH3_128}


def programs(case: Case, strategy: Strategy) -> dict[int, Program]:
    plan = make_plan(case.source, case.destination)
    return {program.dst_rank: program for program in compile_programs(plan, strategy)}


def with_rows(program: Program, form: Form, rows: Int64s) -> Program:
    """Return the program with ``rows`` instead of its own rows of the form."""
    others = [step for step in program.steps if step.form != form]
    return replace(program, steps=joined_steps([*others, Step(form, rows)]))


def introduction(layout: Layout, stream: AgentStream) -> pb.AgentOrder:
    """Return the order that introduces the agent to others as a peer."""
    hello = stream.hello
    return pb.AgentOrder(
        peer=pb.Peer(
            agent_name=hello.agent_name,
            rank=hello.rank,
            nixl_metadata=hello.nixl_metadata,
            regions=hello.regions,
        )
    )


def part(program: Program, src_rank: int, hashed: bool = False) -> pb.StagePart:
    """Return the part that ``src_rank`` gathers for the program's rank."""
    named = program.hashed_id if hashed else program.gather_id
    return pb.StagePart(program_id=named(src_rank), dst_rank=program.dst_rank)


async def stage(
    fake: FakeBroker,
    case: Case,
    program: Program,
    handoff: int,
    engine_id: str = "P",
    hashed: bool = False,
) -> dict[int, pb.Staged]:
    """Have every source that packs gather for the program's rank; if ``hashed``, all hash."""
    staged = {}
    for src_rank in program.src_ranks if hashed else program.staging_ranks:
        source = await fake.agent(engine_id, src_rank)
        message = wire_program.program_to_proto(program, src_rank, hashed)
        source.send(pb.AgentOrder(program=message))
        source.send(
            pb.AgentOrder(
                stage=pb.Stage(
                    handoff=handoff,
                    parts=[part(program, src_rank, hashed)],
                    src_blocks=wire.block_lists(case.src_ids),
                    stop_token=case.tokens,
                    digest=KINDS[hashed],
                )
            )
        )
        staged[src_rank] = await source.next()
    return staged


async def send_execute(
    fake: FakeBroker,
    case: Case,
    program: Program,
    handoff: int,
    grant_ms: int = 10_000,
    staged: dict[int, pb.Staged] | None = None,
    hashed: bool = False,
    write_mark: int = 0,
) -> AgentStream:
    """Have the program's rank read; its stream will say Settled."""
    destination = await fake.agent("D", program.dst_rank)
    sources = []
    for src_rank in program.src_ranks:
        source = await fake.agent("P", src_rank)
        destination.send(introduction(case.source, source))
        run = (staged or {}).get(src_rank)
        sources.append(
            pb.Source(
                src_rank=src_rank,
                agent_name=source.hello.agent_name,
                staged_address=run.address if run else 0,
                staged_bytes=run.bytes if run else 0,
                digest=run.digest if run else b"",
            )
        )
    destination.send(pb.AgentOrder(program=wire_program.program_to_proto(program)))
    order = execute_order(case, program, handoff, sources, grant_ms, hashed)
    order.write_mark = write_mark
    destination.send(pb.AgentOrder(execute=order))
    return destination


def execute_order(
    case: Case,
    program: Program,
    handoff: int,
    sources: list[pb.Source],
    grant_ms: int = 10_000,
    hashed: bool = False,
) -> pb.Execute:
    """Have the program's rank read from the sources."""
    return pb.Execute(
        handoff=handoff,
        handoff_id=f"handoff-{handoff}",
        program_id=program.program_id,
        src_blocks=wire.block_lists(case.src_ids),
        dst_blocks=wire.block_lists(case.dst_ids),
        stop_token=case.tokens,
        sources=sources,
        grant_ms=grant_ms,
        digest=KINDS[hashed],
    )


async def hand_over(
    fake: FakeBroker,
    case: Case,
    program: Program,
    handoff: int,
    grant_ms: int = 10_000,
    hashed: bool = False,
) -> pb.Settled:
    staged = await stage(fake, case, program, handoff, hashed=hashed)
    assert not [run.reason for run in staged.values() if run.reason]
    destination = await send_execute(fake, case, program, handoff, grant_ms, staged, hashed)
    settled: pb.Settled = await destination.next()
    for src_rank in staged:
        source = await fake.agent("P", src_rank)
        source.send(pb.AgentOrder(unstage=pb.Unstage(handoff=handoff)))
    return settled
