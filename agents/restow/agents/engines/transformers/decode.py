"""Prefill and greedy decoding are apart here, as two engines do them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, NemotronHForCausalLM

from restow.agents.engines.transformers.stored_types import AS_COMPUTED, StoredTypes, round_cache


@dataclass(frozen=True, slots=True)
class Decoded:
    """What greedy decoding gave.

    Attributes:
        logits: Logits after each token that was fed, [step, vocabulary].
        token_ids: The tokens chosen, one for each step.
    """

    logits: Tensor
    token_ids: tuple[int, ...]

    @property
    def first_logits(self) -> Tensor:
        """Logits after the first token that was fed, [vocabulary]."""
        return self.logits[0]


@torch.inference_mode()
def prefill(
    model: NemotronHForCausalLM, token_ids: Sequence[int], stored: StoredTypes = AS_COMPUTED
) -> DynamicCache:
    """Return the cache after ``token_ids``, computed in one forward pass and then stored.

    No tokens: an empty one.
    """
    cache = DynamicCache(config=model.config)
    if not token_ids:
        return cache
    model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
    round_cache(cache, model.config, stored)
    return cache


@torch.inference_mode()
def decode_greedily(
    model: NemotronHForCausalLM,
    cache: DynamicCache,
    last_token_id: int,
    steps: int,
    stored: StoredTypes = AS_COMPUTED,
) -> Decoded:
    """Feed ``last_token_id``, then each token chosen; ``cache`` grows by ``steps`` tokens.

    After each step the cache is stored: the next step finds it rounded.
    """
    chosen: list[int] = []
    logits_of_steps: list[Tensor] = []
    for _ in range(steps):
        fed = torch.tensor([[chosen[-1] if chosen else last_token_id]])
        logits = model(fed, past_key_values=cache, use_cache=True).logits[0, -1]
        round_cache(cache, model.config, stored)
        logits_of_steps.append(logits)
        chosen.append(int(logits.argmax()))
    return Decoded(torch.stack(logits_of_steps), tuple(chosen))


@torch.inference_mode()
def generate_greedily(
    model: NemotronHForCausalLM, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[tuple[int, ...], ...]:
    """Return transformers' own ``steps`` greedy tokens for prompts that have one length."""
    token_ids = torch.tensor(prompts)
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
    )
    return tuple(tuple(row) for row in output[:, token_ids.shape[1] :].tolist())
