"""A small router: every prompt goes to a prefill engine and a decode engine at the same moment.

Both get one handoff id. The decode engine waits at the broker until the state is there, so nobody
has to carry parameters from one answer into the next request.

    python docs/examples/router.py --prefill http://localhost:8100 --decode http://localhost:8200

Speaks `/v1/completions` and `/v1/chat/completions`, streamed or not. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
HOP_HEADERS = frozenset({"connection", "content-length", "content-encoding", "transfer-encoding"})


class Router:
    """Takes engines of each side in turns."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Route to these base addresses."""
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._http: ClientSession | None = None

    async def session(self, app: web.Application) -> Any:
        """Keep one HTTP session while the router runs."""
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._http:
            yield

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Ask both sides; the client hears what the decode engine says."""
        body = await request.json()
        handoff_id = str(uuid.uuid4())
        prefill = asyncio.create_task(
            self._ask(next(self._prefill), request.path, _prefill_body(body, handoff_id))
        )
        decode = asyncio.create_task(
            self._ask(next(self._decode), request.path, _decode_body(body, handoff_id))
        )
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and (refusal := await _refusal(prefill)) is not None:
                return refusal  # the decode engine would wait for a state that never comes
            return await _passed_on(request, await decode)
        except ClientError as error:
            return web.json_response({"error": {"message": f"no engine: {error}"}}, status=502)
        finally:
            for task in (prefill, decode):
                task.cancel()
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().close()

    async def _ask(self, base: str, path: str, body: dict[str, Any]) -> ClientResponse:
        if self._http is None:
            raise RuntimeError("the router was not started")
        return await self._http.post(base + path, json=body)


def _prefill_body(body: dict[str, Any], handoff_id: str) -> dict[str, Any]:
    """One token: the engine cuts the prompt itself where the other one goes on."""
    params = {"do_remote_decode": True, "handoff_id": handoff_id}
    short = {key: value for key, value in body.items() if key != "stream_options"}
    lengths = dict.fromkeys(("max_tokens", "max_completion_tokens"), 1)
    return {**short, **lengths, "stream": False, "kv_transfer_params": params}


def _decode_body(body: dict[str, Any], handoff_id: str) -> dict[str, Any]:
    params = {"do_remote_prefill": True, "handoff_id": handoff_id}
    return {**body, "kv_transfer_params": params}


async def _refusal(prefill: asyncio.Task[ClientResponse]) -> web.Response | None:
    """The prefill engine's answer to the client, if it is one of failure."""
    response = prefill.result()
    text = await response.text()
    if response.status < 400:
        return None
    return web.Response(status=response.status, text=text, content_type=response.content_type)


async def _passed_on(request: web.Request, response: ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in response.headers.items() if k.lower() not in HOP_HEADERS}
    out = web.StreamResponse(status=response.status, headers=headers)
    await out.prepare(request)
    async for chunk in response.content.iter_any():
        await out.write(chunk)
    await out.write_eof()
    return out


def main() -> None:
    """Run the router."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    router = Router(options.prefill, options.decode)
    app = web.Application()
    app.cleanup_ctx.append(router.session)
    for path in PATHS:
        app.router.add_post(path, router.route)
    # A client that leaves takes its requests to the engines with it.
    web.run_app(
        app,
        port=options.port,
        handler_cancellation=True,
        print=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    main()
