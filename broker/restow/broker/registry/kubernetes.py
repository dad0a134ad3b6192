"""A fleet's Lease objects in a Kubernetes namespace.

``restow-FLEET`` says who leads, and in which epoch. It is never deleted, so the epoch only rises.
Each broker has a Lease of its own, ``restow-FLEET-HASH``, which it rewrites to keep it alive. A
leader leads while its own Lease lives, so it keeps only this Lease alive.

Brokers do not compare clocks. A broker calls a Lease silent when the Lease has not changed for the
duration that it names. The broker measures this by its own clock, and counts only time in which the
API answers. A broker that finds the leader silent deletes the leader's own Lease first, on the
condition that the Lease has not changed. If the leader has renewed its Lease meanwhile, the
deletion fails; otherwise the leader's next keepalive fails. So the two never act at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import ClientError
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import ConfigException
from kubernetes_asyncio.config.incluster_config import (
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
    InClusterConfigLoader,
)

from restow.broker.errors import RestowError
from restow.broker.registry.registry import (
    TRIES,
    AddressTakenError,
    Fleet,
    Leader,
    LeaseEndedError,
    written_address,
)

T = TypeVar("T")
FLEET, KIND = "restow/fleet", "restow/kind"
"""Labels."""
ADDRESS, EPOCH = "restow/address", "restow/epoch"
"""Annotations."""
UNHEARD_S = 1.0
"""Silence counts at most this long between two looks: the API may have been away."""


class KubernetesError(RestowError, status="UNAVAILABLE", reason="KUBERNETES_FAILED"):
    """A call to Kubernetes failed; the message has the API's own words."""


class KubernetesUnreachableError(KubernetesError, reason="KUBERNETES_UNREACHABLE"):
    """No API server answers in time. The call may still have taken or take effect."""


class KubernetesRefusedError(
    KubernetesError, status="PERMISSION_DENIED", reason="KUBERNETES_REFUSED"
):
    """Kubernetes does not know the service account, or does not permit the call."""


class KubernetesSettingsError(
    RestowError, status="FAILED_PRECONDITION", reason="KUBERNETES_SETTINGS_INVALID"
):
    """The service account, or a name, cannot be used."""


class _ChangedError(KubernetesError, status="ABORTED", reason="KUBERNETES_CONFLICT"):
    """A Lease exists already, is gone, or has changed."""


@dataclass(frozen=True, slots=True)
class _Lease:
    """A Lease, as far as brokers use it."""

    name: str
    uid: str
    version: str
    holder: str
    """The life of the broker that holds it. Empty: nobody holds it."""
    length_s: float
    address: str
    epoch: int

    @classmethod
    def of(cls, lease: Any) -> _Lease:
        """Read what the API returned."""
        spec, notes = lease.spec, lease.metadata.annotations or {}
        epoch = notes.get(EPOCH, "0")
        return cls(
            lease.metadata.name,
            lease.metadata.uid,
            lease.metadata.resource_version,
            (spec.holder_identity if spec else "") or "",
            float((spec.lease_duration_seconds if spec else 0) or 0),
            written_address(notes.get(ADDRESS, "").encode(errors="replace")),
            int(epoch) if epoch.isascii() and epoch.isdigit() else 0,
        )


