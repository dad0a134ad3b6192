"""The commands' options of trust: what is refused, with which exit status, and tokens made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.certificates import DOMAIN, Authority
from cli.broker_process import broker_process, run_restow
from cli.typed import document, failed, printed, reason_of, typed
from restow.broker.trust.identity import Identity, Right, Role
from restow.broker.trust.tokens import read_tokens


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def serve_options(authority: Authority) -> tuple[str, ...]:
    own = authority.issue(server=True)
    given = {"tls-cert": own.certificate, "tls-key": own.key, "client-ca": authority.path}
    return tuple(word for name, path in given.items() for word in (f"--{name}", str(path)))


def test_operators_over_tls_by_options_and_by_the_environment(authority: Authority) -> None:
    pair = authority.issue(f"{DOMAIN}/tenant/a/operator")
    files = {"tls-ca": authority.path, "tls-cert": pair.certificate, "tls-key": pair.key}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    known = {f"RESTOW_{name.upper().replace('-', '_')}": str(path) for name, path in files.items()}
    with broker_process(*serve_options(authority)) as address:
        where = ("--broker", address)
        for name in ("status", "engines", "agents", "handoffs", "costs"):
            printed(name, *where, *options)
            printed(name, *where, env=known)
        assert reason_of(typed("handoff", "h", *where, env=known)) == "HANDOFF_UNKNOWN"
        assert reason_of(typed("engines", "--tenant", "b", *where, *options)) == "FORBIDDEN"
        assert run_restow("status", *where).returncode == 3


def test_a_broker_of_the_environment(authority: Authority) -> None:
    own = authority.issue(server=True)
    environment = {
        "RESTOW_LISTEN": "127.0.0.1:0",
        "RESTOW_TLS_CERT": str(own.certificate),
        "RESTOW_TLS_KEY": str(own.key),
    }
    outcome = run_restow("serve", env=environment)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("error: TRUST_SETTINGS_INVALID: TLS alone admits everybody")
    outcome = run_restow("serve", env={**environment, "RESTOW_TOKENS": "/nowhere"})
    assert outcome.returncode == 1
    assert "TOKENS_FILE_INVALID: tokens file /nowhere: can't be read" in outcome.stderr


@pytest.mark.parametrize("command", [("status",), ("handoff", "h"), ("agent", "--socket", "s")])
def test_a_token_without_an_authority(command: tuple[str, ...]) -> None:
    outcome = failed(*command, "--token-file", "token")
    assert outcome.code == 1
    assert outcome.err.startswith("error: TOKEN_OVER_PLAINTEXT: token file token is given without")


# -- restow token ---------------------------------------------------------------------------------


def test_a_token_is_shown_once(tmp_path: Path) -> None:
    given = ("token", "--role", "engine", "--role", "agent", "--tenant", "a", "--engine", "*")
    made = document(*given)
    listed = tmp_path / "tokens.json"
    listed.write_text(json.dumps([made["entry"]]))
    assert read_tokens(listed).find(made["token"]) == Identity(
        "a", frozenset({Right(Role.ENGINE, "*"), Right(Role.AGENT, "*")})
    )
    assert made["token"] not in listed.read_text()
    secret, entry = printed(*given).splitlines()[1::2]
    listed.write_text(f"[{entry}]")
    assert read_tokens(listed).find(secret.strip()) is not None


def test_a_token_in_a_file_of_its_own(tmp_path: Path) -> None:
    path, listed = tmp_path / "token", tmp_path / "tokens.json"
    given = ("token", "--role", "operator", "--out", path)
    entry = printed(*given)
    secret = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in entry
    listed.write_text(f"[{entry}]")
    found = read_tokens(listed).find(secret)
    assert found is not None
    assert found.tenant is None
    assert list(document(*given[:-1], tmp_path / "other")) == ["entry"]
    outcome = failed(*given)
    assert (outcome.code, outcome.err.split(":")[1].strip()) == (1, "FILE_NOT_WRITABLE")
    assert path.read_text().strip() == secret


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--role", "owner"),
        ("--role", "engine", "--tenant", "a"),
        ("--role", "engine", "--engine", "*"),
        ("--role", "operator", "--engine", "*"),
        ("--role", "operator", "--tenant", "*"),
        ("--role", "operator", "--tenant", ""),
    ],
)
def test_tokens_that_are_not_made(arguments: tuple[str, ...]) -> None:
    outcome = failed("token", *arguments)
    assert outcome.code == 2
    assert "Usage: " in outcome.err
