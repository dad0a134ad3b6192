"""The commands' options of trust: what is refused, with which exit status, and tokens made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from broker.certificates import DOMAIN, Authority
from cli.broker_process import broker_process, run_restow
from restow.broker.cli.main import app
from restow.broker.client import BrokerCallError
from restow.broker.errors import HandoffUnknownError
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
    files = {"TLS_CA": authority.path, "TLS_CERT": pair.certificate, "TLS_KEY": pair.key}
    environment = {f"RESTOW_{name}": str(path) for name, path in files.items()}
    options = [
        word
        for name, path in files.items()
        for word in ("--" + name.lower().replace("_", "-"), str(path))
    ]
    with broker_process(*serve_options(authority)) as address:

        def call(*command: str, env: dict[str, str] | None = None) -> Result:
            return CliRunner(env=env).invoke(app, [*command, "--broker", address])

        for name in ("status", "engines", "agents", "handoffs", "costs"):
            for given, env in ((options, {}), ([], environment)):
                result = call(name, *given, env=env)
                assert result.exit_code == 0, result.output
        result = call("handoff", "h", env=environment)
        assert isinstance(result.exception, HandoffUnknownError)
        result = call("engines", "--tenant", "b", *options)
        assert isinstance(result.exception, BrokerCallError)
        assert result.exception.reason == "FORBIDDEN"
        assert run_restow("status", "--broker", address).returncode == 3


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tls-cert", "none.pem", "--tls-key", "none.key", "--tokens", "t"), "KEY_FILE_INVALID"),
        (("--tls-cert", "none.pem"), "TRUST_SETTINGS_INVALID"),
        (("--tokens", "none.json"), "TRUST_SETTINGS_INVALID"),
        (("--listen", "0.0.0.0:0", "--tls-cert", "none.pem"), "TRUST_SETTINGS_INVALID"),
    ],
)
def test_a_broker_that_would_prove_nothing(options: tuple[str, ...], reason: str) -> None:
    outcome = run_restow("serve", "--listen", "127.0.0.1:0", *options)
    assert outcome.returncode == 1
    assert outcome.stderr.startswith(f"error: {reason}: ")


def test_a_list_of_tokens_alone_opens_no_public_address(fail: Callable[..., Any]) -> None:
    outcome = fail("serve", "--listen", "0.0.0.0:0", "--tokens", "tokens.json")
    assert outcome.code == 2
    assert "plaintext" in outcome.err


@pytest.mark.parametrize("command", [("status",), ("handoff", "h"), ("agent", "--socket", "s")])
def test_a_token_without_an_authority(command: tuple[str, ...], fail: Callable[..., Any]) -> None:
    outcome = fail(*command, "--token-file", "token")
    assert outcome.code == 1
    assert outcome.err.startswith("error: TOKEN_OVER_PLAINTEXT: token file token is given without")


@pytest.mark.parametrize("command", [("status",), ("agent", "--socket", "s")])
def test_an_authority_that_is_not_there(command: tuple[str, ...]) -> None:
    outcome = run_restow(*command, "--tls-ca", "none.pem")
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("error: KEY_FILE_INVALID: authority none.pem can't be read")


# -- restow token ---------------------------------------------------------------------------------


def test_a_token_is_shown_once(run: Callable[..., str], tmp_path: Path) -> None:
    given = ("token", "--role", "engine", "--role", "agent", "--tenant", "a", "--engine", "*")
    made = json.loads(run(*given, "--json"))
    listed = tmp_path / "tokens.json"
    listed.write_text(json.dumps([made["entry"]]))
    assert read_tokens(listed).find(made["token"]) == Identity(
        "a", frozenset({Right(Role.ENGINE, "*"), Right(Role.AGENT, "*")})
    )
    assert made["token"] not in listed.read_text()
    secret, entry = run(*given).splitlines()[1::2]
    listed.write_text(f"[{entry}]")
    assert read_tokens(listed).find(secret.strip()) is not None


def test_a_token_in_a_file_of_its_own(
    run: Callable[..., str], fail: Callable[..., Any], tmp_path: Path
) -> None:
    path, listed = tmp_path / "token", tmp_path / "tokens.json"
    given = ("token", "--role", "operator", "--out", path)
    entry = run(*given)
    secret = path.read_text().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in entry
    listed.write_text(f"[{entry}]")
    found = read_tokens(listed).find(secret)
    assert found is not None
    assert found.tenant is None
    assert list(json.loads(run(*given[:-1], tmp_path / "other", "--json"))) == ["entry"]
    outcome = fail(*given)
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
def test_tokens_that_are_not_made(arguments: tuple[str, ...], fail: Callable[..., Any]) -> None:
    outcome = fail("token", *arguments)
    assert outcome.code == 2
    assert "Usage: " in outcome.err
