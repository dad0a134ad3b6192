"""Files of keys, authorities and tokens: refused at the start with a next step, followed later."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from broker.certificates import DOMAIN, P_AND_D, Authority, Pair
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine
from broker.guarded import channel_of, guarded, refusal, register
from restow.broker.client import AdminClient, Credentials
from restow.broker.errors import RestowError
from restow.broker.logs import TOLD
from restow.broker.trust.errors import KeyFileError, TrustError
from restow.broker.trust.key_files import end_of, read_authorities, read_key_pair

Damage = Callable[[Authority, dict[str, Path]], dict[str, Path | None]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def without(*names: str) -> Damage:
    return lambda authority, files: {**files, **dict.fromkeys(names)}


def with_tokens(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    return {**files, "tokens": written(files["tls_key"].with_name("tokens.json"), "[]")}


def foreign_key(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    return {**files, "tls_key": authority.issue(server=True).key}


def locked_key(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    own = authority.issue(server=True, password=b"secret")
    return {**files, "tls_cert": own.certificate, "tls_key": own.key}


def replaced(name: str, text: str | None) -> Damage:
    """Return a damage that puts another text in place of a file; None: the file is missing."""

    def damage(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
        path = files["tls_cert"].with_name("other")
        return {**files, name: path if text is None else written(path, text)}

    return damage


def no_folder(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    return {**files, "tls_key": files["tls_key"].parent}


def bad_tokens(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    path = written(files["tls_key"].with_name("tokens.json"), "{}")
    return {**files, "client_ca": None, "tokens": path}


def expired(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    own = authority.issue(server=True, lasts=-timedelta(hours=1))
    return {**files, "tls_cert": own.certificate, "tls_key": own.key}


def expired_authority(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    old = Authority(files["tls_key"].parent, "old", lasts=-timedelta(hours=1))
    return {**files, "client_ca": old.path}


def writable(name: str) -> Damage:
    """Return a damage that replaces a file with a copy that every user may write."""

    def damage(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
        copy = files["tls_key"].with_name("writable")
        shutil.copyfile(files[name], copy)
        copy.chmod(0o666)
        return {**files, name: copy}

    return damage


def writable_tokens(authority: Authority, files: dict[str, Path]) -> dict[str, Path | None]:
    path = written(files["tls_key"].with_name("tokens.json"), "[]")
    path.chmod(0o666)
    return {**files, "client_ca": None, "tokens": path}


SETTINGS, KEYS = "TRUST_SETTINGS_INVALID", "KEY_FILE_INVALID"


DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "no clients": (without("client_ca"), SETTINGS, "admits everybody: add --client-ca"),
    "both ways": (with_tokens, SETTINGS, "exclude each other"),
    "no key": (without("tls_key"), SETTINGS, "--tls-cert, --client-ca without both"),
    "no certificate": (without("tls_cert"), SETTINGS, "--tls-key, --client-ca without both"),
    "neither": (without("tls_cert", "tls_key"), SETTINGS, "--client-ca without both"),
    "foreign key": (foreign_key, KEYS, "is not that of certificate"),
    "locked key": (locked_key, KEYS, "without a password"),
    "certificate missing": (replaced("tls_cert", None), KEYS, "can't be read (No such file"),
    "key missing": (replaced("tls_key", None), KEYS, "can't be read (No such file"),
    "folder": (no_folder, KEYS, "can't be read (Is a directory)"),
    "certificate garbage": (replaced("tls_cert", "nonsense"), KEYS, "both PEM"),
    "key empty": (replaced("tls_key", ""), KEYS, "both PEM"),
    "authority missing": (replaced("client_ca", None), KEYS, "can't be read (No such file"),
    "authority garbage": (replaced("client_ca", "nonsense"), KEYS, "holds no certificate"),
    "tokens garbage": (
        bad_tokens,
        "TOKENS_FILE_INVALID",
        "is no JSON list; `restow token` prints entries",
    ),
    "expired": (expired, KEYS, "has expired: issue a new certificate"),
    "authority expired": (expired_authority, KEYS, "old.pem has expired"),
    "certificate writable": (writable("tls_cert"), KEYS, "chmod o-w"),
    "key writable": (writable("tls_key"), KEYS, "chmod o-w"),
    "authority writable": (writable("client_ca"), KEYS, "chmod o-w"),
    "tokens writable": (
        writable_tokens,
        "TOKENS_FILE_INVALID",
        "tokens.json can be written by every user",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_what_the_broker_does_not_start_with(authority: Authority, name: str) -> None:
    damage, reason, words = DAMAGES[name]
    given: dict[str, Any] = damage(authority, authority.server())
    with pytest.raises(TrustError) as caught:
        async with broker(**given):
            pass
    assert (caught.value.status, caught.value.reason) == ("FAILED_PRECONDITION", reason)
    assert words in caught.value.message


def test_a_key_is_not_shown(authority: Authority) -> None:
    own = authority.issue()
    pair = read_key_pair(own.certificate, own.key)
    secret = own.key.read_text().splitlines()[1]
    assert secret in pair.key.decode()
    assert secret not in repr(pair)


@pytest.mark.parametrize("use", ["SERVER_AUTH", "CLIENT_AUTH"])
def test_what_a_certificate_is_for_hides_no_end(authority: Authority, use: str) -> None:
    # OpenSSL names another fault first, and looks at the time last.
    purpose = getattr(ExtendedKeyUsageOID, use)
    good = authority.issue(use=purpose)
    assert end_of(good.certificate, good.key) is not None
    late = authority.issue(use=purpose, lasts=-timedelta(hours=1))
    with pytest.raises(KeyFileError, match="has expired"):
        read_key_pair(late.certificate, late.key)
    early = authority.issue(use=purpose, begins=timedelta(hours=1))
    with pytest.raises(KeyFileError, match="is not valid yet"):
        read_key_pair(early.certificate, early.key)


async def test_a_key_that_every_user_may_read_is_told(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    own = authority.issue(server=True)
    client = authority.client(*P_AND_D)
    assert client.tls_key is not None
    for path in (own.key, client.tls_key):
        path.chmod(0o604)
    async with (
        broker(**authority.server(own)) as running,
        engine(running.address, "e", credentials=client),
    ):
        pass
    lines = [vars(one)[TOLD] for one in caplog.records if one.name == "restow.trust"]
    told = [values["file"] for event, values in lines if "may read a secret" in event]
    assert told[0] == str(own.key)
    assert str(client.tls_key) in told


def test_several_authorities_in_one_file(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = Authority(tmp_path / "second")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.path.read_bytes() + second.path.read_bytes())
    assert read_authorities(both).count(b"BEGIN CERTIFICATE") == 2


# -- renewal --------------------------------------------------------------------------------------


def replace(old: Pair, new: Pair) -> None:
    """Put new files under the old names, as programs that renew certificates do."""
    for before, after in ((old.certificate, new.certificate), (old.key, new.key)):
        shutil.copy(after, after.with_suffix(".new"))
        after.with_suffix(".new").rename(before)


async def test_the_brokers_certificate_is_renewed_while_it_serves(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "later").mkdir()
    later, own = Authority(tmp_path / "later"), authority.issue(server=True)
    now_client, later_client = (
        authority.client(*P_AND_D, authority=trusted.path) for trusted in (authority, later)
    )
    async with (
        broker(**authority.server(own)) as running,
        engine(running.address, "p", credentials=now_client) as (p, agents),
    ):
        async with channel_of(running.address, later_client) as channel:
            assert (await refusal(register(channel)))[1] == "BROKER_UNREACHABLE"
        replace(own, later.issue(server=True))
        async with engine(running.address, "d", credentials=later_client) as (d, _):
            # Streams that were open stay open.
            p.publish("h", P_BLOCKS, POSITION)
            await agents[0].fence("h")
            assert (await d.request("h", D_BLOCKS)).done
        own.key.write_text("half written")
        async with channel_of(running.address, later_client) as channel:
            await register(channel)


async def test_a_clients_certificate_is_renewed_for_its_next_connection(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "later").mkdir()
    later, pair = Authority(tmp_path / "later"), authority.issue(*P_AND_D)
    credentials = Credentials(authority.path, pair.certificate, pair.key)
    known = tmp_path / "clients.pem"
    shutil.copy(authority.path, known)
    own = authority.issue(server=True)
    async with broker(**{**authority.server(own), "client_ca": known}) as first:
        address = first.address
        async with engine(address, "p", credentials=credentials) as (p, agents):
            # From now on other clients' certificates are good, and p has one of those.
            shutil.copy(later.path, known)
            replace(pair, later.issue(*P_AND_D))
            await agents[0].drop()
            await agents[0].connect()
            async with engine(address, "d", credentials=credentials) as (d, _):
                p.publish("h", P_BLOCKS, POSITION)
                await agents[0].fence("h")
                assert (await d.request("h", D_BLOCKS)).done


async def test_a_session_that_is_not_let_in_again_goes_on_asking(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = authority.issue(*P_AND_D)
    credentials = Credentials(authority.path, pair.certificate, pair.key)
    async with guarded(authority) as first:
        address = first.address
        async with engine(address, "p", credentials=credentials) as (p, agents):
            replace(pair, authority.issue(f"{DOMAIN}/tenant/a/operator"))
            warned = asyncio.Event()
            refused: list[str] = []

            def warning(words: str, **more: Any) -> None:
                refused.append(more.get("reason", words))
                warned.set()

            monkeypatch.setattr(p._stream._log, "warning", warning, raising=False)
            first.hub.close()
            while "FORBIDDEN" not in refused:
                warned.clear()
                await warned.wait()
            replace(pair, authority.issue(*P_AND_D))
            await agents[0].drop()
            waiting = p.publish("h", P_BLOCKS, POSITION)
            await agents[0].connect()
            p.cancel("h")
            assert (await waiting).state == "CANCELLED"


def test_an_operator_with_files_that_are_wrong(authority: Authority, tmp_path: Path) -> None:
    for credentials, reason in (
        (Credentials(tmp_path / "none"), "KEY_FILE_INVALID"),
        (Credentials(authority.path, token_file=tmp_path / "none"), "TOKEN_FILE_INVALID"),
    ):
        with pytest.raises(RestowError) as caught:
            AdminClient("127.0.0.1:1", credentials=credentials)
        assert caught.value.reason == reason
