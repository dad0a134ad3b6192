"""The token ids of a request's prompt: the client's own, or asked of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import ClientSession

from restow.broker.client.engine.prefixes.content import MAX_TOKEN_ID
from restow.broker.router.bodies import Body
from restow.broker.router.engines import Engine

TOKENIZE: Final = "/tokenize"
SAID_WITH: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/completions": ("prompt", "model", "add_special_tokens"),
    "/v1/chat/completions": (
        *("messages", "model", "tools", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "chat_template_kwargs"),
    ),
}
"""By path: what of a request says its tokens; the first must be there."""


def own_token_ids(path: str, body: Body) -> list[int] | None:
    """Those that the client sent in place of a text; None: it did not."""
    prompt = body.get("prompt") if path == "/v1/completions" else None
    return prompt if isinstance(prompt, list) and are_token_ids(prompt) else None


def tokenize_body(path: str, body: Body) -> Body | None:
    """What an engine is asked; None: it has no words for such a request.

    A list of prompts is several handoffs, which may be held by different engines.
    """
    words = SAID_WITH.get(path)
    if words is None or not body.get(words[0]) or isinstance(body.get("prompt"), list):
        return None
    return {name: body[name] for name in words if name in body}


async def token_ids_of(
    http: ClientSession, engine: Engine, path: str, body: Body, headers: Mapping[str, str]
) -> list[int] | None:
    """The prompt's, by an engine's tokenizer and chat template; None: nobody says them.

    Raises `ClientError`, and `ValueError` for an answer that is no JSON.
    """
    if (own := own_token_ids(path, body)) is not None:
        return own
    if (asked := tokenize_body(path, body)) is None:
        return None
    url = engine.base + TOKENIZE
    async with http.post(url, json=asked, headers=headers) as response:
        said: Any = await response.json(content_type=None) if response.ok else None
    found = said.get("tokens") if isinstance(said, dict) else None
    return found if isinstance(found, list) and are_token_ids(found) else None


def are_token_ids(words: list[Any]) -> bool:
    """Whether they are whole numbers that tokens may have, and not none."""
    return bool(words) and all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in words)
