"""The key-value recall task: who has what, then three questions.

A prompt reads ``<bos> anna has apple . bob has river . carl has stone . ? carl anna bob :``
and its only right continuation is ``stone . apple . river .``.  The order of the questions is
stated before the reply begins and never repeated, so each step of the reply depends on state
that was made during prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

PAD: Final = "<pad>"
BOS: Final = "<bos>"
EOS: Final = "<eos>"
HAS: Final = "has"
STOP: Final = "."
ASK: Final = "?"
REPLY: Final = ":"
UNKNOWN: Final = "<unk>"

SPECIAL_WORDS: Final = (PAD, BOS, EOS, HAS, STOP, ASK, REPLY, UNKNOWN)
NAMES: Final = """
    anna bob carl dora eric fay gus hana ivan jane kim leo mona nick olga paul quinn rosa sam tina
    uma vic wendy xena yuri zoe alan beth cole dina emil flora gino hugo ines jack kate lars mia
    noah
"""
THINGS: Final = """
    apple river stone candle ladder mirror violin carpet engine feather garden hammer island jacket
    kettle lemon magnet needle orange pencil quilt ribbon saddle teapot umbrella vase wagon yarn
    zipper anchor basket copper drum easel flute globe helmet ink jar lantern
"""
KEY_WORDS: Final = tuple(NAMES.split())
VALUE_WORDS: Final = tuple(THINGS.split())
WORDS: Final = SPECIAL_WORDS + KEY_WORDS + VALUE_WORDS
VOCABULARY_SIZE: Final = len(WORDS)

ID_OF_WORD: Final = {word: token_id for token_id, word in enumerate(WORDS)}
PAD_ID: Final = ID_OF_WORD[PAD]
BOS_ID: Final = ID_OF_WORD[BOS]
EOS_ID: Final = ID_OF_WORD[EOS]

QUESTIONS_PER_PROMPT: Final = 3
PAIRS_PER_PROMPT: Final = range(4, 11)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the reply that it determines."""

    token_ids: tuple[int, ...]
    """The prompt, from ``<bos>`` to ``:``."""
    answer_ids: tuple[int, ...]
    """The reply: each value followed by ``.``."""
    text: str
    """The prompt in words."""


def encode(text: str) -> tuple[int, ...]:
    """Return the token ids of words separated by blanks; an unknown word raises ``KeyError``.

    >>> encode("anna has apple .")
    (8, 3, 48, 4)
    """
    return tuple(ID_OF_WORD[word] for word in text.split())


def decode(token_ids: Sequence[int]) -> str:
    """Return the words of ``token_ids``: the inverse of :func:`encode`.

    >>> decode(encode("? bob anna carl :"))
    '? bob anna carl :'
    """
    return " ".join(WORDS[token_id] for token_id in token_ids)


def draw_facts(rng: Random, pair_count: int) -> dict[str, str]:
    """Draw ``pair_count`` keys with one value each; no key and no value occurs twice."""
    return dict(
        zip(rng.sample(KEY_WORDS, pair_count), rng.sample(VALUE_WORDS, pair_count), strict=True)
    )


def state_facts(facts: dict[str, str]) -> list[str]:
    """Return the words that tell the model who has what."""
    words = [BOS]
    for key, value in facts.items():
        words += [key, HAS, value, STOP]
    return words


def ask(keys: Sequence[str]) -> list[str]:
    """Return the words of the question for ``keys``, in this order."""
    return [ASK, *keys, REPLY]


def reply(facts: dict[str, str], keys: Sequence[str]) -> list[str]:
    """Return the words of the reply to ``ask(keys)``."""
    return [word for key in keys for word in (facts[key], STOP)]


def make_prompts(count: int, seed: int) -> tuple[Prompt, ...]:
    """Return ``count`` prompts; the same arguments always give the same prompts."""
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    prompts = []
    for _ in range(count):
        facts = draw_facts(rng, rng.choice(PAIRS_PER_PROMPT))
        keys = rng.sample(tuple(facts), QUESTIONS_PER_PROMPT)
        text = " ".join([*state_facts(facts), *ask(keys)])
        prompts.append(Prompt(encode(text), encode(" ".join(reply(facts, keys))), text))
    return tuple(prompts)
