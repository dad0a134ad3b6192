"""Prompts of the recall model that take more than a block."""

from __future__ import annotations

from random import Random

from restow.demo.recall.task import KEY_WORDS, VALUE_WORDS, ask, encode, state_facts


def long_prompts() -> list[list[int]]:
    """Return prompts of 140 to 166 tokens, where a block holds 128.

    Some begin alike, and some end early.
    """
    rng = Random(7)  # noqa: S311 - reproducible, not secret
    values = [rng.choice(VALUE_WORDS) for _ in KEY_WORDS]
    facts = state_facts(dict(zip(KEY_WORDS, values, strict=True)))
    asked = [rng.sample(KEY_WORDS, 3) for _ in range(4)]
    whole = [encode(" ".join([*facts, *ask(keys)])) for keys in asked]
    return [list(one) for one in (*whole, whole[0][:140], whole[1][:128], whole[2][:129])]
