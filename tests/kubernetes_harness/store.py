"""Lease objects as an API server of Kubernetes keeps them: versions and preconditions.

After the API's documentation (API concepts, API conventions, the reference of Lease), and, where
that is silent, after its source: PUT makes a Lease that is not there unless it names a uid, and the
same again is no change.
"""

from __future__ import annotations

import copy
import uuid
from typing import Any

Object = dict[str, Any]


class Refused(Exception):
    """A `Status`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class Leases:
    """Those of one namespace."""

    def __init__(self) -> None:
        self._version = 1000
        self._found: dict[str, Object] = {}

    def get(self, name: str) -> Object:
        if name not in self._found:
            raise Refused(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
        return copy.deepcopy(self._found[name])

    def listed(self, labels: dict[str, str]) -> Object:
        items = [copy.deepcopy(one) for one in self._found.values() if _has(one, labels)]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "LeaseList",
            "metadata": {"resourceVersion": str(self._version)},
            "items": items,
        }

    def create(self, made: Object) -> Object:
        name = made["metadata"]["name"]
        if name in self._found:
            words = f'leases.coordination.k8s.io "{name}" already exists'
            raise Refused(409, "AlreadyExists", words)
        if made["metadata"].get("resourceVersion"):
            raise Refused(400, "BadRequest", "resourceVersion should not be set on objects")
        made = copy.deepcopy(made)
        made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "serving"}
        return self._write(made)

    def replace(self, name: str, changed: Object) -> Object:
        known, metadata = self._found.get(name), changed["metadata"]
        if known is None:
            if metadata.get("uid"):
                words = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in ..."
                raise Refused(409, "Conflict", words)
            return self.create(changed)
        if metadata.get("uid", known["metadata"]["uid"]) != known["metadata"]["uid"]:
            raise Refused(409, "Conflict", "Precondition failed: UID in precondition")
        if not metadata.get("resourceVersion"):
            words = "metadata.resourceVersion: Invalid value: must be specified for an update"
            raise Refused(422, "Invalid", words)
        if metadata["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified; please apply your ...")
        if changed == known:
            return copy.deepcopy(known)
        return self._write(copy.deepcopy(changed))

    def delete(self, name: str, preconditions: dict[str, str]) -> Object:
        known = self.get(name)
        for one, wanted in preconditions.items():
            if known["metadata"][one] != wanted:
                raise Refused(409, "Conflict", f"the {one} in the precondition ({wanted}) ...")
        del self._found[name]
        self._version += 1
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _write(self, made: Object) -> Object:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        self._found[made["metadata"]["name"]] = made
        return copy.deepcopy(made)


def _has(found: Object, labels: dict[str, str]) -> bool:
    return labels.items() <= (found["metadata"].get("labels") or {}).items()
