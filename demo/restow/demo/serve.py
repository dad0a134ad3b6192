"""Serve an engine of the recall model over HTTP, to be used behind a router.

It serves the part of ``POST /v1/completions`` that routers for vLLM's connectors use, with the same
``kv_transfer_params``: P gets ``{"do_remote_decode": true, "handoff_id": ID}`` and D
``{"do_remote_prefill": true, "handoff_id": ID}``. Without them the engine serves alone.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import typer
from aiohttp import web

from restow.broker.errors import RestowError
from restow.broker.families import ConvLayout
from restow.demo.experiment import errors_as_lines
from restow.demo.recall import task
from restow.demo.split import Broker, Conv, PageTokens, Sockets, Tp, running_engine
from restow.demo.transformers.engine import Engine, HandoffFailedError

MODEL = "recall"
MAX_PROMPT_TOKENS = 512
MAX_TOKENS = 64
LOOK_S = 1.0

T = TypeVar("T")
Body = dict[str, Any]


class BadRequestError(RestowError, status="INVALID_ARGUMENT", reason="ARGUMENT_INVALID"):
    """A body that is no completion request."""


class EngineServer:
    """Serves completions from an engine, and computes on one thread."""

    def __init__(self, engine: Engine) -> None:
        """Serve an engine that has been started."""
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post("/v1/completions", self.complete)
        app.cleanup_ctx.append(self._life)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        yield
        watching.cancel()
        self._thread.shutdown()

    async def _watch(self) -> None:
        """End when a worker has ended, since the engine can't serve any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            if lost := self._engine.lost_ranks:
                words = f"the workers of ranks {lost} have ended, and so does the engine"
                print(words, file=sys.stderr, flush=True)
                raise web.GracefulExit

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the engine is registered and its agents are connected."""
        return web.json_response({"status": "ok", "model": MODEL})

    async def complete(self, request: web.Request) -> web.Response:
        """Answer a request, or refuse it with a reason."""
        try:
            return web.json_response(await self._answer(await _body(request)))
        except BadRequestError as error:
            return _refused(error, HTTPStatus.BAD_REQUEST)
        except RestowError as error:
            return _refused(error, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _answer(self, body: Body) -> Body:
        prompt, steps = _prompt(body.get("prompt")), _steps(body.get("max_tokens", 6))
        params = body.get("kv_transfer_params") or {}
        if not isinstance(params, dict):
            raise BadRequestError("kv_transfer_params is no JSON object")
        handoff_id = str(params.get("handoff_id") or uuid.uuid4())
        if params.get("do_remote_decode"):
            await self._compute(lambda: self._engine.prefill(handoff_id, prompt))
            pointer = {"do_remote_prefill": True, "handoff_id": handoff_id}
            return {**_completion(prompt, ()), "kv_transfer_params": pointer}
        if params.get("do_remote_prefill"):
            asked = self._engine.ask(handoff_id, prompt)
            try:
                ended = await asyncio.shield(asyncio.wrap_future(asked.end))
            except asyncio.CancelledError:  # the client has gone
                self._engine.forget(asked)
                raise
            decoded = await self._compute(lambda: self._engine.decode(asked, steps))
            moved = {"handoff_id": handoff_id, "bytes": ended.bytes}
            return {**_completion(prompt, decoded.token_ids), "kv_transfer_params": moved}
        alone = await self._compute(lambda: self._engine.decode_alone(prompt, steps))
        return _completion(prompt, alone.token_ids)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _prompt(text: object) -> tuple[int, ...]:
    if not isinstance(text, str):
        raise BadRequestError("prompt must be a string")
    try:
        token_ids = task.encode(text)
    except KeyError as error:
        raise BadRequestError(f"the model does not know the word {error}") from None
    if not 2 <= len(token_ids) <= MAX_PROMPT_TOKENS:
        raise BadRequestError(
            f"the prompt has {len(token_ids)} words: from 2 to {MAX_PROMPT_TOKENS} are served"
        )
    return token_ids


def _steps(count: object) -> int:
    if not isinstance(count, int) or not 1 <= count <= MAX_TOKENS:
        raise BadRequestError(f"max_tokens must be from 1 to {MAX_TOKENS}, not {count!r}")
    return count


def _completion(prompt: tuple[int, ...], token_ids: tuple[int, ...] | list[int]) -> Body:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": task.decode(token_ids), "finish_reason": "length"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(token_ids)},
    }


def _refused(error: RestowError, status: HTTPStatus) -> web.Response:
    reason = error.reason
    if isinstance(error, HandoffFailedError):
        reason = str(error.subject.get("handoff_reason", reason))
    fault = {"message": error.message, "type": reason, "code": status.value}
    return web.json_response({"error": fault}, status=status)


async def _body(request: web.Request) -> Body:
    """Return the request's JSON object. Raises `BadRequestError`."""
    try:
        body = await request.json()
    except ValueError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body is no JSON object")
    return body


def serve(
    name: Annotated[str, typer.Option(help="The engine's id.")],
    broker: Broker = None,
    tp: Tp = 1,
    conv_layout: Conv = ConvLayout.SD,
    page_tokens: PageTokens = 16,
    socket: Sockets = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any.")] = 8100,
) -> None:
    """Serve an engine until the process is told to stop."""
    with running_engine(name, broker, tp, conv_layout, page_tokens, socket) as engine:
        app = EngineServer(engine).app()
        web.run_app(
            app,
            host=host,
            port=port,
            handler_cancellation=True,
            print=lambda text: print(text, flush=True),
        )


if __name__ == "__main__":
    with errors_as_lines():
        typer.run(serve)
