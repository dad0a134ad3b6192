"""The pods of vLLM in docker/kubernetes: after Kubernetes' schemas, and after what Restow reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from broker.token_house import served
from cli.broker_process import serving
from deployment.chart import CHART, TRUSTED, helm, needs_helm
from forked.ports import free_port
from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.client import AdminClient, Credentials

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
FILES = ("engines.yaml", "one-host.yaml", "network.yaml", "router.yaml")
KUBERNETES = ("1.25", "1.37")
"""The oldest, which lacks what came later, and the newest, which lacks what was removed."""
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)
Object = dict[str, Any]


def objects(*files: str) -> list[Object]:
    return [one for file in files for one in yaml.safe_load_all((FOLDER / file).read_text()) if one]


def of_kind(kind: str, *files: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects(*files) if one["kind"] == kind}


def engines(*files: str) -> list[tuple[Object, Object]]:
    """Return each container of vLLM, with its StatefulSet."""
    return [
        (one, container)
        for one in of_kind("StatefulSet", *files).values()
        for container in one["spec"]["template"]["spec"]["containers"]
    ]


def transfer_config(container: Object) -> Object:
    told: Object = json.loads(
        container["args"][container["args"].index("--kv-transfer-config") + 1]
    )
    return told


def option(container: Object, name: str) -> int:
    [found] = [one for one in container["args"] if one.startswith(f"--{name}=")]
    return int(found.partition("=")[2])


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_objects_are_after_kubernetes_schemas(kubernetes: str) -> None:
    for one in objects(*FILES):
        kubernetes_validate.validate(one, kubernetes, strict=True)


def test_an_object_that_is_wrong_is_seen() -> None:
    [policy] = of_kind("NetworkPolicy", *FILES).values()
    policy["spec"]["ingres"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(policy, KUBERNETES[-1], strict=True)


def test_autoscalers_ask_for_a_metric_that_the_broker_has() -> None:
    scaled = {one["kind"]: one for one in objects("autoscaling.yaml")}
    known = of_kind("StatefulSet", "engines.yaml")
    for one in scaled.values():
        assert one["spec"]["scaleTargetRef"]["name"] in known
    kubernetes_validate.validate(scaled["HorizontalPodAutoscaler"], KUBERNETES[-1], strict=True)
    [trigger] = scaled["ScaledObject"]["spec"]["triggers"]
    page = (FOLDER.parents[1] / "docs" / "operators.md").read_text()
    assert trigger["metadata"]["query"] == 'sum(restow_handoffs{state="READY"})'
    assert "| `restow_handoffs` | gauge | `state` |" in page


@pytest.mark.parametrize("file", FILES)
def test_objects_fit_each_other(file: str) -> None:
    sets = of_kind("StatefulSet", file) | of_kind("Deployment", file)
    for name, service in of_kind("Service", file).items():
        pod = sets[name]["spec"]["template"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert sets[name]["spec"].get("serviceName", name) == name
        for port in service["spec"]["ports"]:
            there = [two for one in pod["spec"]["containers"] for two in one["ports"]]
            assert {"name": port["targetPort"], "containerPort": port["port"]} in there
    for one in sets.values():
        pod, labels = one["spec"]["template"], one["spec"]["selector"]["matchLabels"]
        assert labels.items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["enableServiceLinks"]
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_engines_are_reached_by_each_other_and_by_the_router_alone() -> None:
    [policy] = of_kind("NetworkPolicy", "network.yaml").values()
    [router] = of_kind("Deployment", *FILES).values()
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    for one, container in engines(*FILES):
        assert chosen.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        [others, prompts] = policy["spec"]["ingress"]
        assert others == {"from": [{"podSelector": {"matchLabels": chosen}}]}
        asks = prompts["from"][0]["podSelector"]["matchLabels"]
        assert asks.items() <= router["spec"]["template"]["metadata"]["labels"].items()
        assert container["ports"][0]["containerPort"] in [rule["port"] for rule in prompts["ports"]]


@pytest.mark.parametrize("file", ["engines.yaml", "one-host.yaml"])
def test_the_commands_that_make_engines_guard_them(file: str) -> None:
    commands = [line for line in (FOLDER / file).read_text().splitlines() if " apply " in line]
    [command] = [line for line in commands if f"/{file}" in line]
    assert "docker/kubernetes/network.yaml" in command


def test_what_an_engine_is_told_is_what_the_connector_reads() -> None:
    named = []
    for one, container in engines(*FILES):
        told = transfer_config(container)
        ConnectorSettings.of(told.get("kv_connector_extra_config", {}))
        module = import_module(told["kv_connector_module_path"].partition(":")[0])
        assert Path(str(module.__file__)).with_name("connector.py").exists()
        assert told["kv_role"] == (
            "kv_producer" if "prefill" in f"{one['metadata']['name']} {container['name']}"
            else "kv_consumer"
        )  # fmt: skip
        assert "$(POD_NAME)" in told["engine_id"]
        [name] = [pair for pair in container["env"] if pair["name"] == "POD_NAME"]
        assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        for replica in range(one["spec"]["replicas"]):
            pod = f"{one['metadata']['name']}-{replica}"
            named.append(told["engine_id"].replace("$(POD_NAME)", pod))
    assert len(named) == len(set(named)) == 6
    assert {"vllm-prefill-1", "vllm-decode-0", "vllm-pair-0-decode"} < set(named)


def test_an_engine_has_gpus_memory_and_time_to_end() -> None:
    for one, container in engines(*FILES):
        pod = one["spec"]["template"]["spec"]
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert int(gpus) == option(container, "tensor-parallel-size")
        assert option(container, "shutdown-timeout") < pod["terminationGracePeriodSeconds"]
        [shared] = [mount for mount in container["volumeMounts"] if mount["name"] == "shm"]
        assert shared["mountPath"] == "/dev/shm"  # noqa: S108
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert asked == {"path": "/health", "port": option(container, "port")}
            assert {"containerPort": asked["port"]}.items() <= container["ports"][0].items()
        slowest = container["startupProbe"]
        assert slowest["periodSeconds"] * slowest["failureThreshold"] >= 1800


def test_engines_that_read_each_other_share_user_and_process_ids() -> None:
    [(one, prefill), (_, decode)] = engines("one-host.yaml")
    assert one["spec"]["template"]["spec"]["shareProcessNamespace"]
    for container in (prefill, decode):
        assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"]
        assert "runAsUser" not in container["securityContext"]
    for _, container in engines("engines.yaml"):
        assert "add" not in container["securityContext"]["capabilities"]


@needs_helm
def test_a_broker_lets_the_pods_in(tmp_path: Path) -> None:
    # The pods use the files of the Secret and the variables that all pods have.
    folders = {"restow-engine": tmp_path}
    with served(tmp_path) as broker:
        assert broker.known.tls_ca is not None
        (tmp_path / "ca.crt").write_bytes(broker.known.tls_ca.read_bytes())
        for one, container in engines(*FILES):
            [volume] = [
                volume
                for volume in one["spec"]["template"]["spec"]["volumes"]
                if volume["name"] == "restow"
            ]
            [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "restow"]
            folder = str(folders[volume["secret"]["secretName"]])
            told = {
                pair["name"]: pair["value"].replace(mount["mountPath"], folder)
                for pair in container["env"]
                if "value" in pair
            }
            assert told["RESTOW_BROKER"] == address_by_the_chart()
            with AdminClient(
                broker.address,
                credentials=Credentials.of(
                    told["RESTOW_TLS_CA"], "", "", told["RESTOW_TOKEN_FILE"]
                ),
            ) as client:
                assert client.status().engines == 0


def address_by_the_chart() -> str:
    """Return the broker's address, as the page installs it."""
    done = helm("template", "restow", CHART, "--namespace", "serving", values=TRUSTED)
    [service] = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Service"]
    return f"{service['metadata']['name']}.serving:{service['spec']['ports'][0]['port']}"


def test_the_router_knows_every_engine_and_is_there_when_its_probes_say_so() -> None:
    [router] = of_kind("Deployment", *FILES).values()
    [container] = router["spec"]["template"]["spec"]["containers"]
    for side in ("prefill", "decode"):
        [one] = [found for found, _ in engines("engines.yaml") if side in found["metadata"]["name"]]
        told = [
            value.partition("=")[2] for value in container["args"] if value.startswith(f"--{side}=")
        ]
        name = one["metadata"]["name"]
        assert told == [
            f"http://{name}-{replica}.{name}:8000" for replica in range(one["spec"]["replicas"])
        ]
    port = free_port()
    arguments = [value.replace("0.0.0.0:8000", f"127.0.0.1:{port}") for value in container["args"]]
    with serving(*container["command"][1:], *arguments) as stdout:
        stdout.readline()
        with pytest.raises(urllib.error.HTTPError) as refused:  # no engine is here
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)
        assert refused.value.code == 502


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this machine")
def test_hadolint_finds_nothing_in_the_image() -> None:
    assert HADOLINT is not None
    found = subprocess.run([HADOLINT, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
