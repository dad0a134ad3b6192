"""The Helm chart: values for it, and what Helm renders of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"
CHART = DOCKER / "helm" / "restow"
HELM = shutil.which("helm", path=Path(sys.executable).parent)
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
Object = dict[str, Any]
TRUSTED: Object = {"insecure": True}
TOKENS: Object = {"tls": {"secretName": "t"}, "tokens": {"secretName": "k"}}
CERTIFICATES: Object = {"tls": {"secretName": "t", "clientCaSecretName": "c"}}
EVERYTHING: Object = TOKENS | {
    "image": {"digest": DIGEST, "tag": "left-out"},
    "operator": {"secretName": "o"},
    "settings": {
        "lease_s": 60,
        "digests": "sampled",
        "allow_narrowing": True,
        "trace_ratio": 0.5,
        "max_bytes": 1 << 33,
        "max_live": 1_000_000,
        "drain_s": 60,
        "http_hosts": "restow.example,restow",
    },
    "terminationGracePeriodSeconds": 90,
    "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_CERTIFICATE", "value": "/etc/more/ca.crt"}],
    "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/more", "readOnly": True}],
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
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
SEVERAL: Object = TRUSTED | {
    "replicas": 3,
    "etcd": {"endpoints": "etcd-0.etcd:2379,etcd-1.etcd:2379"},
}
LEASES: Object = TRUSTED | {"replicas": 3, "kubernetesLeases": {"enabled": True}}
GUARDED: Object = TOKENS | {
    "replicas": 3,
    "operator": {"secretName": "o"},
    "etcd": {
        "endpoints": "etcd.example:2379",
        "secretName": "e",
        "clientCertificate": True,
        "user": "restow",
    },
    "settings": {"fleet": "blue", "member_lease_s": 3},
}
"""Several brokers, and an etcd that asks who they are."""
needs_helm = pytest.mark.skipif(HELM is None, reason="Helm has no package for this machine")


def helm(*arguments: str | Path, values: Object) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run(
        [HELM, *arguments, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(values: Object, chart: Path = CHART) -> dict[str, Object]:
    """Render the chart; return its objects by kind, and further ones by kind and name."""
    found: dict[str, Object] = {}
    for one in yaml.safe_load_all(_template(json.dumps(values), chart)):
        if one:
            kind = one["kind"]
            found[f"{kind} {one['metadata']['name']}" if kind in found else kind] = one
    return found


@cache
def _template(values: str, chart: Path) -> str:
    done = helm("template", "here", chart, "--namespace", "serving", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def workload(objects: dict[str, Object]) -> Object:
    """Return the Deployment or StatefulSet that the pods belong to."""
    [one] = [objects[kind] for kind in ("Deployment", "StatefulSet") if kind in objects]
    return one


def container(objects: dict[str, Object]) -> Object:
    [one] = workload(objects)["spec"]["template"]["spec"]["containers"]
    found: Object = one
    return found


def options(objects: dict[str, Object]) -> dict[str, str]:
    """Return the options of `restow serve` with a value, as settings."""
    found = (one.removeprefix("--").partition("=") for one in container(objects)["args"])
    return {name.replace("-", "_"): value for name, sep, value in found if sep}


def environment(objects: dict[str, Object]) -> dict[str, str]:
    """Return the variables that have a literal value; `$(POD_NAME)` is left as it is."""
    return {one["name"]: one["value"] for one in container(objects)["env"] if "value" in one}


def notes(values: Object, folder: Path) -> str:
    """Return what Helm says after an installation, which it does not render without a cluster."""
    copied = folder / "chart"
    shutil.copytree(CHART, copied)
    said = (copied / "templates" / "NOTES.txt").read_text()
    (copied / "templates" / "notes.yaml").write_text(
        f'{{{{- define "notes" }}}}{said}{{{{ end -}}}}\nkind: Notes\n'
        'said: {{ include "notes" . | toJson }}\n'
    )
    told: str = rendered(values, copied)["Notes"]["said"]
    return told
