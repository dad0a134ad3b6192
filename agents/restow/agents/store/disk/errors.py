"""Why a disk keeps no states, or lost some."""

from __future__ import annotations

from restow.broker.errors import RestowError


class DiskInUseError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_IN_USE"):
    """Another store has the folder."""


class DiskOtherError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_OTHER"):
    """The folder is of another model, layout or version, or no store's at all."""


class DiskUnusableError(RestowError, status="FAILED_PRECONDITION", reason="STORE_DISK_UNUSABLE"):
    """The folder can't be read or written."""


class RunLostError(RestowError, status="DATA_LOSS", reason="STORE_RUN_LOST"):
    """A state could not be written, or is not on the disk as it was written."""
