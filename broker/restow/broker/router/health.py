"""Whether engines are well: each is asked every few seconds, and the router says what it heard."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from restow.broker.logs import get_logger
from restow.broker.router.engines import Engine, Engines

ANSWER_S = 5.0


class Health:
    """That of all engines. Belongs to one event loop."""

    def __init__(
        self, http: ClientSession, prefill: Engines, decode: Engines, look_s: float
    ) -> None:
        """Ask each engine every ``look_s``."""
        self._http, self._look_s = http, look_s
        self._sides = {"prefill": prefill, "decode": decode}
        self._log = get_logger("restow.router")

    async def watch(self) -> None:
        """Look after all of them for ever."""
        engines = [one for side in self._sides.values() for one in side.engines]
        await asyncio.gather(*(self._watch(one) for one in engines))

    async def _watch(self, engine: Engine) -> None:
        while True:
            healthy = await self._is_healthy(engine)
            if healthy != engine.healthy:
                engine.healthy = healthy
                self._log.warning("an engine's health", engine=engine.base, healthy=healthy)
            await asyncio.sleep(self._look_s)

    async def _is_healthy(self, engine: Engine) -> bool:
        try:
            async with self._http.get(
                engine.base + "/health", timeout=ClientTimeout(total=ANSWER_S)
            ) as response:
                return bool(response.status == HTTPStatus.OK)
        except (ClientError, TimeoutError):
            return False

    async def answer(self, request: web.Request) -> web.Response:
        """200 where each side has an engine that is well, and how each of them is."""
        found = {
            name: {engine.base: engine.healthy for engine in side.engines}
            for name, side in self._sides.items()
        }
        well = all(any(side.values()) for side in found.values())
        status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
        return web.json_response(found, status=status)
