"""The Helm chart, rendered by Helm: after Kubernetes' schemas, and a broker that really starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from forked.ports import free_port
from restow.broker.server.observe.web import PATHS
from restow.broker.server.settings import BrokerSettings

CHART = Path(__file__).resolve().parents[2] / "docker" / "helm" / "restow"
HELM = shutil.which("helm", path=Path(sys.executable).parent)
KUBERNETES = ("1.25", "1.29", "1.33", "1.37")
WORDS = {"RESTOW_BROKER"}
"""In the container's environment, and no setting of the broker's."""
TRUSTED = {"insecure": True}
TOKENS = {"tls": {"secretName": "t"}, "tokens": {"secretName": "k"}}
CERTIFICATES = {"tls": {"secretName": "t", "clientCaSecretName": "c"}}
EVERYTHING = TOKENS | {
    "settings": {"lease_s": 60, "digests": "sampled", "allow_narrowing": True, "trace_ratio": 0.5},
    "ports": {"grpc": 7000, "http": 7001},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"engines": "yes"}}}],
        "monitoring": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "imagePullSecrets": [{"name": "registry"}],
    "podLabels": {"team": "serving"},
    "podAnnotations": {"note": "yes"},
    "priorityClassName": "high",
    "nodeSelector": {"disk": "none"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
    "serviceAccount": {"annotations": {"role": "none"}},
}
pytestmark = pytest.mark.skipif(HELM is None, reason="Helm has no package for this machine")
Object = dict[str, Any]


def helm(*arguments: str | Path, values: Object) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run(
        [HELM, *arguments, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(values: Object) -> dict[str, Object]:
    """The objects, by kind."""
    done = helm("template", "here", CHART, "--namespace", "serving", values=values)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}


def container(objects: dict[str, Object]) -> Object:
    [one] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    found: Object = one
    return found


def environment(objects: dict[str, Object]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(objects)["env"]}


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", [TRUSTED, TOKENS, CERTIFICATES, EVERYTHING])
def test_objects_are_after_kubernetes_schemas(values: Object, kubernetes: str) -> None:
    objects = rendered(values)
    monitored = "ServiceMonitor" in objects
    assert monitored == (values is EVERYTHING)
    for kind, one in objects.items():
        if kind != "ServiceMonitor":  # the Prometheus operator's own
            kubernetes_validate.validate(one, kubernetes, strict=True)
    assert len(objects) == 5 + monitored


def test_lint() -> None:
    done = helm("lint", "--strict", CHART, values=TRUSTED)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "without TLS everybody"),
        (TOKENS | TRUSTED, "exclude each other"),
        ({"tls": {"secretName": "t"}}, "nobody says who the clients are"),
        (TRUSTED | {"tokens": {"secretName": "k"}}, "need TLS"),
        (CERTIFICATES | {"tokens": {"secretName": "k"}}, "exclude each other"),
        (TRUSTED | {"settings": {"listen": "0.0.0.0:1"}}, "listen"),
        (TRUSTED | {"settings": {"LEASE_S": 1}}, "LEASE_S"),
        (TRUSTED | {"settings": {"lease": 1}}, "lease"),
        (TRUSTED | {"replicas": 2}, "replicas"),
        (TRUSTED | {"ports": {"grpc": 80, "http": 9464}}, "ports.grpc|/ports/grpc"),
    ],
)
def test_what_can_not_be_meant_is_refused(values: Object, words: str) -> None:
    done = helm("template", "here", CHART, values=values)
    assert done.returncode != 0
    assert any(word in done.stderr for word in words.split("|")), done.stderr


@pytest.mark.parametrize("values", [TRUSTED, TOKENS, CERTIFICATES, EVERYTHING])
def test_the_broker_knows_its_settings(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    told = environment(rendered(values))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = BrokerSettings()
    for name in told.keys() - WORDS:
        assert name.removeprefix("RESTOW_").lower() in BrokerSettings.model_fields, name
    for name, value in values.get("settings", {}).items():
        assert getattr(settings, name) == value


def test_the_chart_knows_all_settings_but_those_that_it_makes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["settings"]["properties"].keys()
    made = {"listen", "http_listen", "tls_cert", "tls_key", "client_ca", "tokens"}
    assert known == BrokerSettings.model_fields.keys() - made


def test_objects_fit_each_other() -> None:
    objects = rendered(EVERYTHING)
    pod = objects["Deployment"]["spec"]["template"]
    for selector in (
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    ports = {one["name"]: one["containerPort"] for one in container(objects)["ports"]}
    assert ports == EVERYTHING["ports"]
    for one in objects["Service"]["spec"]["ports"]:
        assert ports[one["targetPort"]] == one["port"]
    allowed = [rule["ports"][0]["port"] for rule in objects["NetworkPolicy"]["spec"]["ingress"]]
    assert allowed == ["grpc", "http"]
    [endpoint] = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container(objects)[probe]["httpGet"]
        assert asked["port"] == "http"
        assert asked["path"] in PATHS
    mounted = {one["name"]: one["mountPath"] for one in container(objects)["volumeMounts"]}
    assert mounted.keys() == {one["name"] for one in pod["spec"]["volumes"]}
    told = environment(objects)
    for name in ("RESTOW_TLS_CERT", "RESTOW_TLS_KEY", "RESTOW_TOKENS"):
        assert str(Path(told[name]).parent) in mounted.values()
    assert pod["spec"]["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version("restow")


def test_the_container_serves() -> None:
    """Its arguments and environment, its probes and what `kubectl exec` runs, without a cluster."""
    objects = rendered(TRUSTED | {"ports": {"grpc": free_port(), "http": free_port()}})
    host = {name: value for name, value in os.environ.items() if not name.startswith("RESTOW_")}
    known = host | environment(objects)
    restow = Path(sys.executable).with_name("restow")
    with subprocess.Popen(
        [restow, *container(objects)["args"]], env=known, stdout=subprocess.PIPE, text=True
    ) as broker:
        assert broker.stdout is not None
        try:
            lines = [broker.stdout.readline(), broker.stdout.readline()]
            assert "listening on" in lines[0], lines
            http = container(objects)["ports"][1]["containerPort"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = container(objects)[probe]["httpGet"]["path"]
                with urllib.request.urlopen(f"http://127.0.0.1:{http}{path}", timeout=10) as answer:
                    assert answer.status == 200
            status = subprocess.run(
                [restow, "status", "--json"], env=known, capture_output=True, text=True, check=True
            )
            assert json.loads(status.stdout)["engines"] == 0
        finally:
            broker.send_signal(signal.SIGTERM)
            broker.communicate(timeout=30)
    assert broker.returncode == 0
