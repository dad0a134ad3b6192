"""`restow find` and `restow holdings`, as people and as scripts see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.content.holders import FORM, PROMPT, heard, hold
from broker.fakes import broker, engine
from cli.typed import failed, printed_aside
from restow.broker.cli.commands.find import chain_from
from restow.broker.client import chain_of
from restow.broker.client.engine.chains import find_request
from restow.broker.errors import ChainInvalidError

TOKENS = list(range(1, 165))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["00112233aabbccdd", "0" * 64]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)


@pytest.fixture
def shown() -> Callable[..., dict[str, Any]]:
    """Return a function that runs commands beside an engine that holds the prompt.

    It returns the commands' texts and documents by name.
    """

    async def printed(commands: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        async with broker() as running, engine(running.address, "e") as (session, _):
            hold(session)
            await heard(running, "e", 2)
            found: dict[str, Any] = {}
            for name, command in commands.items():
                found[name] = await printed_aside(*command, "--broker", running.address)
            return found

    return lambda **commands: asyncio.run(printed(commands))


def test_who_holds_what(tmp_path: Path, shown: Callable[..., dict[str, Any]]) -> None:
    tokens, hashes, other = (tmp_path / name for name in ("tokens", "hashes", "other"))
    tokens.write_text(json.dumps(TOKENS))
    own = {
        "algorithm": FORM.algorithm,
        "quantum_tokens": 16,
        "hashes": [one.hex() for one in PROMPT.hashes],
        "below_tokens": 160,
    }
    hashes.write_text(json.dumps(own))
    other.write_text(json.dumps(TOKENS[5:]))
    found = shown(
        text=("find", str(tokens), "--engine", "e"),
        document=("find", str(tokens), "--model", "m", "--revision", "v1", "--json"),
        hashes=("find", str(hashes), "--engine", "e", "--json"),
        names=("find", str(tokens), "--engine", "e", "-o", "name"),
        nobody=("find", str(other), "--engine", "e"),
        holdings=("holdings",),
        held=("holdings", "--json"),
        others=("holdings", "f", "--json"),
    )
    assert found["text"].split("\n")[1].split()[:4] == ["e", "160", "0", "no"]
    (holder,) = json.loads(found["document"])["holders"]
    assert (holder["engine_id"], holder["tokens"], holder["open"]) == ("e", 160, 0)
    value = json.loads(found["hashes"])
    assert (value["hashes"], value["below_tokens"]) == (10, 160)
    assert [one["tokens"] for one in value["holders"]] == [64]
    assert found["names"] == "e\n"
    assert found["nobody"] == "Nobody holds any of it.\n"
    assert "blocks of 16" in found["holdings"]
    assert "snapshots" in found["holdings"]
    assert "10 hashes in" in found["holdings"]
    (one,) = json.loads(found["held"])["engines"]
    assert {group["group"]: group["count"] for group in one["groups"]} == {
        "attention": 10,
        "state": 2,
    }
    assert json.loads(found["others"])["engines"] == []


@pytest.mark.parametrize(
    "content",
    [
        '["a"]',
        "[true]",
        "{}",
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": ["zz"]}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": 5}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": ["00", "0000"]}',
        "[1, -5]",
        "[4294967295]",
        '{"algorithm": "x", "quantum_tokens": "16", "hashes": ["0011223344556677"]}',
        '{"algorithm": "x", "quantum_tokens": 0, "hashes": ["0011223344556677"]}',
        '{"algorithm": "x", "quantum_tokens": 99999999999999999999, "hashes": []}',
        '{"algorithm": 7, "quantum_tokens": 16, "hashes": []}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "hash_bytes": 1.5}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "below_tokens": "x"}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "below_tokens": 2147483648}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "below": 5}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "salt": 5}',
        r'{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "salt": "\ud800"}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "ends": [["x", "00"]]}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "ends": [[1e400, "00"]]}',
        '{"algorithm": "x", "quantum_tokens": 16, "hashes": [], "ends": [5]}',
    ],
)
def test_what_is_no_chain_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(content)
    outcome = failed("find", path, "--engine", "e", "--json")
    assert outcome.json["error"]["reason"] == "CHAIN_INVALID"


@given(
    st.fixed_dictionaries(
        {"algorithm": JSON | st.just("x"), "quantum_tokens": JSON | st.just(16), "hashes": JSON},
        optional={"hash_bytes": JSON, "below_tokens": JSON, "salt": JSON, "ends": JSON, "x": JSON},
    )
    | JSON
)
def test_whatever_a_file_holds_is_a_chain_or_refused(value: Any) -> None:
    with contextlib.suppress(ChainInvalidError):
        find_request([chain_from(value, 16)], "e", None, 1)


def test_an_engine_or_a_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(TOKENS))
    assert failed("find", path).code == 2
    assert failed("find", path, "--engine", "e", "--model", "m").code == 2


def test_tokens_are_hashed_as_the_client_does() -> None:
    assert chain_of(TOKENS) == PROMPT
