"""Answer prompts on D from states that P prefilled, the right way or a broken one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from restow.agents.demo.sabotage import Sabotage, with_ssm_of
from restow.agents.engines.recall.task import Prompt
from restow.agents.engines.transformers import Engine
from restow.agents.engines.transformers.decode import Decoded

Progress = Callable[[str, int, int], None]
"""Told what is under way, how much is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt, answered alone and through a handoff."""

    prompt: Prompt
    alone: Decoded
    through: Decoded
    bytes: int
    transfer_us: int

    @property
    def tokens_equal(self) -> bool:
        """Whether the same tokens came out."""
        return self.alone.token_ids == self.through.token_ids

    @property
    def logit_diff(self) -> float:
        """Largest difference of the first token's logits."""
        difference: Tensor = (self.alone.first_logits - self.through.first_logits).abs().max()
        return float(difference)

    @property
    def logits_equal(self) -> bool:
        """Whether the first token's logits are equal bit for bit."""
        return torch.equal(self.alone.first_logits, self.through.first_logits)

    @property
    def exact(self) -> bool:
        """Whether the same tokens came out of logits that are equal bit for bit at every step."""
        return self.tokens_equal and torch.equal(self.alone.logits, self.through.logits)

    @property
    def right_alone(self) -> bool:
        """Whether the reference answers what the prompt says."""
        return self._right(self.alone)

    @property
    def right_through(self) -> bool:
        """Whether the answer through the handoff is what the prompt says."""
        return self._right(self.through)

    def _right(self, decoded: Decoded) -> bool:
        return decoded.token_ids == self.prompt.answer_ids[: len(decoded.token_ids)]


def answer_prompts(
    run: str,
    p: Engine,
    d: Engine,
    prompts: Sequence[Prompt],
    references: Sequence[Decoded],
    steps: int,
    sabotage: Sabotage | None = None,
    progress: Progress = lambda what, done, of: None,
) -> tuple[Answer, ...]:
    """Hand every prompt's state from ``p`` to ``d`` and decode ``steps`` tokens there.

    ``run`` makes the handoffs' ids unique. Every second time D asks before P has begun. For
    `Sabotage.SWAPPED_B_C` the caller gives a ``p`` that announced a false layout.
    """
    answers = []
    for index, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        progress(run, index, len(prompts))
        handoff_id = f"{run}-{index}"
        # Two sides that say what they are at would not come to anything wrong.
        named = sabotage is None
        asked = d.ask(handoff_id, prompt.token_ids, named=named) if index % 2 else None
        if sabotage is Sabotage.NO_N_MINUS_1:
            p.prefill(handoff_id, prompt.token_ids, position=len(prompt.token_ids))
        elif sabotage is Sabotage.STALE_SSM:
            other = prompts[index - 1].token_ids
            left_behind = with_ssm_of(p.state_at(other, len(other) - 1))
            p.prefill(handoff_id, prompt.token_ids, alter=left_behind)
        else:
            p.prefill(handoff_id, prompt.token_ids)
        asked = asked or d.ask(handoff_id, prompt.token_ids, named=named)
        through = d.decode(asked, steps)
        ended = asked.end.result()
        answers.append(Answer(prompt, reference, through, ended.bytes, ended.transfer_us))
    progress(run, len(prompts), len(prompts))
    return tuple(answers)
