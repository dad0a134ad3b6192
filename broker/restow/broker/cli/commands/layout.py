"""``restow layout`` makes, checks and compares layouts; ``restow plan`` shows what would move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from restow.broker.cli.common.connection import connects
from restow.broker.cli.common.output import FOUND, print_json
from restow.broker.cli.settings.options import ConfigPath, CostsOption, JsonFile, JsonOption
from restow.broker.strategy import Strategy

app = typer.Typer(help="Make, check and compare layouts.", no_args_is_help=True)

StateDType = Literal["float32", "bfloat16", "float16"]
KvDType = Literal[
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn_x2"
]


@dataclass(frozen=True)
class ModelOptions:
    """A model, beside its config. Each field is an option."""

    dtype: Annotated[
        StateDType | None,
        typer.Option(
            help="Type that the engine computes in. Default: what vLLM's auto makes of the "
            "model's type, for example bfloat16 for float32."
        ),
    ] = None
    kv_dtype: Annotated[
        KvDType | None,
        typer.Option(help="Type of keys and values. Default: the checkpoint's, or the model's."),
    ] = None
    kv_scales: Annotated[
        Literal["none", "static", "per-token-head", "per-block", "per-16"] | None,
        typer.Option(
            help="Scales of float8 or int8 KV. per-block: latents beside an indexer (vLLM "
            "fp8_ds_mla); per-16: float4_e2m1fn_x2 (vLLM nvfp4, but not on a B200). Default: none, "
            "where the type needs no scales."
        ),
    ] = None
    kv_scales_fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Identifies static scales: equal on P and D exactly when their scales are. "
            "Default: the revision.",
        ),
    ] = None
    conv_dtype: Annotated[
        StateDType | None, typer.Option(help="Type of conv states. Default: the model's.")
    ] = None
    ssm_dtype: Annotated[
        StateDType | None, typer.Option(help="Type of SSM states. Default: the family's.")
    ] = None
    draft_layers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draft layers (MTP) that the engine runs; the other side may have none. For vLLM: "
            "as many as the config names.",
        ),
    ] = 0
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model, equal on both sides. Default: its model_type."),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            help="Identifies the weights: equal on P and D exactly when their weights are. "
            "Default: a fingerprint of the weights in the folder, if it has weights."
        ),
    ] = None
    adapter: Annotated[str, typer.Option(help="The adapter of all requests of the engine.")] = ""
    quantisation: Annotated[
        str | None,
        typer.Option(help="How the weights are quantised. Default: what the config says."),
    ] = None


@dataclass(frozen=True)
class EngineOptions:
    """How an engine arranges its pages: the fields of `EngineSettings`. Each is an option."""

    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 1
    dcp: Annotated[
        int,
        typer.Option(
            "--decode-context-parallel",
            min=1,
            help="Ranks that share the tokens of attention (vLLM decode_context_parallel_size).",
        ),
    ] = 1
    pcp: Annotated[
        int,
        typer.Option(
            "--prefill-context-parallel",
            min=1,
            help="Multiplies the ranks (vLLM prefill_context_parallel_size).",
        ),
    ] = 1
    interleave_tokens: Annotated[
        int,
        typer.Option(
            "--kv-interleave",
            min=1,
            help="Consecutive tokens on each of the ranks that share tokens (vLLM "
            "cp_kv_cache_interleave_size).",
        ),
    ] = 1
    layers_per_stage: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Layers of each pipeline stage. Default: evenly, as vLLM divides them.",
        ),
    ] = None
    conv_layout: Annotated[
        Literal["SD", "DS"], typer.Option(help="Innermost axis of conv states: channels or taps.")
    ] = "SD"
    matrix_order: Annotated[
        Literal["VK", "KV"],
        typer.Option(help="Axes of a head's matrix in delta nets, KDA and linear attention."),
    ] = "VK"
    page_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in an attention page. Default: 16, or what an indexer's kernels need.",
        ),
    ] = None
    pages_per_block: Annotated[
        int, typer.Option(min=1, help="Pages that a block id stands for.")
    ] = 1
    kv_order: Annotated[
        Literal["HND", "NHD", "HDN"],
        typer.Option(
            help="Heads or tokens first in an attention page. HDN: keys with tokens innermost, as "
            "in vLLM's attention on the CPU."
        ),
    ] = "HND"
    kv_packed: Annotated[
        bool,
        typer.Option(
            "--kv-packed/--kv-apart", help="Keys and values in one region, or in two regions."
        ),
    ] = True
    cross_layer_blocks: Annotated[
        bool, typer.Option("--cross-layer-blocks", help="A block holds the pages of all layers.")
    ] = False
    conv_rows_extra: Annotated[
        int,
        typer.Option(
            "--speculative-tokens",
            min=0,
            help="Rows for speculative tokens after the conv window.",
        ),
    ] = 0
    page_align_bytes: Annotated[
        int, typer.Option(min=1, help="Pages are padded to a multiple of this.")
    ] = 1
    mixer_inputs: Annotated[
        bool,
        typer.Option(
            "--mixer-inputs",
            help="Keep the inputs of the mixers, so that a D may recompute conv states.",
        ),
    ] = False
    projections: Annotated[
        bool,
        typer.Option(
            "--projections", help="Offer in-projection weights to recompute conv states with."
        ),
    ] = False
    null_block: Annotated[
        int | None,
        typer.Option(
            min=0, help="The block id that stands for no block of a request. Default: none."
        ),
    ] = None
    whole_blocks: Annotated[
        bool,
        typer.Option(
            "--whole-blocks",
            help="The engine keeps full blocks for other prompts (prefix caching): the first block "
            "of a window is filled from its beginning.",
        ),
    ] = False


@app.command("from-config")
@connects
def from_config(
    config: ConfigPath,
    *,
    model: ModelOptions,
    engine: EngineOptions,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print what was read and assumed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the layout of a model with a Hugging Face config.json as JSON.

    Prints on stderr, with --json as JSON, which value was taken from which key of which file, and
    what was assumed. Keys that the config leaves out have the defaults of transformers, if that is
    installed (restow[engine]); without it a missing key is refused by its name.

    If nothing identifies the static scales of a quantised checkpoint, the layout is for looking at:
    it says so (scales: unknown), as a warning does, and a broker refuses its engine.
    """
    from restow.broker.cli.common.files import read_model_config
    from restow.broker.cli.settings.config_options import (
        counts_of,
        default_page_tokens,
        scales_of,
        weights_fingerprint,
    )
    from restow.broker.cli.views.plan_views import show_readings
    from restow.broker.families import EngineSettings, build_layout
    from restow.broker.families.hf import Readings, model_from_hf_config
    from restow.broker.layout import DType, check_layout
    from restow.broker.layout.json_form import layout_to_json
    from restow.broker.layout.values import UNKNOWN_SCALES

    readings = Readings()
    known = weights_fingerprint(config, readings) if model.revision is None else model.revision
    scales = scales_of(model.kv_scales, model.kv_scales_fingerprint, known)
    kv, conv, ssm, computed = (
        None if dtype is None else DType.parse(dtype)
        for dtype in (model.kv_dtype, model.conv_dtype, model.ssm_dtype, model.dtype)
    )
    content, quant_config = read_model_config(config)
    spec = model_from_hf_config(
        *(content, kv, conv, ssm, scales),
        dtype=computed,
        quant_config=quant_config,
        readings=readings,
        draft_layers=model.draft_layers,
        revision=known,
        looking=True,
    )
    settings: dict[str, Any] = {
        **vars(engine),
        "page_tokens": engine.page_tokens or default_page_tokens(spec, readings),
        "layers_per_stage": counts_of(engine.layers_per_stage),
    }
    quantisation = spec.quantisation if model.quantisation is None else model.quantisation
    spec = replace(
        spec, name=model.name or spec.name, adapter=model.adapter, quantisation=quantisation
    )
    layout = build_layout(spec, EngineSettings(**settings))
    check_layout(layout)
    if not quiet:
        show_readings(readings, as_json)
    if not as_json and any(field.scales == UNKNOWN_SCALES for field in layout.model.fields):
        why = next(reading.note for reading in readings if reading.value == UNKNOWN_SCALES)
        words = (
            "this layout is for looking at, and a broker refuses its engine: the scales of keys "
        )
        typer.secho(f"warning: {words} and values have no name: {why}", fg="yellow", err=True)
    print_json(layout_to_json(layout))


