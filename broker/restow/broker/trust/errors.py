"""Errors about callers' rights, and about the files that prove identities.

No message contains a secret, or any content of a file of secrets.
"""

from __future__ import annotations

import stat
from pathlib import Path

from restow.broker.errors import RestowError


class UnauthenticatedError(RestowError, status="UNAUTHENTICATED", reason="UNAUTHENTICATED"):
    """The caller has no known identity."""


class ForbiddenError(RestowError, status="PERMISSION_DENIED", reason="FORBIDDEN"):
    """The caller is known but may not make this call."""


class TrustError(RestowError, status="FAILED_PRECONDITION", reason="TRUST_INVALID"):
    """Base of errors about the reader's own settings and files."""


class TrustSettingsError(TrustError, reason="TRUST_SETTINGS_INVALID"):
    """Settings of TLS, certificates and tokens contradict each other."""


class KeyFileError(TrustError, reason="KEY_FILE_INVALID"):
    """A certificate, key or authority cannot be read or used."""


class TokenFileError(TrustError, reason="TOKEN_FILE_INVALID"):
    """A client's token cannot be read or used."""


class TokensFileError(TrustError, reason="TOKENS_FILE_INVALID"):
    """The broker's list of tokens cannot be read or used."""


class TokenOverPlaintextError(TrustError, reason="TOKEN_OVER_PLAINTEXT"):
    """A token would travel in plaintext, where others could read it."""


READABLE = "every user of this host may read a secret"
READ_STEP = "chmod o-r FILE, and replace the secret: others may have read it"


def refuse_writable(what: str, path: Path, error: type[RestowError]) -> None:
    """Raise ``error`` if every user may write the file, which therefore proves nothing.

    A missing file is ignored here; whoever reads it reports it.
    """
    if _mode(path) & stat.S_IWOTH:
        raise error(
            f"{what} {path} can be written by every user of this host, so it proves nothing: "
            f"`chmod o-w {path}`, and check that it is still what you wrote",
            file=path,
        )


def is_readable_by_all(path: Path) -> bool:
    """Return whether every user may read the file."""
    return bool(_mode(path) & stat.S_IROTH)


def _mode(path: Path) -> int:
    try:
        mode = path.stat().st_mode
    except OSError:
        return 0
    return mode if stat.S_ISREG(mode) else 0
