"""Where Kubernetes' API is, and how it knows us: as a pod with a service account is told."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from restow.broker.kubernetes.errors import KubernetesSettingsError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its service account's files."""


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """An API server, and the files of a service account, which Kubernetes renews."""

    url: str
    """``https://HOST:PORT``."""
    token: Path
    ca: Path

    @classmethod
    def of_pod(cls, environ: Mapping[str, str], account: Path | None = None) -> KubernetesAccess:
        """What a pod is told. Raises `KubernetesSettingsError` outside of one.

        >>> known = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "6443"}
        >>> KubernetesAccess.of_pod(known).url
        'https://[::1]:6443'
        """
        host, port = (environ.get(f"KUBERNETES_SERVICE_{one}", "") for one in ("HOST", "PORT"))
        if not host or not port:
            raise KubernetesSettingsError(
                "Leases are kept by the Kubernetes whose pod this is, and this is none "
                "(KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT say where its API is)"
            )
        folder = account or ACCOUNT
        named = f"[{host}]" if ":" in host else host
        return cls(f"https://{named}:{port}", folder / "token", folder / "ca.crt")

    def bearer(self) -> str:
        """The token as it is now. Raises `KubernetesSettingsError`."""
        try:
            token = self.token.read_text().strip()
        except (OSError, UnicodeDecodeError):
            token = ""
        if not token:
            raise KubernetesSettingsError(
                f"{self.token} can't be read, or is empty: give the pod its service account's "
                f"token (automountServiceAccountToken)",
                file=self.token,
            )
        return token

    def authorities(self) -> ssl.SSLContext:
        """What the API's certificate is checked by. Raises `KubernetesSettingsError`."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # also of one that is no certificate
            raise KubernetesSettingsError(
                f"{self.ca} can't be used to check Kubernetes' certificate: {error}", file=self.ca
            ) from None
        # From Python 3.13 on: authorities of many clusters lack what it asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context
