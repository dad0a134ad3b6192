"""Train the recall model: ``python -m restow.demo.recall.train --out DIR --seed 0``."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedTokenizerFast

from restow.demo.recall import task
from restow.demo.recall.model import whole_answer_accuracy


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word; prompts contain ``<bos>`` themselves."""
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


IGNORED_LABEL = -100
EVALUATION_SEED = 1_000_003  # far from any training seed: held-out prompts are never trained on


@dataclass(frozen=True, slots=True)
class Lesson:
    """A step of the curriculum: how many facts are stated and how many keys asked for."""

    most_pairs: int
    questions: int


# With as many facts as questions the last value can be guessed by elimination, which stalls the
# training: so one key out of several facts comes first.
CURRICULUM = (
    Lesson(most_pairs=6, questions=1),
    Lesson(most_pairs=6, questions=2),
    Lesson(most_pairs=7, questions=3),
    Lesson(most_pairs=10, questions=3),
)


# The next lesson begins once the last lesson is learned. When all lessons are learned, the learning
# rate falls to zero over ANNEAL_STEPS.
MAX_STEPS = 8_000
ANNEAL_STEPS = 1_500
WARMUP_STEPS = 100
BATCH_SEQUENCES = 16
KEYS_PER_SEQUENCE = 9
FEWEST_PAIRS = 4
LEARNED_ACCURACY = 0.85
FINAL_ACCURACY = 0.95
PEAK_LEARNING_RATE = 2e-3
REPORT_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Token ids and labels, both [sequence, token]; labels are already shifted by one."""

    token_ids: Tensor
    labels: Tensor


def make_config(group_count: int) -> NemotronHConfig:
    """Return the shape of the model: it can be cut for tensor parallel sizes 1, 2 and 4.

    Two KV heads and two B/C groups are fewer than four ranks, so size 4 replicates both; a single
    group is replicated by size 2 too.
    """
    return NemotronHConfig(
        vocab_size=task.VOCABULARY_SIZE,
        hidden_size=128,
        # There is one attention layer: a second layer could look the question up again at every
        # step, and the model then ignored its SSM state (measured: zeroing it changed no reply).
        layers_block_type=["linear_attention", "full_attention", "linear_attention", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=group_count,
        ssm_state_size=32,
        conv_kernel=4,
        expand=2,
        chunk_size=16,
        # Prefill clamps dt from below with this and decode does not: a bound that is never
        # reached makes the two compute one function, here and in engines that have no bound.
        time_step_min=1e-9,
        time_step_floor=1e-9,
        max_position_embeddings=512,
        initializer_range=0.08,
        pad_token_id=task.PAD_ID,
        bos_token_id=task.BOS_ID,
        eos_token_id=task.EOS_ID,
        dtype="float32",
    )


def make_model(group_count: int) -> NemotronHForCausalLM:
    """Return an untrained model whose time steps start between 0.001 and 0.1."""
    model = NemotronHForCausalLM(make_config(group_count))
    with torch.no_grad():
        # The weights are so large that the first mixers do not drown which word a token is.
        model.get_input_embeddings().weight.normal_(std=0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                time_step = torch.exp(
                    torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1))
                )
                parameter.copy_(time_step + torch.log(-torch.expm1(-time_step)))
            if name.endswith("A_log"):
                # The decay is slow, because facts must last for a whole prompt.
                parameter.uniform_(math.log(0.25), math.log(8.0))
    return model


def draw_sequence(
    rng: Random, pair_count: int, questions_per_block: list[int]
) -> tuple[list[int], list[bool]]:
    """Return a sequence with several blocks of questions, and which tokens are replies."""
    facts = task.draw_facts(rng, pair_count)
    words = task.state_facts(facts)
    is_reply = [False] * len(words)
    for questions in questions_per_block:
        keys = rng.sample(tuple(facts), questions)
        question, reply = task.ask(keys), task.reply(facts, keys)
        words += question + reply
        is_reply += [False] * len(question) + [True] * len(reply)
    return list(task.encode(" ".join(words))), is_reply


def draw_batch(rng: Random, lesson: Lesson) -> TrainingBatch:
    """Return a batch of sequences that are all of one length, so none is padded."""
    pair_count = rng.randint(FEWEST_PAIRS, lesson.most_pairs)
    questions_per_block: list[int] = []
    while sum(questions_per_block) < KEYS_PER_SEQUENCE:
        # Short questions stay in the mix, yet the longest questions, as in the prompts, prevail.
        questions_per_block.append(max(rng.randint(1, lesson.questions) for _ in range(2)))
    drawn = [draw_sequence(rng, pair_count, questions_per_block) for _ in range(BATCH_SEQUENCES)]
    token_ids = torch.tensor([ids for ids, _ in drawn])
    is_reply = torch.tensor([marks for _, marks in drawn])
    return TrainingBatch(token_ids[:, :-1], token_ids.masked_fill(~is_reply, IGNORED_LABEL)[:, 1:])


def learning_rate(step: int, anneal_from: int | None) -> float:
    """Return a linear warm-up, a slow cosine, and a fall to zero from ``anneal_from`` on."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    slow_until = step if anneal_from is None else anneal_from
    progress = (slow_until - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)
    slow = PEAK_LEARNING_RATE * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
    return slow * (1 - (step - slow_until) / ANNEAL_STEPS)