@app.command()
def check(file: JsonFile, as_json: JsonOption = False) -> None:
    """Prove that a layout is whole: it holds every element, and claims no byte twice."""
    from dataclasses import asdict

    from restow.broker.cli.common.files import read_layout
    from restow.broker.cli.views.plan_views import show_layout
    from restow.broker.layout import digest
    from restow.broker.layout.difference import scaled_fields, shared_tokens, summarize
    from restow.broker.layout.values import IDENTITY_PARTS

    layout = read_layout(file)
    ranks = [summarize(rank) for rank in layout.ranks]
    if as_json:
        summary = {
            "ok": True,
            "digest": digest(layout),
            "model": layout.model.name,
            **{part: getattr(layout.model, part) for part in IDENTITY_PARTS},
            "fields": len(layout.model.fields),
            "scales": scaled_fields(layout.model),
            "shared_tokens": {
                group: {"context_parts": parts, "interleave_tokens": run}
                for group, (parts, run) in shared_tokens(layout).items()
            },
            "ranks": [asdict(rank) for rank in ranks],
        }
        print_json(summary)
    else:
        show_layout(layout, ranks)


@app.command()
def diff(left: JsonFile, right: JsonFile, as_json: JsonOption = False) -> None:
    """Say how two layouts differ. Exits with 0 if they are equal, with 4 if they differ."""
    from dataclasses import asdict

    from restow.broker.cli.common.files import read_layout
    from restow.broker.cli.views.plan_views import show_differences
    from restow.broker.layout.difference import differences

    unequal = differences(read_layout(left), read_layout(right))
    if as_json:
        print_json(
            {"equal": not unequal, "differences": [asdict(difference) for difference in unequal]}
        )
    else:
        show_differences(unequal, left.name, right.name)
    if unequal:
        raise typer.Exit(FOUND)


