"""Why one of several brokers does not act, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from restow.broker.advice import Advice

_ITSELF = "Nothing: the broker retries by itself."

FLEET_REASONS: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        # Of a fleet.
        "NOT_LEADER": Advice(
            "The broker stands by; the message names the broker that leads.",
            "Nothing, if it passes: engines, agents and routers follow by themselves. Else see "
            "whether the address that is named can be reached from there "
            "(`restow serve --advertise`), and `restow doctor`.",
        ),
        "NO_LEADER": Advice(
            "No broker leads at the moment: the leader has gone and none has followed yet, or "
            "brokers cannot reach etcd.",
            "Nothing, if it passes within a few seconds; else `restow brokers` says why etcd does "
            "not answer, and `restow doctor --etcd` looks at it.",
        ),
        "EPOCH_OVER": Advice(
            "A broker spoke in an epoch that is over, as a broker does that was stopped and goes "
            "on. Engine and agent left its stream and did nothing that it said.",
            "Nothing: they ask the leader. If it comes often, see why a broker stands still: "
            "memory, a paused host, or a clock that was set.",
        ),
        "ADDRESS_TAKEN": Advice(
            "Another broker advertises the address of this one, or an earlier life of this one did "
            "until a moment ago.",
            "Nothing, if it passes when that lease has ended; else give each broker an "
            "`--advertise` of its own.",
        ),
        "BROKER_LEASE_ENDED": Advice(
            "The broker did not keep its lease in time: another broker may lead.",
            "Nothing: it joins again by itself. If it comes often, see what holds up the broker "
            "or etcd, or give a longer `--member-lease-s`.",
        ),
        # Etcd.
        "ETCD_UNREACHABLE": Advice(
            "No etcd answers the broker, or none in time. It stands still when its lease may have "
            "ended.",
            "See whether most of etcd's members run and can be reached from the broker: "
            "`restow doctor --etcd` with the broker's options tries each.",
        ),
        "ETCD_NO_LEADER": Advice(
            "An etcd answers, and nobody leads it: it agrees on nothing until a leader is found.",
            "Nothing, if it passes within a few seconds; else see whether most of its members are "
            "there and reach each other.",
        ),
        "ETCD_REFUSED": Advice(
            "Etcd does not know the broker's user or certificate, or it may not read and write "
            "the brokers' keys.",
            "Give it `--etcd-user` and `--etcd-password-file`, or `--etcd-cert`, of a user with a "
            "role that may read and write what begins with /restow/.",
        ),
        "ETCD_TOO_OLD": Advice(
            "What listens there is an etcd of before 3.4, or none.",
            "Take a later release; the message has its address.",
        ),
        "ETCD_SETTINGS_INVALID": Advice(
            "Settings of etcd's addresses, TLS or password do not go together, or a file of them "
            "can't be used.",
            "Mend what the message names.",
        ),
        "ETCD_FAILED": Advice(
            "Etcd refused what it was asked, in its own words.",
            "Read the message: a quota that is full (`etcdctl alarm list`) is a common cause.",
        ),
        "ETCD_TOKEN_ENDED": Advice("Etcd has forgotten the broker's token.", _ITSELF),
        "ETCD_LEASE_GONE": Advice("A lease at etcd has ended, with all keys of it.", _ITSELF),
        # Of Kubernetes, whose Leases stand for an etcd.
        "KUBERNETES_UNREACHABLE": Advice(
            "No API server answers the broker, or none in time. It stands still when its lease "
            "may have ended.",
            "Nothing, if it passes within a few seconds; else see whether the API server can be "
            "reached from the pod. A longer `--member-lease-s` bridges its restarts.",
        ),
        "KUBERNETES_REFUSED": Advice(
            "The broker's service account is not known to Kubernetes, or may not do what was "
            "asked.",
            "Give it a Role that lets it get, list, create, update and delete leases of "
            "coordination.k8s.io in that namespace: the chart has it.",
        ),
        "KUBERNETES_SETTINGS_INVALID": Advice(
            "The service account, the namespace or names that were given can't be used.",
            "Mend what the message names.",
        ),
        "KUBERNETES_FAILED": Advice(
            "Kubernetes refused what it was asked, in its own words.", "Read the message."
        ),
        "KUBERNETES_CONFLICT": Advice(
            "A Lease is another one by now than the broker has seen.", _ITSELF
        ),
    }
)
"""Advice by reason."""
