"""The chart's container as a process: a broker that starts, and what NOTES says of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.certificates import Authority
from broker.token_house import house
from cli.broker_process import run_restow, serving
from deployment.chart import (
    CERTIFICATES,
    TOKENS,
    TRUSTED,
    Object,
    container,
    environment,
    needs_helm,
    notes,
    rendered,
)
from forked.ports import free_port

HOST = "here-restow.serving"
EXEC = "kubectl -n serving exec deploy/here-restow -- restow "
OPERATOR = {"operator": {"secretName": "o"}}
pytestmark = needs_helm


def secrets(values: Object, folder: Path) -> None:
    """Write the files of the Secrets where the container has them, and those of an operator."""
    if values.get("insecure"):
        return
    settings, known = house(folder)
    assert known.tls_ca is not None
    assert known.token_file is not None
    files = {"tls/tls.crt": settings["tls_cert"], "tls/tls.key": settings["tls_key"]}
    files |= {"operator/ca.crt": known.tls_ca, "ca.crt": known.tls_ca}
    if "tokens" in values:
        files |= {"tokens/tokens.json": settings["tokens"]}
        files |= {"operator/token": known.token_file, "operator.token": known.token_file}
    else:
        clients = Authority(folder, "clients")
        own = clients.issue("spiffe://example/restow/operator")
        files |= {"clients/ca.crt": clients.path}
        files |= {"operator/tls.crt": own.certificate, "operator/tls.key": own.key}
        files |= {"operator.crt": own.certificate, "operator.key": own.key}
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(file.read_bytes())
        (folder / name).chmod(0o440)


@contextlib.contextmanager
def running(objects: dict[str, Object], folder: Path) -> Iterator[dict[str, str]]:
    """Run the container's process until SIGTERM; yield the environment of `kubectl exec`."""
    known = {name: one for name, one in os.environ.items() if not name.startswith("RESTOW_")}
    for name, value in environment(objects).items():
        # The pod has this name among its host aliases, and its files below /etc.
        known[name] = value.replace(HOST, "127.0.0.1").replace("/etc/restow", str(folder))
    arguments = [one.replace("/etc/restow", str(folder)) for one in container(objects)["args"]]
    with serving(*arguments, env=known) as stdout:
        assert "listening on" in stdout.readline()
        assert "metrics" in stdout.readline()
        yield known


@pytest.mark.parametrize(
    "values",
    [TRUSTED, TOKENS, CERTIFICATES, TOKENS | OPERATOR, CERTIFICATES | OPERATOR],
    ids=["trusted", "tokens", "certificates", "tokens-exec", "certificates-exec"],
)
def test_the_container_serves_and_notes_say_how_to_ask_it(values: Object, tmp_path: Path) -> None:
    values = values | {"ports": {"grpc": free_port(), "http": free_port()}}
    objects = rendered(values)
    secrets(values, tmp_path)
    told = [line.strip() for line in notes(values, tmp_path).splitlines()]
    within = [line.removeprefix(EXEC) for line in told if line.startswith(EXEC)]
    without = [line.removeprefix("restow ") for line in told if line.startswith("restow ")]
    assert bool(within) == ("operator" in values or "insecure" in values)
    assert bool(without) != bool(within)
    with running(objects, tmp_path) as known:
        http = values["ports"]["http"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container(objects)[probe]["httpGet"]["path"]
            with urllib.request.urlopen(f"http://127.0.0.1:{http}{path}", timeout=10) as answer:
                assert answer.status == 200
        assert f"curl http://127.0.0.1:{http}/metrics" in told
        host = {name: one for name, one in known.items() if not name.startswith("RESTOW_")}
        with contextlib.chdir(tmp_path):
            for line in (*within, *without):
                words = shlex.split(line.replace(HOST, "127.0.0.1"))
                done = run_restow(*words, "--json", env=known if within else host)
                assert done.returncode == 0, done.stdout + done.stderr
                if line.startswith("status"):
                    assert json.loads(done.stdout)["engines"] == 0
