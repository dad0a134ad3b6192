"""`make_tokenizer` makes the task's words a tokenizer, which engines load from a checkpoint."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from restow.agents.engines.recall import task


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, words parted by blanks; ``<bos>`` is written out, and never added."""
    words = Tokenizer(models.WordLevel(vocab=dict(task.ID_OF_WORD), unk_token=task.UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
