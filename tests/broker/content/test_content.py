"""A hash names what a state is of: the same for equal content, and for no other."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.client import ContentChain, content_of
from restow.broker.errors import RequestError

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
        return tokens, adapter, salt, sorted(a for a in attached if a[0] < len(tokens))

    assert (of(one) == of(other)) == (counted(one) == counted(other))


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


@pytest.mark.parametrize("tokens", [[-1], [2**32 - 1]])
def test_what_is_no_token_is_refused(tokens: list[int]) -> None:
    with pytest.raises(RequestError, match="outside of"):
        content_of(tokens, 1)


def test_a_position_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="of a prompt of 2 tokens"):
        content_of([1, 2], 3)
