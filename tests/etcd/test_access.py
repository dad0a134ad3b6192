"""Who an etcd lets in: by certificates, and by a user's password."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from broker.certificates import Authority
from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from restow.broker.errors import AddressInvalidError
from restow.broker.registry.etcd_access import (
    EtcdAccess,
    EtcdRefusedError,
    EtcdSettingsError,
    EtcdUnreachableError,
)
from restow.etcd import rpc_pb2

PASSWORD = "0-secret-1"  # noqa: S105 - of a test


class Secured:
    """One member that wants certificates and passwords."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.server = self.authority.issue(server=True)
        self.pair = self.authority.issue("spiffe://test/restow/broker")
        self.cluster: EtcdCluster

    def access(self, **more: Any) -> EtcdAccess:
        endpoint = self.cluster.endpoints if hasattr(self, "cluster") else ("127.0.0.1:1",)
        files = {"ca": self.authority.path, "cert": self.pair.certificate, "key": self.pair.key}
        return EtcdAccess(endpoint, **{**files, **more})

    def user(self, password: str = PASSWORD) -> EtcdAccess:
        path = self.folder / f"password-{len(password)}"
        path.write_text(f"{password}\n")
        return self.access(user="restow", password_file=path)

    @property
    def options(self) -> tuple[str, ...]:
        return (
            *("--cert-file", str(self.server.certificate), "--key-file", str(self.server.key)),
            *("--client-cert-auth", "--trusted-ca-file", str(self.authority.path)),
        )

    async def enable_passwords(self) -> None:
        """Turn passwords on as `etcdctl` does, by messages of the same form: two strings."""
        two = rpc_pb2.AuthenticateRequest
        channel = grpc.aio.secure_channel(
            self.cluster.endpoints[0], self.access().credentials().for_channel()
        )
        async with channel:
            for method, words in (
                ("UserAdd", two(name="root", password=PASSWORD)),
                ("RoleAdd", two(name="root")),
                ("UserGrantRole", two(name="root", password="root")),  # noqa: S106
                ("UserAdd", two(name="restow", password=PASSWORD)),
                ("UserGrantRole", two(name="restow", password="root")),  # noqa: S106
                ("UserAdd", two(name="nobody", password=PASSWORD)),
                ("AuthEnable", two()),
            ):
                call: Any = channel.unary_unary(f"/etcdserverpb.Auth/{method}")
                await call(words.SerializeToString())


@pytest_asyncio.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    scene = Secured(tmp_path_factory.mktemp("secured"))
    async with running_etcd(
        scene.folder, 1, options=scene.options, access=scene.access()
    ) as cluster:
        scene.cluster = cluster
        await scene.enable_passwords()
        yield scene


async def test_a_user_with_its_password_is_let_in(secured: Secured) -> None:
    async with client_of(secured.user()) as client:
        (status,) = await client.statuses()
        assert status.leads
        lease = (await client.grant(60)).ID
        await client.put(b"k", b"1", lease)
        assert await client.keep_alive(lease) >= 60


async def test_a_token_that_etcd_forgot_is_made_anew(secured: Secured) -> None:
    # etcd keeps tokens in its memory alone.
    async with client_of(secured.user()) as client:
        await client.put(b"k", b"1")
        (member,) = secured.cluster.members
        member.kill()
        secured.cluster.start()
        await client.put(b"k", b"2")
        lease = (await client.grant(60)).ID
        assert await client.keep_alive(lease) >= 60


async def test_who_is_not_known_is_told_so(secured: Secured) -> None:
    for access, words in (
        (secured.user("another"), "authentication failed"),
        (secured.access(), "refuses the call"),
        (replace(secured.user(), user="nobody"), "permission denied"),
    ):
        async with client_of(access) as client:
            with pytest.raises(EtcdRefusedError, match=words) as refused:
                await client.put(b"k", b"")
            assert PASSWORD not in refused.value.message


async def test_tls_that_does_not_fit_is_told(
    secured: Secured, etcd: EtcdCluster, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    bare = EtcdAccess(secured.cluster.endpoints)
    for access, words in (
        (bare, "it speaks TLS, and was asked in plaintext"),
        (EtcdAccess(etcd.endpoints, ca=other.path), "it speaks no TLS"),
        (secured.access(ca=other.path), "its certificate is not accepted here"),
        (secured.access(cert=None, key=None), "does it accept a certificate of ours"),
    ):
        async with client_of(access) as client:
            with pytest.raises(EtcdUnreachableError, match=words):
                await client.statuses()


async def test_certificates_that_were_renewed_are_used(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("spiffe://test/restow/broker")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(stranger.certificate.read_bytes())
    key.write_bytes(stranger.key.read_bytes())
    access = replace(secured.user(), cert=cert, key=key)
    async with client_of(access) as client:
        with pytest.raises(EtcdUnreachableError):
            await client.statuses()
        cert.write_bytes(secured.pair.certificate.read_bytes())
        key.write_bytes(secured.pair.key.read_bytes())
        assert await client.statuses()


async def test_a_call_under_way_outlives_the_renewal_of_certificates(
    secured: Secured, tmp_path: Path
) -> None:
    # gRPC cancels the call with its channel; the client makes the call again on the new channel.
    cert = tmp_path / "cert.pem"
    cert.write_bytes(secured.pair.certificate.read_bytes())
    (member,) = secured.cluster.members
    async with client_of(replace(secured.user(), cert=cert)) as client:
        await client.put(b"k", b"1")
        member.stop()
        under_way = asyncio.create_task(client.put(b"k", b"2"))
        await asyncio.sleep(0)
        cert.write_bytes(secured.pair.certificate.read_bytes())
        with_new_ones = asyncio.create_task(client.put(b"l", b""))
        await asyncio.sleep(0)
        member.go_on()
        await under_way
        await with_new_ones


def test_settings_that_make_no_sense_together(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for settings, words in (
        ({"cert": file}, "both or not at all"),
        ({"cert": file, "key": file}, "--etcd-ca"),
        ({"user": "restow"}, "both or not at all"),
        ({"user": "restow", "password_file": file}, "plaintext"),
    ):
        with pytest.raises(EtcdSettingsError, match=words):
            EtcdAccess.parse("a:2379", **settings)
    with pytest.raises(EtcdSettingsError, match="no etcd"):
        EtcdAccess.parse(" , ")
    for address in ("http://a:2379", "a", "a:0"):
        with pytest.raises(AddressInvalidError):
            EtcdAccess.parse(f"b:2379,{address}")


def test_a_password_comes_from_a_file_that_only_we_write(tmp_path: Path) -> None:
    file = tmp_path / "password"
    access = EtcdAccess.parse("a:2379", ca=file, user="restow", password_file=file)
    with pytest.raises(EtcdSettingsError, match="can't be read"):
        access.password()
    file.write_text("\n")
    with pytest.raises(EtcdSettingsError, match="nothing in its first line"):
        access.password()
    file.write_text("secret\n")
    assert access.password() == "secret"
    file.chmod(0o666)
    with pytest.raises(EtcdSettingsError, match="every user of this host"):
        access.password()
