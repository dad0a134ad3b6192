"""The reference of the control plane: a gRPC server in Python that only echoes, and its clients.

``/bench/Unary`` returns 46 bytes. ``/bench/Batches`` answers a stream of batches: each message is
parsed, and a message is built for it. Run as a module, this file is the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import uvloop

from bench.processes import module
from restow.v1 import broker_pb2 as pb

ECHO = module("bench.control.grpc_echo")
BATCH = 64
SMALL = b"x" * 46


async def _unary(request: bytes, context: object) -> bytes:
    return request


async def _batches(
    requests: AsyncIterator[pb.SessionRequest], context: object
) -> AsyncIterator[pb.SessionResponse]:
    async for request in requests:
        response = pb.SessionResponse()
        for message in request.messages:
            response.events.add().refused.handoff_id = message.cancel.handoff_id
        yield response


async def serve() -> None:
    """Serve, and print the address."""
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Batches": grpc.stream_stream_rpc_method_handler(
            _batches, pb.SessionRequest.FromString, pb.SessionResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"echo listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def unary_seconds(address: str, calls: int, in_flight: int) -> float:
    """Return the seconds that ``calls`` unary echoes take, ``in_flight`` at a time."""
    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bench/Unary")
        await call(SMALL)

        async def call_in_turn(count: int) -> None:
            for _ in range(count):
                await call(SMALL)

        begun_s = time.perf_counter()
        await asyncio.gather(*(call_in_turn(calls // in_flight) for _ in range(in_flight)))
        return time.perf_counter() - begun_s


async def batches_seconds(
    address: str, messages: int, streams: int = 4, batch: int = BATCH
) -> float:
    """Return the seconds that ``messages`` take, echoed in batches over several streams."""
    request = pb.SessionRequest()
    for index in range(batch):
        request.messages.add().cancel.handoff_id = f"handoff-{index}"
    async with grpc.aio.insecure_channel(address) as channel:
        open_stream = channel.stream_stream(
            "/bench/Batches", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
        )

        async def stream_batches(batches: int) -> None:
            stream = open_stream()
            for _ in range(batches):
                await stream.write(request)
                await stream.read()
            await stream.done_writing()

        begun_s = time.perf_counter()
        await asyncio.gather(
            *(stream_batches(messages // batch // streams) for _ in range(streams))
        )
        return time.perf_counter() - begun_s


async def hops_seconds(address: str, round_trips: int, pause_s: float) -> float:
    """Return the seconds of half a round trip on a stream, with a pause before each."""
    request = pb.SessionRequest()
    request.messages.add().cancel.handoff_id = "handoff"
    took_s = 0.0
    async with grpc.aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(
            "/bench/Batches", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
        )()
        for number in range(round_trips + 1):
            await asyncio.sleep(pause_s)
            begun_s = time.perf_counter()
            await stream.write(request)
            await stream.read()
            if number:  # the first round trip opens the stream
                took_s += time.perf_counter() - begun_s
        await stream.done_writing()
    return took_s / round_trips / 2


if __name__ == "__main__":
    uvloop.run(serve())
