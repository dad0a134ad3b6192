"""What a client is told to show: from arguments or the environment, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.fakes import model_layout
from restow.broker.client import AdminClient, BlockingSession, Credentials, EngineSession
from restow.broker.errors import RestowError
from restow.broker.trust.errors import TokenOverPlaintextError, TrustSettingsError

A, B, C, D = (Path(name) for name in "abcd")


def test_from_the_environment() -> None:
    environment = {
        "RESTOW_TLS_CA": "a",
        "RESTOW_TLS_CERT": "b",
        "RESTOW_TLS_KEY": "c",
        "RESTOW_TOKEN_FILE": "d",
    }
    assert Credentials.of(environment=environment) == Credentials(A, B, C, D)
    assert Credentials.of(environment={}) == Credentials()
    assert Credentials.of(environment=dict.fromkeys(environment, "")) == Credentials()
    given = Credentials.of("x", token_file=Path("y"), environment=environment)
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
