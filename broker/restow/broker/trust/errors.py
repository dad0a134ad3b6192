"""What is refused because of who asks, or of the files that should prove it.

No message holds a secret, nor anything that a file of secrets holds.
"""

from __future__ import annotations

import stat
from pathlib import Path

from restow.broker.errors import RestowError


class UnauthenticatedError(RestowError, status="UNAUTHENTICATED", reason="UNAUTHENTICATED"):
    """A call by nobody who is known."""


class ForbiddenError(RestowError, status="PERMISSION_DENIED", reason="FORBIDDEN"):
    """A call by somebody who may not make it."""


class TrustError(RestowError, status="FAILED_PRECONDITION", reason="TRUST_INVALID"):
    """Base of what is wrong with settings and files, on the side that has them."""


class TrustSettingsError(TrustError, reason="TRUST_SETTINGS_INVALID"):
    """Settings of TLS, certificates and tokens that do not go together."""


class KeyFileError(TrustError, reason="KEY_FILE_INVALID"):
    """A certificate, key or authority that can't be read or used."""


class TokenFileError(TrustError, reason="TOKEN_FILE_INVALID"):
    """A client's token that can't be read or used."""


class TokensFileError(TrustError, reason="TOKENS_FILE_INVALID"):
    """The broker's list of tokens can't be read or used."""


class TokenOverPlaintextError(TrustError, reason="TOKEN_OVER_PLAINTEXT"):
    """A token would be sent where everybody on the way could read it."""


READABLE = "every user of this host may read a secret"
READ_STEP = "chmod o-r FILE, and make the secret anew: others may have it"


def refuse_writable(what: str, path: Path, error: type[RestowError]) -> None:
    """Raise ``error`` if every user may write the file: then it proves nothing.

    What can't be looked at is told by whoever reads it.
    """
    if _mode(path) & stat.S_IWOTH:
        raise error(
            f"{what} {path} can be written by every user of this host, so it proves nothing: "
            f"`chmod o-w {path}`, and see whether it is still what you wrote",
            file=path,
        )


def is_readable_by_all(path: Path) -> bool:
    """Whether every user may read it."""
    return bool(_mode(path) & stat.S_IROTH)


def _mode(path: Path) -> int:
    try:
        found = path.stat().st_mode
    except OSError:
        return 0
    return found if stat.S_ISREG(found) else 0
