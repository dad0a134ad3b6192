"""A hash names what a state is of: the same for equal content, and for no other."""

from __future__ import annotations

import hashlib
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.client import ContentChain, chain_of, content_of
from restow.broker.errors import ChainInvalidError, RequestError

TOKENS = st.lists(st.integers(0, 2**32 - 2), max_size=20)
ATTACHED = st.lists(st.tuples(st.integers(0, 20), st.binary(max_size=8)), max_size=3)
WORDS = st.text(max_size=4)
PROMPTS = st.tuples(TOKENS, WORDS, WORDS, ATTACHED)


def of(
    prompt: tuple[list[int], str, str, list[tuple[int, bytes]]], position: int | None = None
) -> bytes:
    tokens, adapter, salt, attachments = prompt
    at = len(tokens) if position is None else position
    return content_of(tokens, at, adapter=adapter, salt=salt, attachments=attachments)


@given(PROMPTS, PROMPTS)
def test_equal_where_and_only_where_all_is_equal(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    def counted(prompt: tuple) -> object:  # type: ignore[type-arg]
        tokens, adapter, salt, attached = prompt
        before = [one for one in attached if one[0] < len(tokens)]
        return tokens, adapter, salt, sorted(before, key=itemgetter(0))

    assert (of(one) == of(other)) == (counted(one) == counted(other))


def test_two_images_at_one_token_count_in_their_order() -> None:
    cat, dog = (1, b"cat"), (1, b"dog")
    assert of(([5, 6], "", "", [cat, dog])) != of(([5, 6], "", "", [dog, cat]))
    assert chain_of([5, 6], 1, attachments=[cat, dog]) != chain_of(
        [5, 6], 1, attachments=[dog, cat]
    )
    ahead = (0, b"cat")
    assert of(([5, 6], "", "", [ahead, dog])) == of(([5, 6], "", "", [dog, ahead]))


@given(PROMPTS, st.data())
def test_what_comes_behind_the_position_does_not_count(prompt: tuple, data: st.DataObject) -> None:  # type: ignore[type-arg]
    tokens, adapter, salt, attached = prompt
    position = data.draw(st.integers(0, len(tokens)))
    before = [one for one in attached if one[0] < position]
    assert of(prompt, position) == of((tokens[:position], adapter, salt, before))


def test_one_pass_gives_all_prefixes() -> None:
    tokens = list(range(100, 164))
    text = hashlib.sha256(b"restow content 1\0" + bytes(8))
    for position in range(len(tokens)):
        assert text.digest() == content_of(tokens, position)
        text.update(np.uint32(tokens[position]).tobytes())


@given(PROMPTS, st.integers(1, 6), st.data())
def test_a_chain_names_prefixes_as_tokens_come(
    prompt: tuple,  # type: ignore[type-arg]
    every: int,
    data: st.DataObject,
) -> None:
    tokens, adapter, salt, attached = prompt
    chain = ContentChain(adapter=adapter, salt=salt, attachments=attached)
    names: list[bytes] = []
    while chain.tokens < len(tokens):
        stop = data.draw(st.integers(chain.tokens, len(tokens)))
        names += chain.extend(tokens[chain.tokens : stop], every)
        assert chain.tokens == stop
        assert chain.digest() == of(prompt, stop)
    assert names == [of(prompt, at) for at in range(every, len(tokens) + 1, every)]


@pytest.mark.parametrize(
    "tokens",
    [
        *([-1], [2**32 - 1], [2**80], [1.9], [1.0], ["1"], [True], [1, True], [np.True_], [None]),
        *([[1]], [1, [2]], "1", b"1", np.array([1.5]), np.array([True]), np.array([[1]])),
        np.array([2**63 + 1], np.uint64),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    for name in (
        lambda: content_of(tokens, len(tokens)),
        lambda: chain_of(tokens, 1),
        lambda: ContentChain().extend(tokens, 1),
    ):
        with pytest.raises(RequestError, match="is not a whole number in"):
            name()


@pytest.mark.parametrize(
    "tokens", [np.array([1, 2], np.int32), np.array([1, 2], np.uint64), [np.uint8(1), 2], (1, 2)]
)
def test_whole_numbers_of_any_type_are_tokens(tokens: Any) -> None:
    assert content_of(tokens, 2) == content_of([1, 2], 2)


@pytest.mark.parametrize("position", [3, -1, 1.0, True, "1", None], ids=repr)
def test_what_is_no_position_of_the_prompt_is_refused(position: Any) -> None:
    with pytest.raises(RequestError, match="but the prompt has 2 tokens"):
        content_of([1, 2], position)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *(("attachments", [(at, b"a")]) for at in (-1, 0.5, True, "1")),
        *(("attachments", [(0, digest)]) for digest in ("a", 1)),
        *(("adapter", None), ("salt", b"a")),
    ],
    ids=repr,
)
def test_what_else_a_state_is_of_is_not_coerced(field: str, wrong: Any) -> None:
    more: dict[str, Any] = {field: wrong}
    with pytest.raises(RequestError) as caught:
        content_of([1, 2], 2, **more)
    assert caught.value.subject["field"] == field


def test_half_of_a_character_in_a_salt_is_content_like_any_other() -> None:
    # JSON can express half of a surrogate pair, so a client can send it.
    assert len({content_of([1], 1, salt=one) for one in ("", "\ud800", "\ud801", "?")}) == 4


@pytest.mark.parametrize("quantum", [0, -1, 1.0, True, 16_385], ids=repr)
def test_a_chain_by_no_quantum_of_tokens_is_refused(quantum: Any) -> None:
    with pytest.raises(ChainInvalidError, match="quantum_tokens"):
        chain_of([1, 2], quantum)
    if quantum != 16_385:
        with pytest.raises(RequestError, match="every_tokens"):
            ContentChain().extend([1, 2], quantum)
