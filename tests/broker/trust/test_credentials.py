"""What a client is told to show: from arguments or the environment, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.fakes import model_layout
from restow.broker.client import AdminClient, BlockingSession, Credentials, EngineSession
from restow.broker.errors import RestowError
from restow.broker.trust.errors import TokenOverPlaintextError, TrustSettingsError

A, B, C, D = (Path(name) for name in "abcd")


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RESTOW_TLS_CA", "RESTOW_TLS_CERT", "RESTOW_TLS_KEY", "RESTOW_TOKEN_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert Credentials.of() == Credentials()
    for name in names:
        monkeypatch.setenv(name, "")
    assert Credentials.of() == Credentials()
    for name, value in zip(names, "abcd", strict=True):
        monkeypatch.setenv(name, value)
    assert Credentials.of() == Credentials(A, B, C, D)
    given = Credentials.of("x", token_file=Path("y"))
    assert given == Credentials(Path("x"), B, C, Path("y"))
    assert given.secure
    assert not Credentials().secure


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"token_file": A}, TokenOverPlaintextError),
        ({"token_file": A, "tls_cert": B, "tls_key": C}, TokenOverPlaintextError),
        ({"tls_ca": A, "tls_cert": B}, TrustSettingsError),
        ({"tls_ca": A, "tls_key": B}, TrustSettingsError),
        ({"tls_cert": A, "tls_key": B}, TrustSettingsError),
    ],
)
def test_what_makes_no_sense(given: dict[str, Path], kind: type[RestowError]) -> None:
    with pytest.raises(kind, match="--tls-"):
        Credentials(**given)


def test_nobody_speaks_with_credentials_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTOW_TOKEN_FILE", "token")
    with pytest.raises(TokenOverPlaintextError):
        AdminClient()
    with pytest.raises(TokenOverPlaintextError):
        EngineSession("e", "1", model_layout())
    with pytest.raises(TokenOverPlaintextError):
        BlockingSession("e", "1", model_layout()).start()


def test_plaintext_is_no_secure_channel() -> None:
    with pytest.raises(TrustSettingsError):
        Credentials().for_channel()
