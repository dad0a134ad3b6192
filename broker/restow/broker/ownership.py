"""Reasons why a broker does not serve a pool, with advice for operators."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from restow.broker.advice import Advice

_ITSELF = "Nothing: the broker retries by itself."

OWNERSHIP: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        # Pools.
        "NOT_OWNER": Advice(
            "Another broker owns the pool; the message names it if it is known.",
            "Nothing, where it passes: engines, agents and routers follow by themselves. If not, "
            "see whether the address that is named can be reached from there "
            "(`restow serve --advertise`), and `restow doctor`.",
        ),
        "OWNER_UNKNOWN": Advice(
            "No broker owns the pool at the moment: its owner has gone and nobody has claimed it "
            "yet, or brokers can't reach etcd.",
            "Nothing, if it passes within a few seconds; else `restow brokers` says why etcd does "
            "not answer, and `restow doctor --etcd` looks at it.",
        ),
        "EPOCH_OVER": Advice(
            "A broker spoke in an epoch that is over, as one does that was stopped and goes on: "
            "its stream was left, and nothing that it said was done.",
            "Nothing: engine and agent ask the owner. If it comes often, see why a broker stands "
            "still: memory, a paused host, or a clock that was set.",
        ),
        # A broker among several.
        "ADDRESS_TAKEN": Advice(
            "Another broker advertises this one's address, or an earlier life of this one did "
            "until a moment ago.",
            "Nothing, if it passes when that lease has ended; else give each broker its own "
            "`--advertise`.",
        ),
        "MEMBER_LEASE_ENDED": Advice(
            "The broker did not keep its lease in time: others may own its pools, and it has "
            "forgotten them.",
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
        "ETCD_COMPACTED": Advice(
            "Etcd has forgotten changes that the broker had not read yet.", _ITSELF
        ),
        # Kubernetes, whose Leases replace etcd.
        "KUBERNETES_UNREACHABLE": Advice(
            "No API server answers the broker, or none in time. It stands still when its lease "
            "may have ended.",
            "Nothing, if it passes within a few seconds; else see whether the API server can be "
            "reached from the pod. A longer `--member-lease-s` bridges its restarts.",
        ),
        "KUBERNETES_REFUSED": Advice(
            "The broker's service account is not known to Kubernetes, or may not do what was "
            "asked.",
            "Give it a Role that lets it get, list, watch, create, update and delete leases of "
            "coordination.k8s.io in that namespace: the chart has it.",
        ),
        "KUBERNETES_SETTINGS_INVALID": Advice(
            "The service account, the namespace or names that were given can't be used.",
            "Mend what the message names.",
        ),
        "KUBERNETES_FAILED": Advice(
            "Kubernetes refused what it was asked, in its own words.", "Read the message."
        ),
        "KUBERNETES_EXISTS": Advice(
            "Somebody else has made the Lease that the broker was to make.", _ITSELF
        ),
        "KUBERNETES_CONFLICT": Advice(
            "A Lease is another one by now than the broker has seen.", _ITSELF
        ),
        "KUBERNETES_NOT_FOUND": Advice(
            "A Lease is not there any more, or Kubernetes knows no namespace of that name.",
            "Nothing, if it passes: it is tried again. Else see whether the namespace that "
            "`--kubernetes-leases` names is there.",
        ),
        "KUBERNETES_GONE": Advice(
            "Kubernetes has forgotten changes that the broker had not read yet.", _ITSELF
        ),
    }
)
"""Advice by reason."""
