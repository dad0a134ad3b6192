"""Run prompts through a broker, and compare with an engine that kept its state to itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from restow.agents.demo.answers import Answer, Progress, answer_prompts
from restow.agents.demo.options import SEED, STEPS, DemoOptions
from restow.agents.demo.processes import running_broker_process, running_daemon
from restow.agents.demo.sabotage import Sabotage, swap_b_and_c
from restow.agents.engines.common.fork_server import ForkServer
from restow.agents.engines.recall.model import load_model
from restow.agents.engines.recall.task import make_prompts
from restow.agents.engines.transformers import Engine, EngineOptions, StoredTypes
from restow.broker.families import EngineSettings
from restow.broker.layout import Layout


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of a demo, and the layouts between which they travelled."""

    answers: tuple[Answer, ...]
    sabotaged: dict[Sabotage, tuple[Answer, ...]]
    p_layout: Layout
    d_layout: Layout


def run_experiment(options: DemoOptions, progress: Progress) -> Outcome:
    """Start a broker, a P and a D; answer all prompts the right way, then the wrong ways."""
    # One thread: the order of additions, so the last bit, does not depend on the machine.
    torch.set_num_threads(1)
    with ExitStack() as stack:
        forks = stack.enter_context(ForkServer())
        broker = stack.enter_context(
            running_broker_process(options.strategy, options.allow_narrowing)
        )
        model = load_model()
        prompts = make_prompts(options.prompts, SEED)

        def engine(
            name: str,
            settings: EngineSettings,
            stored: StoredTypes,
            announce: Callable[[Layout], Layout] = lambda layout: layout,
        ) -> Engine:
            """An engine with a worker process, or a daemon, for each of its ranks."""
            homes: tuple[ForkServer | Path, ...] = (forks,) * settings.tp
            if options.daemon:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restow-")))
                progress(f"starting daemons of {name}", 0, settings.tp)
                homes = tuple(
                    stack.enter_context(running_daemon(broker, folder / f"{rank}.sock"))
                    for rank in range(settings.tp)
                )
            progress(f"starting {name}, {settings.tp} ranks", 0, settings.tp)
            how = EngineOptions(name, broker, settings, homes, stored=stored)
            return stack.enter_context(Engine(model, how, announce))

        p = engine("P", options.p, options.p_stored)
        d = engine("D", options.d, options.d_stored)
        alone = []
        for index, prompt in enumerate(prompts):
            progress("standalone", index, len(prompts))
            alone.append(d.decode_alone(prompt.token_ids, STEPS, options.p_stored))
        answers = answer_prompts("restow", p, d, prompts, alone, STEPS, progress=progress)
        sabotaged = {}
        for sabotage in Sabotage if options.sabotage else ():
            source = p
            if sabotage is Sabotage.SWAPPED_B_C:
                source = engine("P-lies", options.p, options.p_stored, swap_b_and_c)
            sabotaged[sabotage] = answer_prompts(
                sabotage, source, d, prompts, alone, STEPS, sabotage, progress
            )
        return Outcome(answers, sabotaged, p.layout, d.layout)
