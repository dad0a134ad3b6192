"""A port that a test chose is still free when its server listens at it."""

from __future__ import annotations

from pathlib import Path

from forked.ports import free_port


def test_none_twice_and_none_that_a_connection_may_take() -> None:
    range_of_connections = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < int(range_of_connections[0])
