"""Which engines hold the beginning of a prompt, asked of the broker: a hint, soon, or nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession

from restow.broker.client import (
    AsyncAdminClient,
    BrokerCallError,
    BrokerUnreachableError,
    Credentials,
    PrefixChain,
    chain_of,
)
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger
from restow.broker.router.bodies import Body
from restow.broker.router.engines import NOBODY, Engines, Held
from restow.broker.router.token_ids import token_ids_of

MAX_TOKENS = 65_536 * 16
"""Of a prompt, as many as a call may name; what lies behind has no part in the choice."""
MAX_HOLDERS = 100
PAUSE = 20
"""A broker that was waited for in vain is left alone for so many times as long: then waiting takes
a twentieth of the time at most, and one slow answer spoils few choices."""


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
    """Asks for each prompt who holds its beginning. Belongs to one event loop.

    Whatever goes wrong, the answer is that nobody does: the router then chooses as without it.
    """

    def __init__(
        self, http: ClientSession, settings: FindSettings, prefill: Engines, decode: Engines
    ) -> None:
        """Ask about the engines of both sides that have an id.

        Raises a `TrustError` and `AddressInvalidError`.
        """
        self._http, self._prefill = http, prefill
        self._patience_s = settings.patience_s
        ids = {one.engine_id for one in (*prefill.engines, *decode.engines)} - {""}
        self._ids = deque(sorted(ids))
        """The first is asked for by: its model is that of all."""
        self._client = AsyncAdminClient(settings.broker, credentials=settings.credentials)
        self._aside_until_s = 0.0
        self._trouble = ""
        self._log = get_logger("restow.router")

    async def holders(self, path: str, body: Body, headers: Mapping[str, str]) -> Held:
        """Who holds how much of a request's prompt, by engine id."""
        if not self._ids or time.monotonic() < self._aside_until_s:
            return NOBODY
        chain = await self._chain(path, body, headers)
        return NOBODY if chain is None else await self._found(chain)

    async def _chain(self, path: str, body: Body, headers: Mapping[str, str]) -> PrefixChain | None:
        """The hashes of its prompt, as engines have them; None: they are not known in time."""
        salt = body.get("cache_salt") or ""
        engine = self._prefill.choose(())
        try:
            async with asyncio.timeout(self._patience_s):
                token_ids = await token_ids_of(self._http, engine, path, body, headers)
                if token_ids is None or not isinstance(salt, str):
                    return None
                # Beside the loop: of a very long prompt this takes tens of milliseconds.
                chain = await asyncio.to_thread(chain_of, token_ids[:MAX_TOKENS], salt=salt)
        except (ClientError, ValueError, TimeoutError):
            return None
        return chain if chain.hashes else None

    async def _found(self, chain: PrefixChain) -> Held:
        try:
            async with asyncio.timeout(self._patience_s):
                (holders,) = await self._client.find(
                    [chain], engine_id=self._ids[0], limit=MAX_HOLDERS
                )
        except (BrokerUnreachableError, TimeoutError) as error:
            self._aside_until_s = time.monotonic() + PAUSE * self._patience_s
            self._say(str(error) or f"no answer in {self._patience_s * 1000:.0f} ms")
            return NOBODY
        except BrokerCallError as error:
            self._ids.rotate()  # if this engine is not there, another may be
            self._say(error.message)
            return NOBODY
        except RestowError as error:  # of the router's own, such as a token that it can't read
            self._say(error.message)
            return NOBODY
        self._say("")
        return {one.engine_id: one for one in holders}

    def _say(self, trouble: str) -> None:
        """Log what is wrong when it begins, and that it is over."""
        if bool(trouble) != bool(self._trouble):
            self._log.warning("finding holders", works=not trouble, detail=trouble)
        self._trouble = trouble

    async def close(self) -> None:
        """Let the broker go."""
        await self._client.close()
