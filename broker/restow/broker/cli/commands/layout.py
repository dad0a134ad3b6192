"""``restow layout`` makes a layout from a model's config, checks one, or compares two."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from restow.broker.cli.output import FOUND, print_json
from restow.broker.cli.settings.options import ConfigPath, JsonFile, JsonOption

app = typer.Typer(help="Make, check and compare layouts.", no_args_is_help=True)

StateDType = Literal["float32", "bfloat16", "float16"]
KvDType = Literal[
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn_x2"
]


@app.command("from-config")
def from_config(
    config: ConfigPath,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 1,
    decode_context_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks that share out the tokens of attention (vLLM's "
            "decode_context_parallel_size).",
        ),
    ] = 1,
    prefill_context_parallel: Annotated[
        int,
        typer.Option(
            min=1,
            help="So many times as many ranks (vLLM prefill_context_parallel_size).",
        ),
    ] = 1,
    kv_interleave: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens in turn on each of the ranks that share them out (vLLM "
            "cp_kv_cache_interleave_size).",
        ),
    ] = 1,
    layers_per_stage: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Layers of each pipeline stage. Default: evenly, as vLLM cuts them.",
        ),
    ] = None,
    conv_layout: Annotated[
        Literal["SD", "DS"], typer.Option(help="Innermost axis of conv states: channels or taps.")
    ] = "SD",
    matrix_order: Annotated[
        Literal["VK", "KV"],
        typer.Option(help="Axes of a head's matrix in delta nets, KDA and linear attention."),
    ] = "VK",
    page_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in an attention page. Default: 16, or what an indexer's kernels take.",
        ),
    ] = None,
    pages_per_block: Annotated[int, typer.Option(min=1, help="Pages that a block id names.")] = 1,
    kv_order: Annotated[
        Literal["HND", "NHD", "HDN"],
        typer.Option(
            help="Heads or tokens first in an attention page; HDN: keys with tokens innermost, as "
            "vLLM's attention on the CPU."
        ),
    ] = "HND",
    kv_packed: Annotated[
        bool,
        typer.Option(
            "--kv-packed/--kv-apart",
            help="Keys and values side by side, or in regions of their own.",
        ),
    ] = True,
    cross_layer_blocks: Annotated[
        bool,
        typer.Option(
            "--cross-layer-blocks", help="Blocks hold the pages of all layers, side by side."
        ),
    ] = False,
    dtype: Annotated[
        StateDType | None,
        typer.Option(
            help="Type that the engine computes in. Default: what vLLM's auto makes of the "
            "model's, so bfloat16 for float32."
        ),
    ] = None,
    kv_dtype: Annotated[
        KvDType | None,
        typer.Option(help="Type of keys and values. Default: the checkpoint's, or the model's."),
    ] = None,
    kv_scales: Annotated[
        Literal["none", "static", "per-token-head", "per-block", "per-16"] | None,
        typer.Option(
            help="Scales of float8 or int8 KV; per-block: of latents beside an indexer "
            "(vLLM fp8_ds_mla); per-16: of float4_e2m1fn_x2 (vLLM nvfp4, but not on a B200). "
            "Default: none, where there can be none."
        ),
    ] = None,
    kv_scales_fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Tells static scales apart: equal on P and D exactly when their scales are. "
            "Default: the revision.",
        ),
    ] = None,
    conv_dtype: Annotated[
        StateDType | None, typer.Option(help="Type of conv states. Default: the model's.")
    ] = None,
    ssm_dtype: Annotated[
        StateDType | None, typer.Option(help="Type of SSM states. Default: the family's.")
    ] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Rows for speculative tokens behind the conv window.")
    ] = 0,
    draft_layers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draft layers (MTP) that the engine runs; the other side may have none. As many "
            "as the config says, for vLLM.",
        ),
    ] = 0,
    page_align_bytes: Annotated[
        int, typer.Option(min=1, help="Pages are padded to a multiple of this.")
    ] = 1,
    mixer_inputs: Annotated[
        bool,
        typer.Option(
            "--mixer-inputs",
            help="Keep what the mixers read, so that a D may rebuild conv states.",
        ),
    ] = False,
    projections: Annotated[
        bool,
        typer.Option(
            "--projections", help="Offer in-projection weights, to rebuild conv states with."
        ),
    ] = False,
    null_block: Annotated[
        int | None,
        typer.Option(min=0, help="The id in lists where a request has no block. Default: none."),
    ] = None,
    whole_blocks: Annotated[
        bool,
        typer.Option(
            "--whole-blocks",
            help="The engine keeps full blocks for other prompts (prefix caching): the first block "
            "of a window is filled from its beginning.",
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model, equal on both sides. Default: its model_type."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Tells weights apart: equal on P and D exactly when their weights are. Default: "
            "a fingerprint of the weights in the folder, if it is given and has some."
        ),
    ] = None,
    adapter: Annotated[
        str, typer.Option(help="The adapter that all of the engine's requests go through.")
    ] = "",
    quantisation: Annotated[
        str | None,
        typer.Option(help="How the weights are quantised. Default: what the config says."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing of what was read and assumed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the layout of a model with a Hugging Face config.json as JSON.

    Which value was taken from which key of which file, and what was assumed, is said on stderr:
    with --json as JSON.
    """
    from dataclasses import replace

    from restow.broker.cli.files import read_model_config
    from restow.broker.cli.settings.config_options import (
        counts_of,
        default_page_tokens,
        scales_of,
        weights_fingerprint,
    )
    from restow.broker.cli.views.plan_views import show_readings
    from restow.broker.families import (
        ConvLayout,
        EngineSettings,
        KvOrder,
        MatrixOrder,
        Readings,
        build_layout,
        model_from_hf_config,
    )
    from restow.broker.layout import DType, check_layout
    from restow.broker.layout.json_form import layout_to_json

    readings = Readings()
    known = weights_fingerprint(config, readings) if revision is None else revision
    scales = scales_of(kv_scales, kv_scales_fingerprint, known)
    kv, conv, ssm, computed = (
        None if t is None else DType.parse(t) for t in (kv_dtype, conv_dtype, ssm_dtype, dtype)
    )
    content, quant_config = read_model_config(config)
    model = model_from_hf_config(
        *(content, kv, conv, ssm, scales),
        dtype=computed,
        quant_config=quant_config,
        readings=readings,
        draft_layers=draft_layers,
        revision=known,
    )
    settings = EngineSettings(
        tp=tp,
        page_tokens=page_tokens or default_page_tokens(model, readings),
        pages_per_block=pages_per_block,
        conv_layout=ConvLayout(conv_layout),
        kv_order=KvOrder(kv_order),
        conv_rows_extra=speculative_tokens,
        page_align_bytes=page_align_bytes,
        pp=pp,
        layers_per_stage=counts_of(layers_per_stage),
        kv_packed=kv_packed,
        mixer_inputs=mixer_inputs,
        projections=projections,
        null_block=null_block,
        cross_layer_blocks=cross_layer_blocks,
        matrix_order=MatrixOrder(matrix_order),
        pcp=prefill_context_parallel,
        dcp=decode_context_parallel,
        interleave_tokens=kv_interleave,
        whole_blocks=whole_blocks,
    )
    model = replace(
        model,
        name=name or model.name,
        adapter=adapter,
        quantisation=model.quantisation if quantisation is None else quantisation,
    )
    layout = build_layout(model, settings)
    check_layout(layout)
    if not quiet:
        show_readings(readings, as_json)
    print_json(layout_to_json(layout))


@app.command()
def check(file: JsonFile, as_json: JsonOption = False) -> None:
    """Prove that a layout is whole: every element held, no byte claimed twice."""
    from dataclasses import asdict

    from restow.broker.cli.files import read_layout
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
    """Say in what two layouts differ. Exits with 0 if in nothing, with 4 if in something."""
    from dataclasses import asdict

    from restow.broker.cli.files import read_layout
    from restow.broker.cli.views.plan_views import show_differences
    from restow.broker.layout.difference import differences

    found = differences(read_layout(left), read_layout(right))
    if as_json:
        print_json({"equal": not found, "differences": [asdict(one) for one in found]})
    else:
        show_differences(found, left.name, right.name)
    if found:
        raise typer.Exit(FOUND)
