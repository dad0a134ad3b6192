"""Bytes to the broker's handlers, guided by what code they reach. `fuzzing.main` runs it.

An input is a row of frames: two bytes of length, one that chooses the call and the tenant, then the
bytes of a request. Streams stay open from frame to frame.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["restow"]):
    from fuzzing.door import Stream
    from fuzzing.good_engine import CONNECT, SESSION
    from fuzzing.house import TENANTS, House, quiet
    from fuzzing.party import (
        LAYOUT_MESSAGES,
        METHODS,
        REFS,
        UNARY,
        Party,
        demand,
        fence,
        hellos,
        publication,
    )
    from restow.v1 import agent_link_pb2 as link
    from restow.v1 import broker_pb2 as pb

PATHS = sorted(METHODS)
MAX_FRAMES = 8
END = 255
"""The call of a frame that lets a second pass instead."""


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the frames of an input in their order: the byte that chooses the call, the request."""
    at = 0
    for _ in range(MAX_FRAMES):
        if at + 3 > len(data):
            return
        length = int.from_bytes(data[at : at + 2], "little")
        yield data[at + 2], data[at + 3 : at + 3 + length]
        at += 3 + length


def frame(path: str, tenant: int, words: bytes) -> bytes:
    """Return the bytes of a frame, as `frames` reads them."""
    return len(words).to_bytes(2, "little") + bytes([2 * PATHS.index(path) + tenant]) + words


def say(data: bytes) -> None:
    """Send one input to the broker. Raises what must not happen."""
    with House().lives() as house:
        Party(house, Counter())
        open_streams: dict[tuple[str, str], Stream] = {}
        for choice, words in frames(data):
            if choice == END:
                house.wait(1.0)
                continue
            path, tenant = PATHS[choice // 2 % len(PATHS)], TENANTS[choice % 2]
            if path in UNARY:
                house.call(path, words, tenant)
            else:
                stream = open_streams.get((path, tenant))
                if stream is None or stream.over:
                    stream = open_streams[path, tenant] = house.door.stream(path, tenant)
                stream.say(words)
                house.wait(0.001)
                stream.over  # noqa: B018 - raises what no handler may raise
            house.check()
        house.show()
        house.hand_over()


def seeds() -> Iterator[bytes]:
    """Yield inputs that a good party would send."""
    for tenant, name in enumerate(TENANTS):
        ref, layout = REFS[0], LAYOUT_MESSAGES[1]
        register = pb.RegisterEngineRequest(engine=ref, layout=layout)
        yield frame("/restow.v1.Broker/RegisterEngine", tenant, register.SerializeToString())
        opened = frame(SESSION, tenant, pb.SessionRequest(engine=ref).SerializeToString())
        words = [
            publication("h", 30_000),
            demand("h", 30_000),
            pb.EngineMessage(renew=pb.Renewal(handoff_id="h", lease_ms=9)),
            pb.EngineMessage(cancel=pb.Cancellation(handoff_id="h")),
            pb.EngineMessage(decline=pb.Decline(handoff_id="i")),
        ]
        said = pb.SessionRequest(messages=words).SerializeToString()
        yield opened + frame(SESSION, tenant, said)
        one = link.AgentMessage(hello=hellos([ref], name)[0])
        hello = link.ConnectRequest(messages=[one]).SerializeToString()
        yield (
            frame(CONNECT, tenant, hello)
            + opened
            + frame(SESSION, tenant, said)
            + frame(CONNECT, tenant, fence("h").SerializeToString())
        )
        answers = [
            link.AgentMessage(staged=link.Staged(handoff=7 << 32, address=4096, bytes=64)),
            link.AgentMessage(settled=link.Settled(handoff=7 << 32, bytes=64)),
            link.AgentMessage(probed=link.Probed(number=7 << 32, address=4096, bytes=64)),
        ]
        reports = link.ConnectRequest(messages=answers).SerializeToString()
        yield frame(CONNECT, tenant, hello) + frame(CONNECT, tenant, reports)
        call = pb.PublishRequest(engine=ref, publication=publication("h", 9).publish)
        yield frame("/restow.v1.Broker/Publish", tenant, call.SerializeToString())
        asked = pb.RequestRequest(engine=ref, demand=demand("h", 9).request)
        yield frame("/restow.v1.Broker/Request", tenant, asked.SerializeToString())


def main() -> None:
    """Run libFuzzer with its arguments; the first folder keeps the inputs that it finds useful."""
    folders = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    if folders and folders[0].is_dir():
        for number, seed in enumerate(seeds()):
            (folders[0] / f"seed-{number}").write_bytes(seed)
    with quiet():
        atheris.Setup(sys.argv, say)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
