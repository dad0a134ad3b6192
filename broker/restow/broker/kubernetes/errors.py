"""Why Kubernetes' API did not do what it was asked. No message holds a token."""

from __future__ import annotations

from restow.broker.errors import RestowError


class KubernetesError(RestowError, status="UNAVAILABLE", reason="KUBERNETES_FAILED"):
    """Base of all errors of calls to Kubernetes; by itself: the API's own words."""


class KubernetesUnreachableError(KubernetesError, reason="KUBERNETES_UNREACHABLE"):
    """No API server answers in time: what was asked may have been done, or be done yet."""


class KubernetesRefusedError(
    KubernetesError, status="PERMISSION_DENIED", reason="KUBERNETES_REFUSED"
):
    """The service account is not known there, or may not do what was asked."""


class ExistsError(KubernetesError, status="ALREADY_EXISTS", reason="KUBERNETES_EXISTS"):
    """There is an object of that name."""


class ConflictError(KubernetesError, status="ABORTED", reason="KUBERNETES_CONFLICT"):
    """The object is another one by now, or is not as it was."""


class NotThereError(KubernetesError, status="NOT_FOUND", reason="KUBERNETES_NOT_FOUND"):
    """There is no such object."""


class GoneError(KubernetesError, status="OUT_OF_RANGE", reason="KUBERNETES_GONE"):
    """Changes that the API has forgotten: list what there is now, and watch from there."""


class KubernetesSettingsError(
    RestowError, status="FAILED_PRECONDITION", reason="KUBERNETES_SETTINGS_INVALID"
):
    """A service account or names that can't be used."""


def typed_error(status: int, reason: str, message: str, asked: str) -> KubernetesError:
    """The error that an answer stands for: ``reason`` and ``message`` of its `Status` object."""
    if status in (401, 403):
        return KubernetesRefusedError(
            f"Kubernetes refuses to {asked} ({status}: {message}): the broker's service account "
            f"needs a Role that lets it get, list, watch, create, update and delete leases of "
            f"coordination.k8s.io there"
        )
    if status == 404:
        return NotThereError(f"Kubernetes has nothing to {asked} ({message})")
    if status == 409:
        kind = ExistsError if reason == "AlreadyExists" else ConflictError
        return kind(f"Kubernetes does not {asked} ({message})")
    if status == 410:
        return GoneError(f"Kubernetes has forgotten the changes ({message})")
    if status == 429 or status >= 500:
        return KubernetesUnreachableError(
            f"Kubernetes can't {asked} at the moment ({status}: {message})"
        )
    return KubernetesError(f"Kubernetes does not {asked} ({status}: {message})")
