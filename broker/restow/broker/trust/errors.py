"""What is refused because of who asks, or of the files that should prove it.

No message holds a secret, nor anything that a file of secrets holds.
"""

from __future__ import annotations

from restow.broker.errors import RestowError


class UnauthenticatedError(RestowError):
    """A call by nobody who is known."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class ForbiddenError(RestowError):
    """A call by somebody who may not make it."""

    status = "PERMISSION_DENIED"
    reason = "FORBIDDEN"


class TrustError(RestowError):
    """Base of what is wrong with settings and files, on the side that has them."""

    status = "FAILED_PRECONDITION"
    reason = "TRUST_INVALID"


class TrustSettingsError(TrustError):
    """Settings of TLS, certificates and tokens that do not go together."""

    reason = "TRUST_SETTINGS_INVALID"


class KeyFileError(TrustError):
    """A certificate, key or authority that can't be read or used."""

    reason = "KEY_FILE_INVALID"


class TokenFileError(TrustError):
    """A client's token that can't be read or used."""

    reason = "TOKEN_FILE_INVALID"


class TokensFileError(TrustError):
    """The broker's list of tokens can't be read or used."""

    reason = "TOKENS_FILE_INVALID"


class TokenOverPlaintextError(TrustError):
    """A token would be sent where everybody on the way could read it."""

    reason = "TOKEN_OVER_PLAINTEXT"
