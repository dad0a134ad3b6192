"""What is refused because of who asks, or of the files that should prove it.

No message holds a secret, nor anything that a file of secrets holds.
"""

from __future__ import annotations

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
