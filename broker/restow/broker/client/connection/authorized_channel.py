"""`channel_showing` opens a channel whose calls show credentials, the token without gRPC's plugins.

What a plugin leaves to end, a thread of gRPC's ends with Python's lock, for which it may wait for
ever: whoever closes the process's last channel holds that lock, and waits for the thread
(grpcio 1.85; https://github.com/grpc/grpc/pull/42247). So there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from restow.broker.client.connection.credentials import Credentials
from restow.broker.trust.tokens import read_secret


def channel_showing(
    credentials: Credentials, module: Any, address: str, options: Sequence[tuple[str, Any]]
) -> Any:
    """Return a channel of ``module``, which is `grpc` or `grpc.aio`, by the credentials.

    Raises as `Credentials.for_channel` if there is TLS.
    """
    if not credentials.secure:
        return module.insecure_channel(address, options=options)
    channel = module.secure_channel(address, credentials.for_channel(), options=options)
    token_file = credentials.token_file
    return channel if token_file is None else AuthorizedChannel(channel, token_file)


class AuthorizedChannel:
    """A secure channel, of `grpc` or `grpc.aio`, whose calls show a token.

    The token is read again for every call, which raises `TokenFileError` if it can't be. It is
    sent when the other side has proved who it is, as all of a call is.
    """

    def __init__(self, channel: Any, token_file: Path) -> None:
        """Take over the channel."""
        self._channel, self._token_file = channel, token_file
        self.unary_unary = self._showing(channel.unary_unary)
        self.unary_stream = self._showing(channel.unary_stream)
        self.stream_unary = self._showing(channel.stream_unary)
        self.stream_stream = self._showing(channel.stream_stream)

    def __getattr__(self, name: str) -> Any:
        """Return what else the channel has."""
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Close the channel."""
        await self._channel.close()

    # -- inside -----------------------------------------------------------------------------------

    def _showing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes a method whose calls show the token."""

        def make_showing(*words: Any, **more: Any) -> Callable[..., Any]:
            method = make(*words, **more)

            def call(*sent: Any, metadata: Any = None, **options: Any) -> Any:
                shown = ("authorization", f"Bearer {read_secret(self._token_file)}")
                return method(*sent, metadata=(*(metadata or ()), shown), **options)

            return call

        return make_showing
