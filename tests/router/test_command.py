"""`restow router`, as it is typed."""

from __future__ import annotations

import pytest

from restow.broker.cli.main import main

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefill", "http://h:1"), "Missing option '--decode'"),
        ((*ENGINES, "--listen", "8000"), "it has no host; write 127.0.0.1:8000"),
        ((*ENGINES, "--listen", "127.0.0.1:99999"), "its port is no number of 0 to 65535"),
        ((*ENGINES, "--decode", "d:8100"), "d:8100 is no http:// or https:// URL"),
        ((*ENGINES, "--decode", "d1=d:8100"), "d:8100 is no http:// or https:// URL"),
        ((*ENGINES, "--find-ms", "20"), "no engine is named by its id (ID=URL)"),
    ],
)
def test_what_is_wrong_usage(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["router", *options])
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
