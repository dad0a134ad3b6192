"""`restow plan --svg`: a file that browsers, people and tests can read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from bench.model_sizes import fifty_two_layers, real_models
from cli.typed import failed, printed
from laws.strategies import Case, any_cases
from restow.broker.draw.explain import explain
from restow.broker.draw.picture import Picture, make_picture
from restow.broker.draw.svg import WIDTH, plan_svg
from restow.broker.families import ConvLayout, EngineSettings, KvOrder, ModelSpec, build_layout
from restow.broker.layout import Layout, check_layout
from restow.broker.planner import make_plan

pytestmark = pytest.mark.sampled

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """<script>alert("&")</script>' onload='alert(1)' &#60;é]]>""" + "x" * 500
MODELS = real_models()
Settings = EngineSettings
DS, NHD = ConvLayout.DS, KvOrder.NHD
PAIRS = [
    ("nemotron3-nano-30b", Settings(tp=2, conv_layout=DS), Settings(tp=4, conv_layout=DS)),
    ("nemotron3-nano-30b", Settings(tp=4), Settings(tp=2, conv_layout=DS, conv_rows_extra=2)),
    ("nemotron3-nano-30b", Settings(), Settings()),
    ("granite4-h-small-like", Settings(), Settings(tp=2)),
    ("granite4-h-small-like", Settings(tp=4, pp=3), Settings(tp=2, pp=2)),
    ("qwen3-next-80b", Settings(tp=2, kv_packed=False), Settings(tp=4, conv_layout=DS)),
    ("kimi-linear-48b-like", Settings(tp=4), Settings(tp=1, page_tokens=64)),
    ("jamba-mini-like", Settings(kv_order=NHD), Settings(tp=2)),
    ("gemma-swa-like", Settings(tp=2), Settings(tp=4, page_tokens=64, page_align_bytes=1 << 17)),
    ("falcon-h1-34b-like", Settings(tp=1), Settings(tp=2)),
    ("lfm2-like", Settings(tp=8), Settings(tp=2)),
]


def picture_between(source: Layout, destination: Layout) -> Picture:
    plan = make_plan(source, destination)
    return make_picture(plan, explain(plan), 8192)


def drawn(model: ModelSpec, source: EngineSettings, destination: EngineSettings) -> str:
    layouts = (build_layout(model, settings) for settings in (source, destination))
    return plan_svg(picture_between(*layouts))


def text_spans(root: ElementTree.Element) -> Iterator[tuple[float, float, float, str]]:
    """Yield the height, the left and right ends and the words of every line of text."""
    for text in root.iter(f"{SVG}text"):
        words, look = "".join(text.itertext()), text.get("class", "").split()
        x, y, width = float(text.get("x", "0")), float(text.get("y", "0")), len(words) * 6.2
        width *= 1.8 if "h" in look else 1
        yield y, x - width if "e" in look else x, x if "e" in look else x + width, words


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    return [
        tuple(float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))  # type: ignore[misc]
        for rect in root.iter(f"{SVG}rect")
    ]


@pytest.mark.parametrize(("model", "source", "destination"), PAIRS)
def test_a_picture_is_self_contained_and_readable(
    model: str, source: EngineSettings, destination: EngineSettings
) -> None:
    svg = drawn(MODELS[model], source, destination)
    assert svg == drawn(MODELS[model], source, destination)
    assert len(svg) < 200_000
    root = ElementTree.fromstring(svg)  # noqa: S314
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {
        *("svg", "title", "desc", "style", "rect", "path", "text", "tspan"),
    }
    assert not re.search(r"href|@import|url\(|script|\bnan\b|\binf\b|\de[+-]\d", svg)
    titles = [root.find(f"{SVG}{name}") for name in ("title", "desc")]
    assert [one.get("id") for one in titles if one is not None and one.text] == ["title", "desc"]
    height = float(root.get("height", "0"))
    for x, y, width, high in boxes(root):
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + high <= height
    lines = sorted(text_spans(root))
    for index, (y, left, right, words) in enumerate(lines):
        assert 0 < y < height
        assert left >= 0, words
        assert right <= WIDTH, words
        for below, other_left, other_right, other in lines[index + 1 :]:
            if below - y >= 9:
                break
            assert right <= other_left + 1 or other_right <= left + 1, (words, other)


@settings(max_examples=60, derandomize=True)
@given(any_cases())
def test_any_layouts_can_be_drawn(case: Case) -> None:
    svg = plan_svg(picture_between(*case.layouts))
    root = ElementTree.fromstring(svg)  # noqa: S314
    height = float(root.get("height", "0"))
    assert all(w >= 0 and h >= 0 and y + h <= height for _, y, w, h in boxes(root))


def test_names_from_a_file_can_do_no_harm() -> None:
    layout = build_layout(MODELS["lfm2-like"], Settings(tp=2))
    names = {f.name: f"layers.{n}.{HOSTILE}" for n, f in enumerate(layout.model.fields)}
    fields = tuple(replace(f, name=names[f.name]) for f in layout.model.fields)
    ranks = tuple(
        replace(
            rank,
            regions=tuple(replace(r, name=r.name + HOSTILE) for r in rank.regions),
            shards=tuple(
                replace(s, field=names[s.field], region=s.region + HOSTILE) for s in rank.shards
            ),
        )
        for rank in layout.ranks
    )
    hostile = Layout(replace(layout.model, name=HOSTILE, fields=fields), ranks)
    check_layout(hostile)
    svg = plan_svg(picture_between(hostile, hostile))
    root = ElementTree.fromstring(svg.encode())  # noqa: S314
    assert "<script" not in svg
    assert any("<script>" in "".join(text.itertext()) for text in root.iter(f"{SVG}text"))


def test_what_a_big_plan_leaves_out_is_written_on_it() -> None:
    svg = drawn(MODELS["nemotron-h-8b-like"], Settings(tp=64), Settings(tp=32))
    assert "Only 8 of the 64 ranks of P, 4 of the 32 ranks of D" in svg
    whole = drawn(fifty_two_layers(), Settings(tp=8), Settings(tp=8, conv_layout=DS))
    assert "Only" not in whole
    assert len(whole) < 1_000_000


def test_as_a_command(layout_file: Callable[..., Path], tmp_path: Path) -> None:
    pair = layout_file("p", "--tp", 2), layout_file("d", "--tp", 4, "--conv-layout", "DS")
    file = tmp_path / "plan.svg"
    out = printed("plan", *pair, "--svg", file, "--json", "--strategy", "pack", "--tokens", 100)
    assert json.loads(out)["moves"]
    assert "conv.x, conv.B, conv.C, ssm by pack" in file.read_text()
    assert "prompt of 100 tokens" in file.read_text()
    first = file.read_bytes()
    printed("plan", *pair, "--svg", file, "--strategy", "pack", "--tokens", 100)
    assert file.read_bytes() == first
    assert printed("plan", *pair, "--svg", file).startswith("2 ranks to 4")


def test_a_file_that_can_not_be_written(layout_file: Callable[..., Path], tmp_path: Path) -> None:
    layout, file = layout_file("p"), tmp_path / "no" / "plan.svg"
    error = failed("plan", layout, layout, "--svg", file, "--json").json["error"]
    assert error["reason"] == "FILE_NOT_WRITABLE"
    assert error["subject"] == {"file": str(file)}
    assert error["message"] == f"{file} can't be written: No such file or directory"