def recalled(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each value of a batch whether it is recalled, given the right words before it.

    The full stops are left out: they are easy and would flatter.
    """
    is_value = labels >= task.ID_OF_WORD[task.VALUE_WORDS[0]]
    return (logits.argmax(-1) == labels)[is_value]


def train_step(
    model: NemotronHForCausalLM, optimizer: torch.optim.Optimizer, batch: TrainingBatch
) -> tuple[float, Tensor]:
    """Take one step; return the loss and the logits [sequence, token, vocabulary]."""
    logits: Tensor = model(batch.token_ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), logits


def train(model: NemotronHForCausalLM, seed: int) -> None:
    """Train ``model`` in place, printing step, loss and teacher-forced accuracy."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    begun_s = time.monotonic()
    rng = Random(seed)  # noqa: S311 - reproducible, not secret
    lesson_index = 0
    anneal_from: int | None = None
    hits: list[Tensor] = []
    for step in range(MAX_STEPS):
        if anneal_from is not None and step == anneal_from + ANNEAL_STEPS:
            return
        lesson = CURRICULUM[lesson_index]
        batch = draw_batch(rng, lesson)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, anneal_from)
        loss, logits = train_step(model, optimizer, batch)
        hits.append(recalled(logits, batch.labels))
        if (step + 1) % REPORT_EVERY_STEPS == 0:
            accuracy = torch.cat(hits).float().mean().item()
            print(
                f"step {step + 1} facts <={lesson.most_pairs} questions <={lesson.questions} "
                f"loss {loss:.4f} accuracy {accuracy:.4f} "
                f"elapsed_s {time.monotonic() - begun_s:.0f}",
                flush=True,
            )
            if lesson_index < len(CURRICULUM) - 1:
                lesson_index += accuracy > LEARNED_ACCURACY
            elif anneal_from is None and accuracy > FINAL_ACCURACY:
                anneal_from = step + 1
            hits = []


def main() -> None:
    """Train, measure on held-out prompts, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=2, help="B/C groups of each Mamba2 layer")
    parser.add_argument("--threads", type=int, default=1, help="two stall on a shared machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = make_model(arguments.groups)
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    train(model, arguments.seed)
    model.save_pretrained(arguments.out)
    make_tokenizer().save_pretrained(arguments.out)
    accuracy = whole_answer_accuracy(model, task.make_prompts(256, EVALUATION_SEED))
    print(f"held-out whole-answer accuracy {accuracy:.4f} on 256 prompts", flush=True)


if __name__ == "__main__":
    main()