def plan(
    source: JsonFile,
    destination: JsonFile,
    strategy: Annotated[Strategy, typer.Option(help="How the state travels.")] = Strategy.AUTO,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also show the boxes, replicas and pieces of every field."),
    ] = False,
    allow_narrowing: Annotated[
        bool, typer.Option("--allow-narrowing", help="Plan even if D's types round P's values.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 8192,
    costs: CostsOption = None,
    svg: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the moves and the pages into this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what each rank of DESTINATION reads from which rank of SOURCE."""
    from restow.broker.cli.common.files import read_layout, read_object, write_text
    from restow.broker.cli.views.plan_views import plan_json, show_costs_used, show_plan
    from restow.broker.draw.explain import explain as explain_plan
    from restow.broker.draw.picture import make_picture
    from restow.broker.planner import CostModel, check_exact, make_plan

    made = make_plan(read_layout(source), read_layout(destination))
    if not allow_narrowing:
        check_exact(made)
    model = CostModel() if costs is None else CostModel.of(read_object(costs))
    ranks = explain_plan(made, strategy, tokens, model)
    picture = make_picture(made, ranks, tokens) if svg or explain else None
    if svg and picture:
        from restow.broker.draw.svg import plan_svg

        write_text(svg, plan_svg(picture))
    if as_json:
        print_json(plan_json(made, ranks, tokens, model, picture if explain else None))
    else:
        show_plan(made, ranks, tokens, picture if explain else None)
        if explain:
            show_costs_used(model)
