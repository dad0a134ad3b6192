"""Which engines hold the beginning of a prompt, asked of the broker: a hint, soon, or nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientSession

from restow.broker.client import AsyncAdminClient, BrokerCallError, Credentials, chain_of
from restow.broker.client.engine.chains import MAX_TOKEN_ID
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.router.bodies import Body, decode_body
from restow.broker.router.engines import Engine, Held

MAX_TOKENS = 1 << 20
"""Of a prompt, as many as a call may name; the rest has no part in the choice."""
PAUSE = 20
"""A broker that did not answer in time is left alone for so many times as long."""


@dataclass(frozen=True, slots=True)
class FindSettings:
    """Whom to ask, and how long to wait for it."""

    patience_s: float
    """For the prompt's token ids, and again for the broker."""
    broker: str | None = None
    """None: RESTOW_BROKER or the default."""
    credentials: Credentials | None = None
    """None: those of the environment."""


class Finding:
    """Asks who holds a prompt. Whatever goes wrong, nobody does, and the choice is as without."""

    def __init__(self, http: ClientSession, settings: FindSettings, ids: set[str]) -> None:
        """Ask about engines by their ``ids``. Raises `TrustError` and `AddressInvalidError`."""
        self._http, self._patience_s = http, settings.patience_s
        self._ids = deque(sorted(ids - {""}))
        """The broker looks for engines of the model of the first."""
        self._client = AsyncAdminClient(settings.broker, credentials=settings.credentials)
        self._aside_until_s = 0.0
        self._trouble = ""
        self.close = self._client.close

    async def holders(
        self, engine: Engine | None, path: str, body: Body, headers: Mapping[str, str]
    ) -> Held:
        """Return who holds how much of a prompt, by engine id; ``engine`` tells its token ids."""
        salt = body.get("cache_salt") or ""
        if not self._ids or not isinstance(salt, str) or time.monotonic() < self._aside_until_s:
            return {}
        trouble, found = "", []
        try:
            async with asyncio.timeout(self._patience_s):
                token_ids = await self._token_ids(engine, path, body, headers)
                # In a thread: of a very long prompt this takes tens of milliseconds.
                chain = await asyncio.to_thread(chain_of, token_ids[:MAX_TOKENS], salt=salt)
        except (ClientError, ValueError, TimeoutError):
            return {}
        if not chain.hashes:
            return {}
        try:
            async with asyncio.timeout(self._patience_s):
                (found,) = await self._client.find([chain], engine_id=self._ids[0], limit=100)
        except BrokerCallError as error:
            self._ids.rotate()  # if the broker does not know this engine, it may know another
            trouble = error.message
        except (RestowError, TimeoutError) as error:
            self._aside_until_s = time.monotonic() + PAUSE * self._patience_s
            trouble = str(error) or f"no answer in {self._patience_s * 1000:.0f} ms"
        if bool(trouble) != bool(self._trouble):
            log = get_logger("restow.router")
            log.warning("finding holders", works=not trouble, detail=trouble)
        self._trouble = trouble
        return {one.engine_id: one for one in found}

    async def _token_ids(
        self, engine: Engine | None, path: str, body: Body, headers: Mapping[str, str]
    ) -> list[int]:
        """Return the prompt's tokens; none of what is no single prompt, or nobody tells."""
        prompt: Any = body.get("prompt") if path == "/v1/completions" else body.get("messages")
        if engine and prompt and not (path == "/v1/completions" and isinstance(prompt, list)):
            url = engine.base + "/tokenize"
            words = {**headers, "Content-Type": "application/json"}
            async with self._http.post(
                url, json=decode_body(body, None), headers=words, allow_redirects=False
            ) as response:
                said = await response.json(content_type=None) if response.status == 200 else None
            prompt = said.get("tokens") if isinstance(said, dict) else None
        ids = prompt if isinstance(prompt, list) else []
        return ids if all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in ids) else []
