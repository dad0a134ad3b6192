"""Check several brokers, by what each broker says of itself and of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from restow.broker.client.admin import AdminClient
from restow.broker.doctor.local import Finding, bad, ok, warn
from restow.broker.errors import RestowError
from restow.v1 import admin_pb2 as pb


def look_at_brokers(
    asked: AdminClient, client_of: Callable[[str], AdminClient]
) -> Iterator[Finding]:
    """Check that every broker is reachable, that a broker leads, and that no broker is missing.

    Yields nothing if there is only one broker. ``client_of`` makes a client of the broker at an
    address. Raises `RestowError` if the broker that is asked does not answer.
    """
    told = asked.brokers()
    if not told.HasField("membership"):
        return
    yield judge_fleet(told.membership)
    for member in told.brokers:
        try:
            with client_of(member.address) as client:
                answer = client.brokers()
        except RestowError as error:
            yield bad(
                f"broker {member.address}",
                f"cannot be reached from here, at the address it gives engines: {error.message}",
                "give that broker an --advertise that engines can reach, or open the way",
            )
        else:
            yield judge_membership(answer.membership, member.address, told.membership.fleet)


def judge_fleet(membership: pb.Membership) -> Finding:
    """Check that a broker leads, and that no broker is missing."""
    subject = f"fleet {membership.fleet}"
    if not membership.leader:
        return bad(
            subject,
            f"no broker has led for {membership.leaderless_s:.1f} s",
            "`restow doctor --etcd` of its etcd",
        )
    if membership.brokers < membership.expected:
        return warn(
            subject,
            f"{membership.brokers} of {membership.expected} brokers are there",
            "find out why the other brokers do not run, or do not reach the registry",
        )
    if membership.warnings:
        return warn(
            subject,
            f"etcd says: {'; '.join(membership.warnings)}",
            "`etcdctl alarm list`; with NOSPACE, compact, defragment and disarm before the leader "
            "dies: no broker can follow until then",
        )
    return ok(
        subject,
        f"{membership.leader} leads in epoch {membership.epoch}, of {membership.brokers} brokers",
    )


def judge_membership(membership: pb.Membership, address: str, fleet: str) -> Finding:
    """Check the answer of the broker that was reached at ``address``."""
    subject, trouble = f"broker {address}", f" ({membership.trouble})" if membership.trouble else ""
    if membership.address != address or membership.fleet != fleet:
        answering = membership.address or "a broker that runs alone"
        return bad(
            subject,
            f"another broker answers there: {answering}, of fleet {membership.fleet or 'none'}",
            "give each broker an --advertise of its own, and all the same --etcd and --fleet",
        )
    if not membership.let_in:
        return bad(
            subject, f"etcd has not let it in{trouble}", "`restow doctor --etcd` of its etcd"
        )
    if membership.HasField("still_s"):
        return bad(
            subject,
            f"it has stood still for {membership.still_s:.1f} s: its lease may have ended{trouble}",
            "`restow doctor --etcd` of its etcd",
        )
    return ok(subject, "leads, and is sure of its lease" if membership.leads else "stands by")
