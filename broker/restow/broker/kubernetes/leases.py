"""Members and pools as Lease objects, and back.

A member's Lease is made when it joins, written anew to keep it alive, and deleted when its life has
ended: its uid is that life. A pool's Lease is made by a claim and deleted by the release, and never
written in between: so its resourceVersion is the claim's epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from restow.broker.kubernetes.errors import KubernetesError
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.claim import Claim

FLEET, KIND = "restow/fleet", "restow/kind"
"""Labels."""
MEMBER, POOL = "member", "pool"
_LIFE, _POOL, _NONCE, _LEAVING = (f"restow/{one}" for one in ("life", "pool", "nonce", "leaving"))
"""Annotations."""
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MemberLease:
    """A member, as its Lease says at one version of it."""

    name: str
    life: str
    version: str
    address: str
    length_s: float
    nonce: str
    leaving: bool

    @property
    def number(self) -> int:
        """Of its life."""
        return number_of(self.life)


@dataclass(frozen=True, slots=True)
class PoolLease:
    """A pool's claim, as its Lease says."""

    name: str
    version: str
    life: str
    """Of the member that claimed it: the claim is void when that has ended."""
    pool: Pool
    address: str

    @property
    def claim(self) -> Claim:
        """As members know it."""
        return Claim(self.address, number_of(self.life), version_number(self.version))


def number_of(life: str) -> int:
    """A life's number."""
    return int.from_bytes(hashlib.blake2b(life.encode(), digest_size=8).digest()) >> 1


def version_number(version: str) -> int:
    """A resourceVersion, which rises with every change of any Lease.

    Kubernetes says so since 1.35, and its API servers have never done otherwise. Raises
    `KubernetesError` where it is no number.
    """
    if not (version.isascii() and version.isdigit()):
        raise KubernetesError(
            f"resourceVersion {version!r} is no number: epochs can't be told from it, so give the "
            f"brokers an etcd of their own (--etcd)"
        )
    return int(version)


def member_name(fleet: str, address: str) -> str:
    """The name of a member's Lease."""
    return f"restow-{fleet}-member-{_hash(address)}"


def pool_name(fleet: str, pool: Pool) -> str:
    """The name of a pool's Lease."""
    return f"restow-{fleet}-pool-{_hash(_pool_words(pool))}"


def fleet_object(fleet: str) -> Object:
    """A Lease that nobody holds: its uid tells this fleet from one of another cluster."""
    return _object(f"restow-{fleet}", {FLEET: fleet, KIND: "fleet"}, {}, {})


def member_object(fleet: str, address: str, length_s: int, nonce: str) -> Object:
    """A member's Lease, to be made; ``nonce`` shows who made it."""
    spec = {"holderIdentity": address, "leaseDurationSeconds": length_s, "acquireTime": _now()}
    made = _object(member_name(fleet, address), {FLEET: fleet, KIND: MEMBER}, {_NONCE: nonce}, spec)
    return renewed(made)


def renewed(found: Object, leaving: bool = False) -> Object:
    """A member's Lease, to be written: no two writes are alike, for the same again is no change."""
    marks = {_LEAVING: "true"} if leaving else {}
    metadata = found["metadata"]
    annotations = {**metadata.get("annotations", {}), **marks}
    spec = {**found["spec"], "renewTime": _now()}
    return {**found, "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def pool_object(fleet: str, pool: Pool, address: str, life: str) -> Object:
    """A pool's Lease, to be made."""
    annotations = {_POOL: _pool_words(pool), _LIFE: life}
    spec = {"holderIdentity": address, "acquireTime": _now()}
    return _object(pool_name(fleet, pool), {FLEET: fleet, KIND: POOL}, annotations, spec)


def read(found: Object) -> MemberLease | PoolLease | None:
    """What a Lease says; None: nothing of ours. Raises `KubernetesError` by `version_number`."""
    metadata, spec = found.get("metadata") or {}, found.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    version_number(version_of(found))
    try:
        match (metadata.get("labels") or {}).get(KIND):
            case "member":
                return MemberLease(
                    metadata["name"],
                    metadata["uid"],
                    metadata["resourceVersion"],
                    spec["holderIdentity"],
                    float(spec["leaseDurationSeconds"]),
                    annotations.get(_NONCE, ""),
                    _LEAVING in annotations,
                )
            case "pool":
                return PoolLease(
                    metadata["name"],
                    metadata["resourceVersion"],
                    annotations[_LIFE],
                    _pool_of(annotations[_POOL]),
                    spec["holderIdentity"],
                )
    except (KeyError, TypeError, ValueError):  # somebody else has written there
        return None
    return None


def version_of(found: Object) -> str:
    """The resourceVersion of an object or a list."""
    return str((found.get("metadata") or {}).get("resourceVersion", ""))


def _object(
    name: str, labels: Mapping[str, str], annotations: Mapping[str, str], spec: Mapping[str, Any]
) -> Object:
    metadata = {"name": name, "labels": dict(labels), "annotations": dict(annotations)}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": dict(spec),
    }


def _pool_words(pool: Pool) -> str:
    return json.dumps([pool.tenant, *astuple(pool.model)])


def _pool_of(words: str) -> Pool:
    tenant, *parts = json.loads(words)
    if len(parts) != len(fields(ModelIdentity)) or not all(
        isinstance(one, str) for one in (tenant, *parts)
    ):
        raise ValueError(words)
    return Pool(tenant, ModelIdentity(*parts))


def _hash(words: str) -> str:
    return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()


def _now() -> str:
    """For people: nobody's lease is judged by it.

    Two of one microsecond would be one write.
    """
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
