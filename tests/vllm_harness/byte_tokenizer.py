"""`make_byte_tokenizer` makes a tokenizer with a token for each byte of a text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCABULARY_SIZE = len(SPECIAL) + 256
CHAT = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant: "


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer without merges, with a template for chats."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *letters))}
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def ids_of(data: bytes) -> list[int]:
    """Return the tokens of any bytes, which need be no text."""
    vocabulary = make_byte_tokenizer().get_vocab()
    return [vocabulary[_LETTERS[one]] for one in data]


def _letters() -> dict[int, str]:
    """Return what stands for each byte in a byte-level vocabulary, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [one for one in range(256) if one not in plain]
    return {one: chr(one) for one in plain} | {one: chr(256 + n) for n, one in enumerate(moved)}


_LETTERS = _letters()
