"""An HTTPS server that keeps Leases as an API server of Kubernetes does, for one account."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from broker.certificates import Authority
from forked.ports import free_port
from kubernetes_harness.store import Leases, Refused

NAMESPACE = "serving"
TOKEN = "a-token"  # noqa: S105 - of a test
PATH = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
HOST = "127.0.0.1"


class ApiServer:
    """Served in this process; can be away, silent, or do as asked and lose the answer."""

    def __init__(self, folder: Path) -> None:
        self.leases = Leases()
        self.port = free_port()
        self.account = folder / "account"
        self.account.mkdir()
        self._authority = Authority(folder, "kubernetes")
        (self.account / "ca.crt").write_bytes(self._authority.path.read_bytes())
        (self.account / "token").write_text(TOKEN)
        self.token = TOKEN
        """Who shows another one is not known."""
        self.may = {"GET", "POST", "PUT", "DELETE"}
        self.lost: set[str] = set()
        """Methods whose answers are lost once."""
        self.silent = False
        self.goes_on = asyncio.Event()
        self.calls: list[str] = []
        self._runner: web.AppRunner | None = None

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment that a pod has."""
        return {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(self.port)}

    async def start(self) -> None:
        pair = self._authority.issue(server=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        app = web.Application()
        for method, path, handler in (
            ("GET", "", self._all),
            ("POST", "", self._create),
            ("GET", "/{name}", self._get),
            ("PUT", "/{name}", self._replace),
            ("DELETE", "/{name}", self._delete),
        ):
            app.router.add_route(method, f"{PATH}{path}", partial(self._answer, handler))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port, ssl_context=context).start()

    async def stop(self) -> None:
        """Stop the server, and end all connections; the stored objects stay."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def hang(self) -> None:
        """Answer nobody any more."""
        self.silent = True
        self.goes_on.clear()

    async def go_on(self) -> None:
        self.silent = False
        self.goes_on.set()

    async def _answer(self, handler: Any, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.method)
        if self.silent:
            await self.goes_on.wait()
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if request.method not in self.may:
                raise Refused(403, "Forbidden", "leases.coordination.k8s.io is forbidden")
            answer: web.StreamResponse = await handler(request)
        except Refused as refused:
            return web.json_response(_status(refused), status=refused.code)
        if self.silent:
            await self.goes_on.wait()
        if request.method in self.lost:
            self.lost.discard(request.method)
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _all(self, request: web.Request) -> web.StreamResponse:
        words = unquote(request.query.get("labelSelector", ""))
        labels = dict(one.split("=") for one in words.split(",") if one)
        return web.json_response(self.leases.listed(labels))

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.leases.get(request.match_info["name"]))

    async def _create(self, request: web.Request) -> web.Response:
        return web.json_response(self.leases.create(await request.json()), status=201)

    async def _replace(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response(self.leases.replace(name, await request.json()))

    async def _delete(self, request: web.Request) -> web.Response:
        options = await request.json() if request.can_read_body else {}
        name, only = request.match_info["name"], options.get("preconditions") or {}
        return web.json_response(self.leases.delete(name, only))


def _status(refused: Refused) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": refused.message,
        "reason": refused.reason,
        "code": refused.code,
    }


@contextlib.asynccontextmanager
async def running_api(folder: Path) -> AsyncIterator[ApiServer]:
    server = ApiServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.go_on()
        await server.stop()
