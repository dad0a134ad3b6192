"""Answers of vLLM's HTTP server: what counts of them, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import ClientSession


async def said(
    http: ClientSession, base: str, path: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask, and return what counts of the answer, which comes in one piece or streamed."""
    asked = {"model": "model", "temperature": 0.0, "return_token_ids": True, **body}
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    async with http.post(f"{base}{path}", json=asked) as response:
        text = await response.text()
        assert response.ok, text
    if not asked.get("stream"):
        return whole(json.loads(text))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return joined([json.loads(line) for line in lines])


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what counts of an answer in one piece, by choice."""
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    choices = {
        one["index"]: {
            "text": one["message"]["content"] if "message" in one else one["text"],
            "ids": one["token_ids"],
            "end": (one["finish_reason"], one.get("stop_reason")),
            "logprobs": one.get("logprobs"),
        }
        for one in answer["choices"]
    }
    return {"usage": usage, "choices": choices}


def rounded(told: Any) -> Any:
    """Return an answer whose probabilities need only be close: sums are taken in other steps."""
    if isinstance(told, float):
        return pytest.approx(told, abs=0.02)
    if isinstance(told, list):
        return [rounded(one) for one in told]
    return {key: rounded(one) for key, one in told.items()} if isinstance(told, dict) else told


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what counts of a stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    for event in events:
        if event.get("usage"):
            usage = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
        for one in event["choices"]:
            known = choices.setdefault(one["index"], {"text": "", "ids": [], "end": None})
            delta = one["delta"].get("content") if "delta" in one else one["text"]
            known["text"] += delta or ""
            known["ids"] += one.get("token_ids") or []
            if one["finish_reason"]:
                known["end"] = (one["finish_reason"], one.get("stop_reason"))
    return {"usage": usage, "choices": choices}
