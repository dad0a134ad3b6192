"""`whole_answer_accuracy` says how often the model's reply is the right one, word for word."""

from collections import defaultdict
from collections.abc import Iterable

from transformers import NemotronHForCausalLM

from restow.agents.engines.recall.task import Prompt
from restow.agents.engines.transformers.decode import generate_greedily


def whole_answer_accuracy(model: NemotronHForCausalLM, prompts: Iterable[Prompt]) -> float:
    """Return the share of prompts whose whole reply is right, decoded from the model's cache."""
    model.eval()
    # Prompts of one length share a batch without padding, which would alter the conv state.
    batches: defaultdict[tuple[int, int], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        batches[len(prompt.token_ids), len(prompt.answer_ids)].append(prompt)
    right = total = 0
    for (_, steps), batch in batches.items():
        replies = generate_greedily(model, [prompt.token_ids for prompt in batch], steps)
        right += sum(
            reply == prompt.answer_ids for reply, prompt in zip(replies, batch, strict=True)
        )
        total += len(batch)
    return right / total
