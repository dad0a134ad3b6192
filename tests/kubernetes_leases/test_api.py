"""Calls of the API: who is let in, what is answered late or never, changes that are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from broker.certificates import Authority
from kubernetes_harness.server import ApiServer, api_of
from kubernetes_leases.scene import FLEET
from restow.broker.kubernetes.api import LeasesApi
from restow.broker.kubernetes.registry import KubernetesRegistry
from restow.broker.owners.events import Seen
from restow.broker.registry.kubernetes_access import (
    KubernetesAccess,
    KubernetesError,
    KubernetesRefusedError,
    KubernetesSettingsError,
    KubernetesUnreachableError,
)
from restow.broker.server.fleet.membership import seconds_awake_or_not

X, Y = "x.example:7350", "y.example:7350"


@pytest.fixture
def registry(api: LeasesApi) -> KubernetesRegistry:
    return KubernetesRegistry(api, FLEET, seconds_awake_or_not)


@pytest_asyncio.fixture
async def hasty(server: ApiServer) -> AsyncIterator[KubernetesRegistry]:
    """It does not wait for long."""
    async with api_of(server, call_s=0.5) as api:
        yield KubernetesRegistry(api, FLEET, seconds_awake_or_not)


async def test_changes_that_were_forgotten_are_made_up_for_by_a_list(
    registry: KubernetesRegistry, server: ApiServer
) -> None:
    await registry.join(X, 60.0)
    watch = registry.watch()
    first = await anext(watch)
    server.leases.forget()
    await registry.join(Y, 60.0)
    server.leases.forget()
    told = await anext(watch)
    while not isinstance(told, Seen):  # the join, if that came in between
        told = await anext(watch)
    assert told.members == {X, Y}
    assert told.revision > first.revision
    await watch.aclose()


async def test_a_watch_that_says_nothing_is_begun_anew(
    registry: KubernetesRegistry, hasty: KubernetesRegistry, server: ApiServer
) -> None:
    watch = hasty.watch()
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await until(lambda: server.calls.count("WATCH") > 1)
    await registry.join(X, 60.0)
    assert (await waiting).members == {X: True}
    await watch.aclose()


async def test_an_api_that_does_not_answer_is_given_up_in_time(
    hasty: KubernetesRegistry, server: ApiServer
) -> None:
    await server.hang()
    with pytest.raises(KubernetesUnreachableError, match=r"does not answer within 0\.5 s"):
        await hasty.all()
    await server.go_on()
    await hasty.all()
    await server.stop()
    with pytest.raises(KubernetesUnreachableError, match="does not answer at https://127"):
        await hasty.all()
    with pytest.raises(KubernetesUnreachableError):
        await anext(hasty.watch())


async def test_who_may_not_is_told_what_it_needs(
    registry: KubernetesRegistry, server: ApiServer
) -> None:
    server.may.remove("POST")
    with pytest.raises(KubernetesRefusedError, match=r"make a Lease.*needs a Role that lets it"):
        await registry.join(X, 60.0)
    server.token = "another"  # noqa: S105 - of a test
    with pytest.raises(KubernetesRefusedError, match="401"):
        await registry.all()


async def test_a_token_that_was_renewed_is_shown(
    registry: KubernetesRegistry, server: ApiServer
) -> None:
    await registry.all()
    server.token = "a-newer-token"  # noqa: S105 - of a test
    (server.account / "token").write_text("a-newer-token\n")
    await registry.all()
    (server.account / "token").write_text("")
    with pytest.raises(KubernetesSettingsError, match="automountServiceAccountToken"):
        await registry.all()


async def test_a_server_of_another_authority_hears_no_token(
    registry: KubernetesRegistry, server: ApiServer, tmp_path: Path
) -> None:
    await registry.all()
    calls = len(server.calls)
    other = Authority(tmp_path, "other").path.read_bytes()
    (server.account / "ca.crt").write_bytes(other)
    with pytest.raises(KubernetesUnreachableError, match="certificate is not accepted by"):
        await registry.all()
    assert len(server.calls) == calls
    (server.account / "ca.crt").write_text("nothing")
    with pytest.raises(KubernetesSettingsError, match="can't be used to check"):
        await registry.all()


def test_outside_of_a_pod_there_is_none() -> None:
    with pytest.raises(KubernetesSettingsError, match="KUBERNETES_SERVICE_HOST"):
        KubernetesAccess.of_pod({})


@pytest.mark.parametrize("fleet", ["a.", "a-", "a..b", "a.-b"])
def test_fleets_that_no_lease_can_be_named_after_are_refused(fleet: str, api: LeasesApi) -> None:
    with pytest.raises(KubernetesSettingsError, match="can't be part of a Lease's name"):
        KubernetesRegistry(api, fleet, seconds_awake_or_not)


async def test_what_is_no_api_is_said(registry: KubernetesRegistry, server: ApiServer) -> None:
    server.leases.listed = lambda labels: "no list"  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(KubernetesError):
        await registry.all()
