"""How both ends of a gRPC connection notice that it is dead, and keep a proxy from cutting it.

What they rely on was tried with grpcio 1.85 over a wire that swallows what it is given
(`tests/broker/test_dead_wires.py`):

- ``keepalive_timeout`` is never looked at (grpc/grpc#39239); ``ping_timeout``, one minute unless
  set, is what ends a connection. The first still sets how long the kernel sends bytes again.
- A client sends two pings and then no more, until it has data to send: only without a bound on
  ``max_pings_without_data`` does one that is idle notice anything.
"""

from __future__ import annotations

PING_EVERY_S = 3.0
"""An idle connection carries a ping as often, so no proxy that waits longer takes it for idle."""
ANSWER_S = 5.0
_SERVER_EVERY_S = 4.0
"""Longer than a client's: a ping that comes makes one of the server's own needless."""
NOTICED_S = _SERVER_EVERY_S + ANSWER_S
"""When both ends of a dead connection know, at the latest."""
SEVERAL_EVERY_S = 0.5
SEVERAL_ANSWER_S = 0.8
"""Where another broker may be asked: about as long as one waits for a lease of the dead one."""
LEAST_EVERY_S = 0.3
"""More frequent pings are taken for abuse."""


def _options(every_s: float, answer_s: float = ANSWER_S) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", int(every_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(answer_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    )


CLIENT_PINGS = _options(PING_EVERY_S)
PINGS_OF_SEVERAL = _options(SEVERAL_EVERY_S, SEVERAL_ANSWER_S)
SERVER_PINGS = (
    *_options(_SERVER_EVERY_S),
    ("grpc.http2.min_ping_interval_without_data_ms", int(LEAST_EVERY_S * 1000)),
)