@dataclass(slots=True)
class _Silence:
    """How long each Lease has not changed, by our own clock, while the API answered."""

    looked_s: float = float("-inf")
    since: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The version by uid, and how many seconds it has not changed."""

    def look(self, leases: Iterable[_Lease], now_s: float) -> None:
        """Take the Leases that exist now."""
        passed_s, self.looked_s = min(now_s - self.looked_s, UNHEARD_S), now_s
        known, self.since = self.since, {}
        for lease in leases:
            version, silent_s = known.get(lease.uid, ("", 0.0))
            again = version == lease.version
            self.since[lease.uid] = (lease.version, silent_s + passed_s if again else 0.0)

    def is_over(self, lease: _Lease) -> bool:
        """Return whether a Lease has not changed for its own length."""
        version, silent_s = self.since.get(lease.uid, ("", 0.0))
        return version == lease.version and silent_s >= lease.length_s


@dataclass(frozen=True, slots=True)
class _FleetLeases:
    """All Leases of a fleet."""

    top: _Lease | None
    """The Lease that says who leads."""
    brokers: dict[str, _Lease]
    """Leases of brokers by the life that holds them."""


class KubernetesRegistry:
    """Implements `Registry` for one broker. Use it on one loop, and `close` it in the end."""

    look_every_s = 0.5

    def __init__(
        self,
        namespace: str,
        fleet: str,
        clock: Callable[[], float],
        *,
        account: Path | None = None,
        call_s: float = 1.0,
    ) -> None:
        """Use the Leases of ``fleet`` as the pod's service account, or the account in ``account``.

        ``clock`` goes on while the host sleeps. A call may take ``call_s``. Raises
        `KubernetesSettingsError` for a fleet that cannot be a part of a name.
        """
        if not fleet[-1:].isalnum() or ".." in fleet or ".-" in fleet or "-." in fleet:
            raise KubernetesSettingsError(
                f"fleet {fleet} cannot be part of a Lease's name: end its parts with a letter or a "
                f"digit",
                fleet=fleet,
            )
        self._namespace, self._fleet, self._clock = namespace, fleet, clock
        self._account, self._call_s = account, call_s
        self._life = ""
        self._address, self._length_s = "", 0.0
        self._own: _Lease | None = None
        self._silence = _Silence()
        self._client: ApiClient | None = None
        self._calls = Counter[ApiClient]()
        """Calls under way, by the client that they use."""

    async def close(self) -> None:
        """End all calls. May be repeated."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def join(self, address: str, lease_s: float) -> float:
        """Make the broker's own Lease. Raises `AddressTakenError` and `KubernetesError`."""
        digest = hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
        name = f"restow-{self._fleet}-{digest}"
        leases = await self._list()
        earlier = next((lease for lease in leases.brokers.values() if lease.name == name), None)
        if earlier is not None:
            if not self._silence.is_over(earlier):
                raise AddressTakenError(address)
            await self._delete(earlier)
        self._address, self._length_s = address, float(max(1, round(lease_s + 0.49)))
        self._life = uuid.uuid4().hex
        self._own = await self._create(name, "broker", self._life, 0)
        return self._length_s

    async def keep_alive(self) -> float:
        """Renew the broker's own Lease, and return its length in seconds."""
        own = self._own
        if own is None:
            raise _ended()
        try:
            self._own = await self._replace(own, "broker", self._life, 0)
        except _ChangedError:
            # The Lease was deleted, an answer was lost, or somebody else has written to it.
            lease = (await self._list()).brokers.get(self._life)
            self._own = lease
            if lease is None:
                raise _ended() from None
            self._own = await self._replace(lease, "broker", self._life, 0)
        return self._length_s

    async def look(self) -> Fleet:
        """List all Leases of the fleet; the leader deletes Leases of brokers that are gone."""
        leases = await self._list()
        fleet = self._fleet_of(leases)
        if fleet.leader is not None and fleet.leader.mine:
            for lease in leases.brokers.values():
                if self._silence.is_over(lease) and lease.holder != self._life:
                    with contextlib.suppress(_ChangedError):
                        await self._delete(lease)
        return fleet

    async def lead(self, epoch: int) -> Leader:
        """Take the top Lease if no live broker holds it."""
        for _ in range(TRIES):
            leases = await self._list()
            fleet = self._fleet_of(leases)
            if fleet.leader is not None:  # perhaps by this call, whose answer was lost
                return fleet.leader
            with contextlib.suppress(_ChangedError):
                if leases.top is not None and leases.top.holder in leases.brokers:
                    await self._delete(leases.brokers[leases.top.holder])
                return await self._take(leases.top, epoch)
        raise self._again_and_again()

    async def raise_epoch(self, epoch: int) -> Leader:
        """Rewrite the top Lease with a higher epoch, as long as this broker holds it."""
        for _ in range(TRIES):
            leases = await self._list()
            leader = self._fleet_of(leases).leader
            if leader is None:
                return await self.lead(epoch)
            if not leader.mine or leader.epoch > epoch:
                return leader
            with contextlib.suppress(_ChangedError):
                return await self._take(leases.top, epoch)
        raise self._again_and_again()

    async def _take(self, top: _Lease | None, above: int) -> Leader:
        epoch = max(above, 0 if top is None else top.epoch) + 1
        if self._own is None:
            raise _ended()
        if top is None:
            await self._create(f"restow-{self._fleet}", "leader", self._life, epoch)
        else:
            await self._replace(top, "leader", self._life, epoch)
        return Leader(self._address, epoch, mine=True)

    def _again_and_again(self) -> KubernetesError:
        return KubernetesError(f"other brokers change Lease restow-{self._fleet} again and again")

    async def release(self) -> None:
        """Give up the top Lease if this broker holds it."""
        top = (await self._list()).top
        if top is not None and top.holder == self._life:
            with contextlib.suppress(_ChangedError):
                await self._replace(top, "leader", "", top.epoch)

    async def leave(self) -> None:
        """Delete the broker's own Lease. May be repeated."""
        own, self._own = self._own, None
        if own is not None:
            lease = (await self._list()).brokers.get(self._life)
            if lease is not None:
                with contextlib.suppress(_ChangedError):
                    await self._delete(lease)

    # -- reading ----------------------------------------------------------------------------------

    async def _list(self) -> _FleetLeases:
        listed = await self._call(
            "list Leases",
            lambda api, how: api.list_namespaced_lease(
                self._namespace, label_selector=f"{FLEET}={self._fleet}", **how
            ),
        )
        top, brokers = None, {}
        leases = [(item, _Lease.of(item)) for item in listed.items]
        self._silence.look((lease for _, lease in leases), self._clock())
        for item, lease in leases:
            kind = (item.metadata.labels or {}).get(KIND)
            if kind == "leader":
                top = lease
            elif kind == "broker" and lease.holder and lease.address:
                brokers[lease.holder] = lease
        return _FleetLeases(top, brokers)

    def _fleet_of(self, leases: _FleetLeases) -> Fleet:
        """Return who leads and which brokers live. A silent Lease belongs to no live broker."""
        living = {
            life: lease
            for life, lease in leases.brokers.items()
            if life == self._life or not self._silence.is_over(lease)
        }
        top = leases.top
        addresses = frozenset(lease.address for lease in living.values())
        if top is None:
            return Fleet(None, addresses)
        if top.holder not in living or not top.epoch:
            return Fleet(None, addresses, top.epoch)
        mine = top.holder == self._life
        return Fleet(Leader(living[top.holder].address, top.epoch, mine), addresses, top.epoch)

    # -- calls ------------------------------------------------------------------------------------

    def _body(self, name: str, kind: str, holder: str, epoch: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people
        notes = {ADDRESS: self._address} | ({EPOCH: str(epoch)} if epoch else {})
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "labels": {FLEET: self._fleet, KIND: kind},
                "annotations": notes,
            },
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(self._length_s),
                "renewTime": now,
            },
        }

    async def _create(self, name: str, kind: str, holder: str, epoch: int) -> _Lease:
        body = self._body(name, kind, holder, epoch)
        made = await self._call(
            "create a Lease",
            lambda api, how: api.create_namespaced_lease(self._namespace, body, **how),
        )
        return _Lease.of(made)

    async def _replace(self, lease: _Lease, kind: str, holder: str, epoch: int) -> _Lease:
        """Write a Lease if it has not changed since it was read, else raise `_ChangedError`."""
        body = self._body(lease.name, kind, holder, epoch)
        body["metadata"] |= {"resourceVersion": lease.version, "uid": lease.uid}
        written = await self._call(
            "update a Lease",
            lambda api, how: api.replace_namespaced_lease(lease.name, self._namespace, body, **how),
        )
        return _Lease.of(written)

    async def _delete(self, lease: _Lease) -> None:
        """Delete a Lease if it has not changed since it was read, else raise `_ChangedError`."""
        only = {"uid": lease.uid, "resourceVersion": lease.version}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only}
        await self._call(
            "delete a Lease",
            lambda api, how: api.delete_namespaced_lease(
                lease.name, self._namespace, body=body, **how
            ),
        )

    def _connect(self) -> ApiClient:
        """Return a client of the API. Raises `KubernetesSettingsError`."""
        loader = InClusterConfigLoader(
            str(self._account / "token") if self._account else SERVICE_TOKEN_FILENAME,
            str(self._account / "ca.crt") if self._account else SERVICE_CERT_FILENAME,
            environ=dict(os.environ),
        )
        configuration = Configuration()
        try:
            loader.load_and_set(configuration)
        except (ConfigException, OSError, UnicodeDecodeError) as error:
            raise KubernetesSettingsError(
                f"the service account of this pod cannot be used: {error} (Kubernetes tells a "
                f"pod where its API is, and gives it a token and ca.crt: "
                f"automountServiceAccountToken, --kubernetes-account)"
            ) from None
        return ApiClient(configuration)

    async def _call(
        self, asked: str, call: Callable[[Any, dict[str, float]], Awaitable[Any]]
    ) -> Any:
        """Make a call with the API and a time limit; raise a typed error that says what to do.

        After a failure the next call makes a new client. The old client is closed when no other
        call uses it: a client that is closed during a call raises errors of any type.
        """
        if self._client is None:
            self._client = self._connect()
        client = self._client
        self._calls[client] += 1
        try:
            async with asyncio.timeout(self._call_s):
                return await call(CoordinationV1Api(client), {"_request_timeout": self._call_s})
        except TimeoutError:
            self._drop(client)
            raise KubernetesUnreachableError(
                f"Kubernetes' API does not answer within {self._call_s:g} s"
            ) from None
        except ApiException as error:
            raise _typed(error, asked) from None
        except (ClientError, OSError, ValueError) as error:
            self._drop(client)  # the account's files may have been renewed
            why = str(error) or type(error).__name__
            raise KubernetesUnreachableError(f"Kubernetes' API does not answer ({why})") from None
        finally:
            self._calls[client] -= 1
            if client is not self._client and not self._calls[client]:
                del self._calls[client]
                await client.close()

    def _drop(self, client: ApiClient) -> None:
        """Have the next call make a new client."""
        if self._client is client:
            self._client = None


def _ended() -> LeaseEndedError:
    return LeaseEndedError("the broker's Lease has ended: somebody has deleted it")


def _typed(error: ApiException, asked: str) -> KubernetesError:
    """Return the typed error of an answer of the API."""
    words = f"{error.status} {error.reason}"
    if error.status in (401, 403):
        return KubernetesRefusedError(
            f"Kubernetes refuses to {asked} ({words}): the broker's service account needs a Role "
            f"that lets it get, list, create, update and delete leases of coordination.k8s.io there"
        )
    if error.status in (404, 409):
        return _ChangedError(f"Kubernetes does not {asked} ({words})")
    if error.status == 429 or (error.status or 500) >= 500:
        return KubernetesUnreachableError(f"Kubernetes cannot {asked} at the moment ({words})")
    return KubernetesError(f"Kubernetes does not {asked} ({words})")
