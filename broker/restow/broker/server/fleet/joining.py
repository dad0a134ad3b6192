"""Takes a broker into a fleet for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from restow.broker.errors import AddressInvalidError
from restow.broker.etcd.access import EtcdAccess
from restow.broker.etcd.asking import Patience
from restow.broker.etcd.client import EtcdClient
from restow.broker.etcd.errors import EtcdUnreachableError
from restow.broker.etcd.registry import PREFIX, EtcdRegistry
from restow.broker.logs import get_logger
from restow.broker.owners.timing import Timing
from restow.broker.server.fleet.one_of_several import OneOfSeveral
from restow.broker.server.hub import Hub
from restow.broker.server.settings import BrokerSettings

EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - nothing listens here


@contextlib.asynccontextmanager
async def in_fleet(
    settings: BrokerSettings, address: str, hub: Hub
) -> AsyncIterator[OneOfSeveral | None]:
    """Have ``hub`` be one of several brokers inside the ``async with``; None: it is alone.

    It is reached at ``address`` if nothing else is advertised. An etcd that does not answer is
    asked again until it does. Raises `EtcdRefusedError`, `EtcdTooOldError` and
    `EtcdSettingsError` for what time does not mend.
    """
    if settings.etcd is None:
        yield None
        return
    access = EtcdAccess.parse(
        settings.etcd,
        ca=settings.etcd_ca,
        cert=settings.etcd_cert,
        key=settings.etcd_key,
        user=settings.etcd_user,
        password_file=settings.etcd_password_file,
    )
    timing = settings.timing()
    client = EtcdClient(access, patience_for(timing))
    registry = EtcdRegistry(client, f"{PREFIX}{settings.fleet}/")
    one = OneOfSeveral(
        registry,
        checked_advertised(settings.advertise or address),
        hub.directory,
        hub.perform,
        hub.all_said,
        hub.expected.look_again,
        hub.now_s,
        timing,
    )
    hub.standing = one
    running: asyncio.Task[None] | None = None
    try:
        try:
            await client.statuses()
        except EtcdUnreachableError as error:
            get_logger("restow.brokers").warning("etcd is not there yet", why=error.message)
        running = asyncio.create_task(one.membership.run())
        yield one
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await client.close()


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
