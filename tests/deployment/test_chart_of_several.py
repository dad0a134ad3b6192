"""The chart with several brokers: names, evictions, nodes, and pods as processes at a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_harness.waiting import until
from deployment.chart import (
    GUARDED,
    LEASES,
    SEVERAL,
    TRUSTED,
    Object,
    container,
    environment,
    needs_helm,
    notes,
    options,
    rendered,
    workload,
)
from etcd_harness.cluster import running_etcd
from fleet.scene import pair
from forked.commands import begin
from forked.ports import free_port
from kubernetes_harness.server import running_api

PODS = [f"here-restow-{one}" for one in range(3)]
WITHIN_S = 60.0
pytestmark = needs_helm


def advertised(objects: dict[str, Object]) -> list[str]:
    """Return the address that each pod advertises."""
    said = environment(objects)["RESTOW_ADVERTISE"]
    return [said.replace("$(POD_NAME)", pod) for pod in PODS]


@pytest.mark.parametrize("values", [SEVERAL, GUARDED, LEASES])
def test_each_pod_is_reached_by_a_name_of_its_own(values: Object, tmp_path: Path) -> None:
    objects = rendered(values)
    brokers = objects["StatefulSet"]
    headless = objects["Service here-restow-brokers"]
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"]
    labels = brokers["spec"]["template"]["metadata"]["labels"]
    assert headless["spec"]["selector"].items() <= labels.items()
    assert brokers["spec"]["serviceName"] == headless["metadata"]["name"]
    assert brokers["metadata"]["name"] == "here-restow"
    [port] = headless["spec"]["ports"]
    names = [f"{pod}.{headless['metadata']['name']}.serving:{port['port']}" for pod in PODS]
    assert advertised(objects) == names
    assert f"RESTOW_BROKER={','.join(names)}" in notes(values, tmp_path).split()
    [pod_name] = [one for one in container(objects)["env"] if one["name"] == "POD_NAME"]
    assert pod_name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    # Kubernetes puts values into those that come later.
    order = [one["name"] for one in container(objects)["env"]]
    assert order.index("POD_NAME") < min(
        order.index(name) for name, value in environment(objects).items() if "$(POD_NAME)" in value
    )


def test_one_may_be_evicted_and_no_two_are_on_one_node() -> None:
    objects = rendered(SEVERAL)
    assert workload(objects)["spec"]["replicas"] == 3
    assert environment(objects)["RESTOW_EXPECT_BROKERS"] == "3"
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    pod = workload(objects)["spec"]["template"]
    [apart] = pod["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    own = SEVERAL | {"affinity": {"nodeAffinity": {}}}
    assert workload(rendered(own))["spec"]["template"]["spec"]["affinity"] == own["affinity"]
    two = SEVERAL | {"podDisruptionBudget": {"maxUnavailable": 2}}
    assert rendered(two)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 2


def test_one_broker_is_as_it_was() -> None:
    # One broker is a Deployment, which nobody may evict, and which knows of no others.
    objects = rendered(TRUSTED)
    assert "StatefulSet" not in objects
    assert workload(objects)["spec"]["replicas"] == 1
    assert workload(objects)["spec"]["strategy"] == {"type": "Recreate"}
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 0
    assert "affinity" not in workload(objects)["spec"]["template"]["spec"]
    others = {"RESTOW_ETCD", "RESTOW_KUBERNETES_LEASES", "RESTOW_ADVERTISE"}
    others |= {"RESTOW_EXPECT_BROKERS"}
    assert not environment(objects).keys() & others
    assert not objects.keys() & {"Role", "RoleBinding"}
    assert not workload(objects)["spec"]["template"]["spec"]["automountServiceAccountToken"]


def test_leases_are_asked_for_by_an_account_that_may_do_nothing_else() -> None:
    objects = rendered(LEASES)
    pod = workload(objects)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account
    assert environment(objects)["RESTOW_KUBERNETES_LEASES"] == "serving"
    binding = objects["RoleBinding"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": "serving"}
    ]
    assert binding["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    [rule] = objects["Role"]["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
    # What the server of the tests has been asked for, in Kubernetes' words for it.
    assert set(rule["verbs"]) == {"get", "list", "create", "update", "delete"}


def test_two_releases_are_two_fleets_unless_somebody_says_so() -> None:
    # Two releases of one name in one etcd would hand each other's engines to and fro.
    assert environment(rendered(SEVERAL))["RESTOW_FLEET"] == "serving.here-restow"
    assert environment(rendered(GUARDED))["RESTOW_FLEET"] == "blue"
    long = rendered(SEVERAL | {"fullnameOverride": f"{'a' * 54}-{'b' * 8}"})
    assert environment(long)["RESTOW_FLEET"] == f"serving.{'a' * 54}"


def test_files_for_etcd_are_mounted() -> None:
    objects = rendered(GUARDED)
    told = options(objects)
    files = [told[f"etcd_{one}"] for one in ("ca", "cert", "key", "password_file")]
    mounted = {one["name"]: one["mountPath"] for one in container(objects)["volumeMounts"]}
    assert {str(Path(file).parent) for file in files} == {mounted["etcd"]}
    volumes = workload(objects)["spec"]["template"]["spec"]["volumes"]
    [secret] = [one["secret"] for one in volumes if one["name"] == "etcd"]
    assert secret["secretName"] == "e"
    assert told["etcd_user"] == "restow"


def test_one_certificate_has_the_names_of_all(tmp_path: Path) -> None:
    # The names are those that NOTES asks for: a wildcard covers each pod's own.
    [line] = [
        line
        for line in notes(GUARDED, tmp_path).splitlines()
        if line.startswith("Their certificate")
    ]
    names = {word.strip(",.") for word in line.split() if ".serving" in word}
    wildcards = {f"*.{name.partition('.')[2]}" for name in advertised(rendered(GUARDED))}
    services = {"here-restow-brokers.serving", "here-restow.serving"}
    assert {name.rpartition(":")[0] for name in wildcards} | services == names


async def test_a_pod_is_ready_once_it_leads_or_stands_by_at_an_etcd(tmp_path: Path) -> None:
    async with running_etcd(tmp_path, 1, heartbeat_ms=50, election_ms=500) as etcd:
        values = SEVERAL | {"etcd": {"endpoints": ",".join(etcd.endpoints)}}
        async with pods(values, {}, tmp_path) as https:
            for one in etcd.members:
                one.stop()
            await until(lambda: not any(map(ready, https)), WITHIN_S)
            for one in etcd.members:
                one.go_on()


async def test_a_pod_is_ready_once_it_leads_or_stands_by_by_leases(tmp_path: Path) -> None:
    async with running_api(tmp_path) as server:
        account = {"RESTOW_KUBERNETES_ACCOUNT": str(server.account)}
        async with pods(LEASES, server.environ | account, tmp_path) as https:
            await server.hang()
            await until(lambda: not any(map(ready, https)), WITHIN_S)
            await server.go_on()
            await until(lambda: all(map(ready, https)), WITHIN_S)


@contextlib.asynccontextmanager
async def pods(values: Object, more: dict[str, str], folder: Path) -> AsyncIterator[list[int]]:
    """Run the pods until all are ready and a state was handed over; yield their HTTP ports."""
    ports = [(free_port(), free_port()) for _ in PODS]
    https = [http for _, http in ports]
    with contextlib.ExitStack() as stack:
        for pod, (grpc_port, http_port) in zip(PODS, ports, strict=True):
            objects = rendered(values | {"ports": {"grpc": grpc_port, "http": http_port}})
            known = {
                name: value.replace("$(POD_NAME).here-restow-brokers.serving", "127.0.0.1")
                for name, value in environment(objects).items()
            }
            log = folder / f"{pod}.log"
            stack.enter_context(process(container(objects)["args"], known | more, log))
        await until(lambda: all(map(ready, https)), WITHIN_S)
        async with pair(",".join(f"127.0.0.1:{port}" for port, _ in ports)) as both:
            assert (await both.hand_over()).done
        yield https
        # The server of Leases is on this loop, and brokers that leave ask it.
        await asyncio.to_thread(stack.close)


@contextlib.contextmanager
def process(arguments: list[str], known: dict[str, str], log: Path) -> Iterator[None]:
    """Run `restow` until SIGTERM, with a file that it writes to."""
    others = {name: one for name, one in os.environ.items() if not name.startswith("RESTOW_")}
    with log.open("wb") as out:
        started = begin(arguments, (0, out.fileno(), out.fileno()), others | known)
        try:
            yield
        finally:
            started.terminate()
            started.join(60)


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
