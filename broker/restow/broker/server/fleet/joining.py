"""Takes a broker into a fleet for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from restow.broker.errors import AddressInvalidError, ExtraMissingError
from restow.broker.etcd.access import EtcdAccess
from restow.broker.etcd.asking import Patience
from restow.broker.etcd.client import EtcdClient
from restow.broker.etcd.errors import EtcdUnreachableError
from restow.broker.etcd.registry import PREFIX, EtcdRegistry
from restow.broker.kubernetes.access import KubernetesAccess
from restow.broker.kubernetes.errors import KubernetesSettingsError, KubernetesUnreachableError
from restow.broker.logs import get_logger
from restow.broker.owners.registry import Registry
from restow.broker.owners.timing import Timing
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.fleet.membership import seconds_awake_or_not
from restow.broker.server.fleet.one_of_several import OneOfSeveral

EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - nothing listens here


@contextlib.asynccontextmanager
async def in_fleet(
    settings: BrokerSettings, address: str, hub: Hub
) -> AsyncIterator[OneOfSeveral | None]:
    """Have ``hub`` be one of several brokers inside the ``async with``; None: it is alone.

    It is reached at ``address`` if nothing else is advertised. An etcd or a Kubernetes that does
    not answer is asked again until it does. Raises `EtcdRefusedError`, `EtcdTooOldError`,
    `EtcdSettingsError`, and those of Kubernetes, for what time does not mend.
    """
    opened = _opened(settings)
    if opened is None:
        yield None
        return
    async with opened as registry:
        one = OneOfSeveral(
            registry,
            checked_advertised(settings.advertise or address),
            hub.directory,
            hub.perform,
            hub.all_said,
            hub.expected.look_again,
            hub.now_s,
            settings.timing(),
        )
        hub.standing = one
        running = asyncio.create_task(one.membership.run())
        try:
            yield one
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _opened(settings: BrokerSettings) -> AbstractAsyncContextManager[Registry] | None:
    """What the settings name."""
    if settings.kubernetes_leases is None:
        return None if settings.etcd is None else _etcd(settings, settings.etcd)
    if settings.etcd is not None:
        raise KubernetesSettingsError(
            "brokers share pools out by one thing: give --etcd or --kubernetes-leases"
        )
    return _leases(settings, settings.kubernetes_leases)


@contextlib.asynccontextmanager
async def _etcd(settings: BrokerSettings, endpoints: str) -> AsyncIterator[Registry]:
    access = EtcdAccess.parse(
        endpoints,
        ca=settings.etcd_ca,
        cert=settings.etcd_cert,
        key=settings.etcd_key,
        user=settings.etcd_user,
        password_file=settings.etcd_password_file,
    )
    client = EtcdClient(access, patience_for(settings.timing()))
    try:
        try:
            await client.statuses()
        except EtcdUnreachableError as error:
            get_logger("restow.brokers").warning("etcd is not there yet", why=error.message)
        yield EtcdRegistry(client, f"{PREFIX}{settings.fleet}/")
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _leases(settings: BrokerSettings, namespace: str) -> AsyncIterator[Registry]:
    try:
        from restow.broker.kubernetes.api import LeasesApi
        from restow.broker.kubernetes.registry import KubernetesRegistry
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"--kubernetes-leases speaks HTTPS by {error.name}, which is not installed here: "
            f"pip install 'restow[kubernetes]'",
            module=error.name or "",
        ) from None
    lease_s = settings.timing().lease_s
    access = KubernetesAccess.of_pod(os.environ, settings.kubernetes_account)
    api = LeasesApi(access, namespace, call_s=lease_s / 2, silent_s=2 * lease_s)
    registry = KubernetesRegistry(api, settings.fleet, seconds_awake_or_not)
    try:
        try:
            await registry.all()
        except KubernetesUnreachableError as error:
            get_logger("restow.brokers").warning("Kubernetes is not there yet", why=error.message)
        yield registry
    finally:
        await api.close()


def patience_for(timing: Timing) -> Patience:
    """How long calls of etcd may take: what is answered after the lease is of no use."""
    return Patience(
        call_s=timing.lease_s, try_s=timing.lease_s / 2, watch_answer_s=2 * timing.lease_s
    )


def checked_advertised(address: str) -> str:
    """Where the others send clients. Raises `AddressInvalidError` where nobody could go."""
    if address.rpartition(":")[0].strip("[]") in EVERYWHERE:
        raise AddressInvalidError(
            f"one of several brokers says where clients reach it, and {address} is no place: give "
            f"--advertise HOST:PORT",
            address=address,
        )
    return address
