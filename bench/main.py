"""``./run bench``: measure transfers, the control plane, stores, fleets, vLLM and kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.processes import logs_folder
from bench.report import Put, Row, machine, show, write_json
from restow.broker.errors import RestowError


@dataclass(frozen=True)
class Suite:
    """A benchmark: its name, its function as ``module:function``, and what it does in a line.

    A suite that ``needs`` something is measured only if it is named. ``by_case`` says that single
    cases of it can be chosen, and ``by_trace`` that it can read a trace.
    """

    name: str
    function: str
    does: str
    needs: str = ""
    by_case: bool = False
    by_trace: bool = False

    def run(self, put: Put, repeats: int, *chosen: object) -> None:
        """Import the module, so that a suite needs only what it measures, and run it."""
        module, _, function = self.function.partition(":")
        getattr(import_module(f"bench.{module}"), function)(put, repeats, *chosen)


STRATEGIES = "transfer.strategies"
VLLM, GPU = "vLLM", "a GPU"
ALL_OF_GPU = "gpu"
SUITES = (
    Suite("handoff", "transfer.handoff:run", "time a handoff beside a contiguous READ"),
    Suite(
        "models",
        f"{STRATEGIES}:run_models",
        "compare auto with each strategy, real models",
        by_case=True,
    ),
    Suite(
        "pieces",
        f"{STRATEGIES}:run_pieces",
        "compare auto with each strategy, equal pieces",
        by_case=True,
    ),
    Suite("at-once", "transfer.at_once:run", "time up to 32 handoffs at once"),
    Suite("tcp", "transfer.tcp:run", "hand over between network namespaces", "root"),
    Suite("planning", "transfer.planning:run", "plan pairs of layouts, and bind pages"),
    Suite("first-handoff", "transfer.first_handoff:run", "time the first handoff of two engines"),
    Suite(
        "content-digests", "transfer.content_digests:run", "compare checked handoffs with others"
    ),
    Suite("handoff-rate", "control.handoff_rate:run", "count handoffs a second, and latency"),
    Suite("handoff-parts", "control.handoff_parts:run", "time the parts of one small handoff"),
    Suite("neighbours", "control.neighbours:run", "hand over while others load the broker"),
    Suite("prefix-lookup", "control.prefix_lookup:run", "look up who holds a prompt"),
    Suite(
        "tenant-memory",
        "control.tenant_memory:run",
        "fill a tenant's quota in nine ways",
        needs="minutes",
    ),
    Suite("broker-killed", "fleet.broker_killed:run", "kill the broker under a steady load"),
    Suite("reconnect", "fleet.broker_killed:run_reconnect", "kill the broker of 10,000 agents"),
    Suite(
        "failover",
        "fleet.failover:run",
        "kill, stop and cut off one of three brokers",
        needs="twenty minutes",
    ),
    Suite("by-content", "store.by_content:run", "request states by content and by an id"),
    Suite("store-reads", "store.store_reads:run", "read states from a store's memory and disk"),
    Suite(
        "eviction",
        "store.eviction:run",
        "compare a store's eviction rule with LRU",
        by_trace=True,
    ),
    Suite(
        "router-sessions", "store.router_sessions:run", "count tokens that a router's Find saves"
    ),
    Suite("vllm-handover", "vllm.handover:run", "hand over in vLLM, beside NixlConnector", VLLM),
    Suite(
        "vllm-second-turn", "vllm.second_turn:run", "time second turns by where the state is", VLLM
    ),
    Suite("vllm-early-reads", "vllm.early_reads:run", "read while P computes a long prompt", VLLM),
    Suite("vllm-moves", "vllm.moves:run", "move replies, fork states, keep marked ones", VLLM),
    Suite("host-copies", "gpu.host_copies:run", "copy host memory, beside memcpy"),
    Suite("gpu-host-work", "gpu.host_work:run", "bind a packed handoff between two GPUs"),
    Suite("gpu-kernels", "gpu.kernels:run", "run the Triton kernels, beside torch", GPU),
    Suite("gpu-decoding", "gpu.decoding:run", "hand over to a D that decodes", GPU),
    Suite("gpu-at-once", "transfer.at_once:run_gpu", "time up to 64 handoffs at once", GPU),
    Suite(
        "gpu-strategies",
        f"{STRATEGIES}:run_gpu",
        "compare strategies within one GPU",
        GPU,
        by_case=True,
    ),
)
BY_NAME = {suite.name: suite for suite in SUITES}


def _list_of_suites() -> str:
    """Return a line for each suite, for ``--help``."""
    lines = ["\b", "Suites (those with a need in parentheses are measured only if they are named):"]
    for suite in SUITES:
        needs = f" ({suite.needs})" if suite.needs else ""
        lines.append(f"  {suite.name:17} {suite.does}{needs}")
    lines.append(f"  {ALL_OF_GPU:17} all suites of that name, in this order")
    return "\n".join(lines)


def _chosen(names: list[str]) -> list[Suite]:
    of_gpu = [name for name in BY_NAME if name.startswith(f"{ALL_OF_GPU}-")]
    names = [one for name in names for one in (of_gpu if name == ALL_OF_GPU else [name])]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        words = f"there is no suite {unknown[0]!r}: ./run bench --help lists all"
        raise typer.BadParameter(words, param_hint="--suite")
    return [BY_NAME[name] for name in names] or [suite for suite in SUITES if not suite.needs]


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=_list_of_suites())
def main(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Measure only this suite; may be repeated.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the rows to this file.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each case.")] = 9,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Of models, pieces and gpu-strategies measure only cases with these words in "
            "their name; may be repeated.",
        ),
    ] = None,
    sets: Annotated[
        int,
        typer.Option(
            min=1,
            help="With models, pieces and gpu-strategies: measure a case that missed a goal, or "
            "barely reached it, in up to this many sets of processes, minutes apart, and take all "
            "samples together. The place of a set's memory alone changes its times by a tenth.",
        ),
    ] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="With eviction: simulate this trace too, in the format of Mooncake's public "
            "traces (JSON lines with timestamp, input_length and hash_ids; .gz too).",
        ),
    ] = None,
) -> None:
    """Measure medians of interleaved samples.

    Each row compares a median with a reference of the same run: its ratio is the reference's value
    over ours, so above 1.0 Restow is faster. Logs of brokers and agents go to files, whose folder
    is printed at the end. Suites that need nothing are measured if none is named.
    """
    suites = _chosen(suite or [])
    for given, option in ((case, "--case"), (sets > 1, "--sets")):
        if given and not (suite and any(named.by_case for named in suites)):
            by_case = ", ".join(possible.name for possible in SUITES if possible.by_case)
            words = f"name suites too: {by_case}"
            raise typer.BadParameter(words, param_hint=option)
    if trace is not None and not any(chosen.by_trace for chosen in suites):
        raise typer.BadParameter("name the suite eviction too", param_hint="--trace")
    # A file may have long lines; a terminal has its own width.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    about = machine()
    console.print(about)
    rows: dict[tuple[str, str, str], Row] = {}

    def put(row: Row) -> None:
        rows[row.suite, row.case, row.reference] = row
        console.print(f"  {row.suite}: {row.case}: {row.ratio:.2f} of {row.reference}")
        if json_file is not None:  # at once, so that it is kept if a later suite fails
            write_json(list(rows.values()), json_file, about)

    failed = []
    for chosen in suites:
        options = (case or (), sets) if chosen.by_case else (trace,) if chosen.by_trace else ()
        try:
            chosen.run(put, repeats, *options)
        except (OSError, RestowError, RuntimeError):  # the other suites are measured all the same
            console.print_exception()
            failed.append(chosen.name)
    show(list(rows.values()), console)
    console.print(f"Logs: {logs_folder()}")
    if failed:
        console.print(f"FAILED: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="./run bench")
