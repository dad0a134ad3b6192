"""The calls to Kubernetes' API, of Leases in one namespace."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import (
    ClientConnectorCertificateError,
    ClientError,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
)

from restow.broker.kubernetes.access import KubernetesAccess
from restow.broker.kubernetes.errors import (
    KubernetesError,
    KubernetesUnreachableError,
    typed_error,
)

Object = dict[str, Any]
"""As JSON has it."""
WATCH_S = 300
"""A watch is begun anew so often: another API server may have it then."""
MAX_LINE_BYTES = 2 << 20
"""Of an object there may be 1.5 MiB."""


class WatchEvent(NamedTuple):
    """What became of an object."""

    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    found: Object


class LeasesApi:
    """Asks an API server. On one loop; `close` it in the end.

    All calls raise a `KubernetesError`, and `KubernetesSettingsError` for files that can't be used.
    """

    def __init__(
        self, access: KubernetesAccess, namespace: str, call_s: float = 1.0, silent_s: float = 4.0
    ) -> None:
        """Prepare: the first call connects.

        A call may take ``call_s``; a watch that says nothing for ``silent_s`` is begun anew.
        """
        self.answered: Callable[[], None] = lambda: None
        """Called whenever the API has said something."""
        self._access, self._call_s, self._silent_s = access, call_s, silent_s
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._session: ClientSession | None = None
        self._context: ssl.SSLContext | None = None
        self._stamp: tuple[int, int] = (0, 0)

    async def close(self) -> None:
        """End all calls. May be repeated."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, name: str) -> Object:
        """The newest there is of that name. Raises `NotThereError`, too."""
        return await self._ask("GET", f"/{name}", "read a Lease")

    async def all(self, selector: str) -> Object:
        """The newest list of those with such labels."""
        return await self._ask("GET", f"?labelSelector={selector}", "list Leases")

    async def create(self, made: Object) -> Object:
        """Raises `ExistsError`, too."""
        return await self._ask("POST", "", "make a Lease", made)

    async def replace(self, changed: Object) -> Object:
        """Write what was read, if it is as it was then. Raises `ConflictError`, `NotThereError`."""
        return await self._ask("PUT", f"/{changed['metadata']['name']}", "write a Lease", changed)

    async def delete(self, name: str, **only: str) -> None:
        """Delete that one which has this ``uid``, ``resourceVersion``: else raise `ConflictError`.

        Raises `NotThereError`, too.
        """
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only}
        await self._ask("DELETE", f"/{name}", "delete a Lease", options)

    async def watch(
        self, selector: str, version: str, every_s: float
    ) -> AsyncGenerator[WatchEvent | None, None]:
        """Yield what happens after ``version``; None whenever that is nothing for ``every_s``.

        Ends when the API ends it, or when nothing came for long. Raises `GoneError`, too.
        """
        query = (
            f"?labelSelector={selector}&watch=true&resourceVersion={version}"
            f"&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
        )
        timeout = ClientTimeout(connect=self._call_s, sock_read=self._silent_s)
        next_line: asyncio.Task[bytes] | None = None
        try:
            async with self._begin("GET", query, None, timeout) as answer:
                if answer.status != 200:
                    raise _failed(answer.status, await answer.read(), "watch Leases")
                while True:
                    if next_line is None:
                        next_line = asyncio.create_task(answer.content.readuntil(b"\n"))
                    # One that is cancelled would lose what it has read.
                    await asyncio.wait({next_line}, timeout=every_s)
                    if not next_line.done():
                        yield None
                        continue
                    line, next_line = next_line.result(), None
                    if not line.strip():
                        return
                    self.answered()
                    yield _event(line)
        except ConnectionTimeoutError as error:
            raise self._unreachable(error) from None
        except TimeoutError:
            return
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError) as error:
            raise KubernetesError(f"Kubernetes' watch says what is no event: {error}") from None
        finally:
            if next_line is not None:
                next_line.cancel()
                await asyncio.gather(next_line, return_exceptions=True)

    async def _ask(self, method: str, path: str, asked: str, body: Object | None = None) -> Object:
        timeout = ClientTimeout(total=self._call_s)
        try:
            async with self._begin(method, path, body, timeout) as answer:
                said = await answer.read()
                if answer.status < 429:  # else it says that it can't
                    self.answered()
                if answer.status >= 300:
                    raise _failed(answer.status, said, asked)
                found = json.loads(said)
            if not isinstance(found, dict):
                raise ValueError(f"no object: {found!r}")
        except TimeoutError:
            raise KubernetesUnreachableError(
                f"Kubernetes' API at {self._access.url} does not answer within {self._call_s:g} s"
            ) from None
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None
        except ValueError:
            raise KubernetesError(
                f"what answers at {self._access.url} says no object in JSON: is it Kubernetes' API?"
            ) from None
        return found

    def _begin(self, method: str, path: str, body: Object | None, timeout: ClientTimeout) -> Any:
        if self._session is None:
            self._session = ClientSession(read_bufsize=MAX_LINE_BYTES)
        headers = {
            "Authorization": f"Bearer {self._access.bearer()}",
            "Accept": "application/json",
        }
        return self._session.request(
            method,
            f"{self._access.url}{self._path}{path}",
            json=body,
            headers=headers,
            ssl=self._checked_by(),
            timeout=timeout,
            allow_redirects=False,
        )

    def _checked_by(self) -> ssl.SSLContext:
        """Anew when the authority was renewed."""
        try:
            found = self._access.ca.stat()
            stamp = (found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = (0, 0)
        if self._context is None or stamp != self._stamp:
            self._context, self._stamp = self._access.authorities(), stamp
        return self._context

    def _unreachable(self, error: Exception) -> KubernetesUnreachableError:
        why = str(error) or type(error).__name__
        if isinstance(error, ClientConnectorCertificateError):
            why = f"its certificate is not accepted by {self._access.ca}: {why}"
        return KubernetesUnreachableError(
            f"Kubernetes' API does not answer at {self._access.url} ({why})"
        )


def _event(line: bytes) -> WatchEvent:
    said = json.loads(line)
    kind, found = said["type"], said["object"]
    if kind == "ERROR":
        raise _of_status(int(found.get("code") or 0), found, "watch Leases")
    return WatchEvent(kind, found)


def _failed(status: int, said: bytes, asked: str) -> KubernetesError:
    try:
        found = json.loads(said)
    except ValueError:
        found = {}
    return _of_status(status, found if isinstance(found, dict) else {}, asked)


def _of_status(status: int, found: Mapping[str, Any], asked: str) -> KubernetesError:
    return typed_error(
        status, str(found.get("reason") or ""), str(found.get("message") or "no words"), asked
    )
