"""``restow serve --digests``: by option, by environment, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cli.broker_process import broker_process, run_restow
from restow.broker.core.common.pair import DigestMode, Digests
from restow.broker.server.base.settings import BrokerSettings


def test_digests_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BrokerSettings().content_digests() == Digests(DigestMode.OFF, 64)
    monkeypatch.setenv("RESTOW_DIGESTS", "sampled")
    monkeypatch.setenv("RESTOW_DIGEST_EVERY", "7")
    assert BrokerSettings().content_digests() == Digests(DigestMode.SAMPLED, 7)
    assert BrokerSettings(digests=DigestMode.ALL).content_digests().mode is DigestMode.ALL


@pytest.mark.parametrize("every", [0, -1, "many"])
def test_one_of_none_is_refused(every: object) -> None:
    with pytest.raises(ValidationError, match="digest_every"):
        BrokerSettings(digest_every=every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--digests", "some"), "sampled"),
        (("--digests", "sampled", "--digest-every", "0"), "digest_every"),
    ],
)
def test_options_that_say_nothing_are_refused(options: tuple[str, ...], word: str) -> None:
    outcome = run_restow("serve", "--listen", "127.0.0.1:0", *options)
    assert outcome.returncode == 2
    assert word in outcome.stderr


def test_a_broker_takes_the_options() -> None:
    with broker_process("--digests", "sampled", "--digest-every", "2") as address:
        assert "0 by digests, 0 differed" in run_restow("status", "--broker", address).stdout
