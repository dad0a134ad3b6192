"""Settings: a file and the environment say all that options say; what is misspelt is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.broker_process import broker_process, run_restow
from cli.typed import printed
from restow.broker.cli.main import app
from restow.broker.cli.settings.settings_file import COMMANDS, OF_CLIENTS, OF_SCRIPTS, PREFIX
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.server.base.settings import BrokerSettings

ROOT = Path(__file__).resolve().parents[2]
GROUP: Any = typer.main.get_command(app)
PARAMS = {
    name: GROUP.commands[name].get_params(typer.Context(GROUP.commands[name])) for name in COMMANDS
}
OPTIONS = {name: {one.name for one in params} - {"help"} for name, params in PARAMS.items()}
KNOWN = {PREFIX + one.upper() for names in OPTIONS.values() for one in names} | OF_CLIENTS


def written(folder: Path, text: str) -> str:
    path = folder / "restow.toml"
    path.write_text(text)
    return str(path)


def refused(*arguments: str, env: dict[str, str] | None = None) -> str:
    outcome = run_restow(*arguments, env=env)
    assert outcome.returncode in (1, 2), outcome
    assert "Traceback" not in outcome.stderr
    return " ".join(re.sub("[│╭╮╰╯─]", " ", outcome.stderr).split())


def test_a_broker_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(
        tmp_path,
        'log_format = "json"\ninsecure = true\nmax_live = 7\nlease_s = 600.5\nstrategy = "pack"\n'
        "status_page = false\ntenant_max_live = 5\ngrant_s = 500\ndigests = 'sampled'\n",
    )
    too_long = {"RESTOW_LEASE_S": "601"}  # goes before the file's
    words = "lease_s: Input should be less than or equal to 600"
    assert words in refused("serve", "--config", file, env=too_long)
    monkeypatch.setenv("RESTOW_LEASE_S", "60")
    with broker_process("--listen", "0.0.0.0:0", "--config", file) as address:
        assert address.startswith("0.0.0.0:")
    monkeypatch.setenv("RESTOW_CONFIG", file)
    with broker_process("--listen", "0.0.0.0:0", "--lease-s", "5"):
        pass


def test_plaintext_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTOW_INSECURE", "true")
    monkeypatch.setenv("RESTOW_LOG_FORMAT", "json")
    with broker_process("--listen", "0.0.0.0:0"):
        pass


def test_an_agent_of_a_file(tmp_path: Path) -> None:
    file = written(tmp_path, f'socket = "{tmp_path}"\nread_threads = 0\n')
    assert "read_threads" in refused("agent", "--config", file).replace("-", "_")
    file = written(tmp_path, f'socket = "{tmp_path}"\nread_threads = 1\nhost_reads = false\n')
    assert "is not a socket" in refused("agent", "--config", file)
    assert "is not a socket" in refused("agent", env={"RESTOW_SOCKET": str(tmp_path)})


def test_digests_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BrokerSettings().content_digests() == Digests(DigestMode.OFF, 64)
    monkeypatch.setenv("RESTOW_DIGESTS", "sampled")
    monkeypatch.setenv("RESTOW_DIGEST_EVERY", "7")
    assert BrokerSettings().content_digests() == Digests(DigestMode.SAMPLED, 7)
    assert BrokerSettings(digests=DigestMode.ALL).content_digests().mode is DigestMode.ALL


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("serve", "LEASE", "is RESTOW_LEASE_S meant?"),
        ("serve", "TLS_CA_FILE", "is RESTOW_TLS_CA meant?"),
        ("agent", "READ_THREAD", "is RESTOW_READ_THREADS meant?"),
        ("agent", "FROBNICATE", "--help` name all"),
    ],
)
def test_a_misspelt_variable(command: str, name: str, words: str) -> None:
    told = refused(command, env={PREFIX + name: "5", "RESTOW_SOCKET": "/nowhere/x"})
    assert told.startswith(f"error: SETTING_UNKNOWN: {PREFIX}{name} in the environment")
    assert words in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lease-s = 5", "is lease_s meant?"),
        ("max_livee = 5", "is max_live meant?"),
        ("lease_s = [5]", "lease_s has one value"),
        ("lease_s = 'long'", "--lease-s"),
        ("lease_s =", "is no TOML"),
        ("config = 'other'", "config in "),
        (None, "can't be read: No such file"),
    ],
)
def test_a_file_that_says_nothing_sensible(tmp_path: Path, text: str | None, words: str) -> None:
    file = "/nowhere/restow.toml" if text is None else written(tmp_path, text)
    assert words in refused("serve", "--config", file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--listen", "127.0.0.1:99999"), "write 127.0.0.1:7350"),
        (("serve", "--listen", ":7350"), "0.0.0.0 all of it"),
        (("serve", "--http-listen", "127.0.0.1:99999"), "its port is no number of 0 to 65535"),
        (("serve", "--digests", "some"), "sampled"),
        (("serve", "--digests", "sampled", "--digest-every", "0"), "digest_every"),
        (
            ("agent", "--socket", "/nowhere/agent.sock"),
            "can't listen on socket /nowhere/agent.sock",
        ),
        (("agent", "--socket", f"/tmp/{'x' * 120}"), "at most 107 bytes"),  # noqa: S108
        (("agent", "--socket", "s", "--broker", "broker.example"), "write broker.example:7350"),
    ],
)
def test_values_that_can_not_be_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_services_of_kubernetes_are_no_settings() -> None:
    links = {
        "RESTOW_SERVICE_HOST": "10.0.0.1",
        "RESTOW_PORT": "tcp://10.0.0.1:7350",
        "RESTOW_PORT_7350_TCP_ADDR": "10.0.0.1",
        "RESTOW_BROKER_SERVICE_PORT_GRPC": "7350",
        "RESTOW_SOCKET": "/nowhere/x",
    }
    assert "can't listen on socket" in refused("agent", env=links)


def test_every_variable_of_this_repository_is_known() -> None:
    # Else a broker that `run`, a test or a container starts could be refused for a variable.
    command = ["git", "grep", "-ohE", r"RESTOW_[A-Z][A-Z_]*[A-Z]", "--", ":!docs/*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    links = {"RESTOW_SERVICE_HOST", "RESTOW_PORT", "RESTOW_PORT_7350_TCP_ADDR"}
    links |= {"RESTOW_BROKER_SERVICE_PORT_GRPC", "RESTOW_TLS"}
    assert set(done.stdout.split()) - KNOWN - OF_SCRIPTS - links == set()
    assert set(done.stdout.split()) | {"RESTOW_" + "COMMIT"} >= OF_SCRIPTS


@pytest.mark.parametrize("command", COMMANDS)
def test_all_options_have_a_variable(command: str) -> None:
    """Check that each option names a variable, or, of `restow serve`, is named like a setting."""
    for one in PARAMS[command]:
        is_setting = command == "serve" and one.name in BrokerSettings.model_fields
        variable = PREFIX + str(one.name).upper()
        assert is_setting or one.name == "help" or one.envvar == variable, one.name


def test_every_option_has_a_group_and_its_variable() -> None:
    groups: dict[str, set[str]] = {}
    for line in printed("serve", "--help", columns=400).splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            names = groups.setdefault(title[1], set())
        elif option := re.match(r"│ +--([a-z-]+)", line):
            name = option[1].replace("-", "_")
            names.add(name)
            assert line.count("[env var: ") == (name != "help"), line
            assert name == "help" or f"[env var: RESTOW_{name.upper()}" in line, line
    assert groups.pop("Options") == {"config", "help"}
    assert set(BrokerSettings.model_fields) <= set().union(*groups.values())
    assert len(groups) == 7


def test_a_narrow_terminal_shows_all_of_it() -> None:
    narrow = printed("serve", "--help", columns=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow


def test_the_page_is_that_of_the_settings() -> None:
    command = [sys.executable, str(ROOT / "docs" / "settings.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "settings.md").read_text(), (
        "docs/settings.md is not what the settings say: python docs/settings.py > docs/settings.md"
    )
