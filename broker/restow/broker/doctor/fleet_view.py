"""Several brokers, as each tells of itself and of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from restow.broker.client.admin import AdminClient
from restow.broker.doctor.local import Finding, bad, ok
from restow.broker.errors import RestowError
from restow.v1 import admin_pb2 as pb


def look_at_brokers(
    asked: AdminClient, client_of: Callable[[str], AdminClient]
) -> Iterator[Finding]:
    """Whether each can be reached where it says, is that broker, and is sure of its lease.

    Of one that is alone, or too old to have others, nothing is said. ``client_of`` makes a client
    of the broker at an address. Raises `RestowError` if nobody answers.
    """
    try:
        told = asked.brokers()
    except RestowError as error:
        if error.status != "UNIMPLEMENTED":
            raise
        return
    if not told.HasField("membership"):
        return
    fleet = told.membership.fleet
    if not told.brokers:
        yield judge_membership(told.membership, told.membership.address, fleet)
    for member in told.brokers:
        try:
            with client_of(member.address) as client:
                answer = client.brokers()
        except RestowError as error:
            yield bad(
                f"broker {member.address}",
                f"can't be reached from here, where it tells engines to come: {error.message}",
                "give that broker an --advertise that engines can reach, or open the way",
            )
        else:
            yield judge_membership(answer.membership, member.address, fleet)


def judge_membership(found: pb.Membership, address: str, fleet: str) -> Finding:
    """What a broker that was reached at ``address`` says of itself."""
    subject, trouble = f"broker {address}", f" ({found.trouble})" if found.trouble else ""
    if found.address != address or found.fleet != fleet:
        other = found.address or "one that is alone"
        return bad(
            subject,
            f"another broker answers there: {other}, of fleet {found.fleet or 'none'}",
            "give each broker an --advertise of its own, and all one --etcd and --fleet",
        )
    if not found.let_in:
        return bad(
            subject, f"etcd has not let it in{trouble}", "`restow doctor --etcd` of its etcd"
        )
    if found.HasField("still_s"):
        return bad(
            subject,
            f"it stands still since {found.still_s:.1f} s: its lease may have ended{trouble}",
            "`restow doctor --etcd` of its etcd",
        )
    return ok(subject, f"one of {found.brokers}, owns {found.pools_owned} pools, sure of its lease")
