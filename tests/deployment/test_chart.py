"""The Helm chart, rendered by Helm: objects after Kubernetes' schemas, which fit each other."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from deployment.chart import (
    CERTIFICATES,
    CHART,
    DIGEST,
    DOCKER,
    EVERYTHING,
    GUARDED,
    LEASES,
    SEVERAL,
    TOKENS,
    TRUSTED,
    Object,
    container,
    environment,
    helm,
    needs_helm,
    options,
    rendered,
    workload,
)
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.observe.web import PATHS

KUBERNETES = ("1.25", "1.37")
"""The oldest, which lacks what came later, and the newest, which lacks what was removed."""
CLIENTS = {"BROKER", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE"}
"""In the container's environment for `kubectl exec`, and no setting of the broker's."""
MADE = {"listen", "http_listen", "tls_cert", "tls_key", "client_ca", "tokens", "advertise", "etcd"}
MADE |= {"etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file"}
MADE |= {"kubernetes_leases", "kubernetes_account", "expect_brokers"}
MADE |= {"insecure", "log_format"}
"""Settings that the chart makes of other values."""
OPERATORS = ("ServiceMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator, of which Kubernetes' schemas know nothing."""
VALUES = [TRUSTED, TOKENS, CERTIFICATES, EVERYTHING, SEVERAL, GUARDED, LEASES]
pytestmark = needs_helm


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_objects_are_after_kubernetes_schemas(values: Object, kubernetes: str) -> None:
    objects = rendered(values)
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= objects.keys() or (
        values is not EVERYTHING
    )
    for one in objects.values():
        if one["kind"] not in OPERATORS:
            kubernetes_validate.validate(one, kubernetes, strict=True)
    more = 3 if values in (EVERYTHING, LEASES) else 1 if "replicas" in values else 0
    assert len(objects) == 5 + more


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
        (TRUSTED | {"replicas": 2}, "need a registry"),
        (TRUSTED | {"replicas": 0}, "replicas"),
        (TRUSTED | {"etcd": {"user": "restow"}}, "set etcd.endpoints"),
        (SEVERAL | {"etcd": {"endpoints": "e:2379", "user": "restow"}}, "need etcd.secretName"),
        (SEVERAL | {"etcd": {"endpoints": "e:2379", "clientCertificate": True}}, "plaintext"),
        (SEVERAL | {"settings": {"etcd": "e:2379"}}, "etcd"),
        (TOKENS | {"etcd": {"endpoints": "e:2379"}}, "set etcd.secretName"),
        (SEVERAL | {"kubernetesLeases": {"enabled": True}}, "exclude each other"),
        (TRUSTED | {"ports": {"grpc": 80, "http": 9464}}, "ports.grpc|/ports/grpc"),
        (TRUSTED | {"operator": {"secretName": "o"}}, "needs tls.secretName"),
        (TRUSTED | {"settings": {"drain_s": 26}}, "at least 5 more than settings.drain_s"),
        (TRUSTED | {"terminationGracePeriodSeconds": 14}, "at least 5 more than settings.drain_s"),
        (TRUSTED | {"settings": {"config": "/etc/more/restow.toml"}}, "extraVolumeMounts"),
        (TRUSTED | {"image": {"digest": "latest"}}, "image.digest|/image/digest"),
        (TRUSTED | {"extraEnv": [{"value": "1"}]}, "name"),
    ],
)
def test_what_can_not_be_meant_is_refused(values: Object, words: str) -> None:
    done = helm("template", "here", CHART, values=values)
    assert done.returncode != 0
    assert any(word in done.stderr for word in words.split("|")), done.stderr


@pytest.mark.parametrize("values", VALUES)
def test_the_broker_knows_its_settings(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(values)
    said = {
        name.removeprefix("RESTOW_").lower(): value
        for name, value in environment(objects).items()
        if name.startswith("RESTOW_") and name.removeprefix("RESTOW_") not in CLIENTS
    }
    assert said.keys() | options(objects).keys() <= BrokerSettings.model_fields.keys()
    for name, value in said.items():
        monkeypatch.setenv(f"RESTOW_{name.upper()}", value.replace("$(POD_NAME)", "here-restow-0"))
    settings = BrokerSettings(**options(objects))  # type: ignore[arg-type]
    for name, value in values.get("settings", {}).items():
        assert getattr(settings, name) == value


def test_the_chart_knows_all_settings_but_those_that_it_makes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["settings"]["properties"].keys()
    assert known == BrokerSettings.model_fields.keys() - MADE | {"config"}


def test_a_pod_has_time_to_end_whatever_its_settings_say() -> None:
    spec = workload(rendered(EVERYTHING))["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= EVERYTHING["settings"]["drain_s"] + 5
    assert rendered(TRUSTED | {"settings": {"drain_s": 25}})


def test_an_image_is_named_by_digest_or_tag() -> None:
    assert container(rendered(EVERYTHING))["image"] == f"restow-broker@{DIGEST}"
    named = container(rendered(TRUSTED))["image"]
    assert named == f"restow-broker:{version('restow')}"


def test_rules_and_dashboard_are_those_beside_the_chart() -> None:
    objects = rendered(EVERYTHING)
    alerts = yaml.safe_load((DOCKER / "prometheus" / "alerts.yaml").read_text())
    assert objects["PrometheusRule"]["spec"] == alerts
    [board] = objects["ConfigMap"]["data"].values()
    assert json.loads(board) == json.loads((DOCKER / "grafana" / "restow.json").read_text())
    assert objects["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    moved = {"enabled": True, "runbookPrefix": "https://docs.example/"}
    [group] = rendered(TRUSTED | {"prometheusRule": moved})["PrometheusRule"]["spec"]["groups"]
    for rule in group["rules"]:
        url = rule["annotations"]["runbook_url"]
        assert url == f"https://docs.example/runbook.md#{rule['alert'].lower()}"


def test_objects_fit_each_other() -> None:
    objects = rendered(EVERYTHING)
    pod = workload(objects)["spec"]["template"]
    for selector in (
        workload(objects)["spec"]["selector"]["matchLabels"],
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
    files = [*options(objects).values()]
    files += [value for value in environment(objects).values() if value.startswith("/")]
    assert len(files) == 6
    for file in files:
        assert str(Path(file).parent) in mounted.values()
    [alias] = pod["spec"]["hostAliases"]
    assert environment(objects)["RESTOW_BROKER"] == f"{alias['hostnames'][0]}:7000"
    assert pod["spec"]["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version("restow")
