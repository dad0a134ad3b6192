"""Tokens inside of TLS: who is let in by one, and that none is ever seen elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent_harness.waiting import until
from broker.certificates import Authority
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, FakeAgent, broker, engine, model_layout, pair
from broker.guarded import channel_of, error_of, refusal, register, told_by_all
from fleet_harness.linked_agents import linked_engine
from forked.ports import free_port
from restow.broker.client import AdminClient, Credentials, EngineSession
from restow.broker.errors import NotLeaderError, RestowError
from restow.broker.server.base.standing import LEADER_WAIT_S, Standing
from restow.broker.server.serve import RunningBroker
from restow.broker.trust.errors import TokenOverPlaintextError
from restow.broker.trust.identity import Role
from restow.broker.trust.tokens import new_token
from restow.v1 import admin_pb2, admin_pb2_grpc

UNKNOWN = ("UNAUTHENTICATED", "UNAUTHENTICATED")
FORBIDDEN = ("PERMISSION_DENIED", "FORBIDDEN")


@dataclass
class House:
    """A folder with an authority, the broker's files and clients' tokens."""

    folder: Path
    authority: Authority

    def __post_init__(self) -> None:
        own = self.authority.issue(server=True)
        self.entries: list[dict[str, Any]] = []
        self.secrets: list[str] = []
        self.settings: dict[str, Any] = {
            "tls_cert": own.certificate,
            "tls_key": own.key,
            "tokens": self.folder / "tokens.json",
        }
        self.list_tokens()

    def list_tokens(self) -> None:
        (self.folder / "tokens.json").write_text(json.dumps(self.entries))

    def client(
        self, roles: Sequence[Role], tenant: str | None = "a", engine: str = "", name: str = ""
    ) -> Credentials:
        """Return credentials with a token that the broker knows."""
        secret, entry = new_token(roles, tenant, engine)
        self.entries.append(entry)
        self.list_tokens()
        return self.bearer(secret, name)

    def bearer(self, secret: str, name: str = "") -> Credentials:
        """Return credentials with the given token, which the broker may not know."""
        self.secrets.append(secret)
        path = self.folder / (name or f"token-{len(self.secrets)}")
        path.write_text(secret)
        return Credentials(self.authority.path, token_file=path)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, Authority(tmp_path))


@contextlib.asynccontextmanager
async def guarded(house: House, **more: Any) -> AsyncIterator[RunningBroker]:
    async with broker(**house.settings, **more) as running:
        yield running


@pytest.fixture(autouse=True)
def no_secret_is_said(house: House, capfd: pytest.CaptureFixture[str]) -> Any:
    """Check that neither Restow nor gRPC prints a token."""
    yield
    out, err = capfd.readouterr()
    for secret in house.secrets:
        assert len(secret) < 8 or secret not in out + err


async def test_a_whole_handoff(house: House) -> None:
    credentials = house.client([Role.ENGINE, Role.AGENT], engine="*")
    async with (
        guarded(house, strategy="pack") as running,
        pair(running.address, 2, 2, credentials=credentials) as both,
    ):
        await both.hand_over("h")
        assert running.hub.directory.ledger.find("a", "h").state == "DONE"


class LedByADeadOne(Standing):
    """It names a leader until the caller says that nobody answers there."""

    def __init__(self) -> None:
        self._leader = f"127.0.0.1:{free_port()}"
        self.told: list[bool] = []

    async def lead(self, unreached: str = "", within_s: float = LEADER_WAIT_S) -> None:
        self.told.append(unreached == self._leader)
        if not self.told[-1]:
            raise NotLeaderError("another broker leads", leader=self._leader)


async def test_a_leader_that_nobody_reaches_is_told_of_beside_the_token(house: House) -> None:
    # The engine and the agent each find out for themselves.
    credentials = house.client([Role.ENGINE, Role.AGENT], engine="*")
    async with guarded(house) as running:
        running.hub.standing = standing = LedByADeadOne()
        async with linked_engine(running.address, "p", credentials=credentials):
            assert standing.told == [False, True] * 2


async def test_calls_without_a_known_token(house: House) -> None:
    known = house.client([Role.ENGINE], engine="*")
    wrong = house.bearer("restow_" + "x" * 43)
    digest = house.bearer(house.entries[0]["sha256"])
    async with guarded(house) as running:
        for credentials in (Credentials(house.authority.path), wrong, digest):
            async with channel_of(running.address, credentials) as channel:
                assert set((await told_by_all(channel)).values()) == {UNKNOWN}
        async with channel_of(running.address, wrong) as channel:
            error = await error_of(register(channel))
        assert "x" * 43 not in error.message + str(error.subject)
        async with channel_of(running.address, known) as channel:
            await register(channel)


async def test_tokens_that_are_sent_otherwise(house: House) -> None:
    house.client([Role.OPERATOR])
    (secret,) = house.secrets
    bearer = ("authorization", f"Bearer {secret}")
    async with (
        guarded(house) as running,
        channel_of(running.address, Credentials(house.authority.path)) as channel,
    ):
        status = admin_pb2_grpc.AdminStub(channel).GetStatus
        request = admin_pb2.GetStatusRequest()
        for sent in (
            (("authorization", f"Basic {secret}"),),
            (("authorization", secret),),
            (("authorization", "Bearer"),),
            (bearer, bearer),
            (("x-authorization", f"Bearer {secret}"),),
        ):
            assert await refusal(status(request, metadata=sent)) == UNKNOWN, sent
        good = (("authorization", f"bearer {secret}"),)
        assert (await status(request, metadata=good)).engines == 0


async def test_roles_and_engines_of_tokens(house: House) -> None:
    agent = house.client([Role.AGENT], engine="e")
    own, other = (house.client([Role.ENGINE], engine=name) for name in ("e", "x"))
    async with guarded(house) as running:
        for credentials in (agent, other):
            async with channel_of(running.address, credentials) as channel:
                assert await refusal(register(channel, "e")) == FORBIDDEN
        async with EngineSession("e", "1", model_layout(1), running.address, own) as session:
            for credentials, let_in in ((own, False), (agent, True)):
                session._stream._credentials = credentials
                fake = FakeAgent(session, model_layout(1), 0, 64)
                if let_in:
                    await fake.connect()
                    await fake.drop()
                else:
                    assert await refusal(fake.connect()) == FORBIDDEN


async def test_a_token_is_never_sent_in_plaintext(house: House) -> None:
    token = house.client([Role.OPERATOR]).token_file
    with pytest.raises(TokenOverPlaintextError, match="never sent in plaintext") as caught:
        Credentials(token_file=token)
    assert caught.value.reason == "TOKEN_OVER_PLAINTEXT"
    credentials = Credentials(house.authority.path, token_file=token)
    # A broker without TLS, whoever it may be, is not told the token either.
    async with stranger() as (address, heard):
        client = AdminClient(address, credentials=credentials)
        with pytest.raises(RestowError):
            await asyncio.to_thread(client.status)
        client.close()
        assert not heard


@contextlib.asynccontextmanager
async def stranger() -> AsyncIterator[tuple[str, list[tuple[str, str]]]]:
    """Run a plaintext server in place of a broker; yield its address and what it hears."""
    heard: list[tuple[str, str]] = []

    async def hear(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        heard.extend((k, str(v)) for k, v in context.invocation_metadata() or ())
        return request

    server = grpc.aio.server()
    method: dict[str, Any] = {"GetStatus": grpc.unary_unary_rpc_method_handler(hear)}
    handler = grpc.method_handlers_generic_handler("restow.v1.Admin", method)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", heard
    finally:
        await server.stop(None)


async def test_tokens_are_read_again_by_both_sides(house: House) -> None:
    credentials = house.client([Role.ENGINE, Role.AGENT], engine="*", name="mine")
    async with (
        guarded(house) as running,
        engine(running.address, "p", credentials=credentials) as (p, agents),
        engine(running.address, "d", credentials=credentials) as (d, _),
    ):
        del house.entries[0]
        house.client([Role.ENGINE, Role.AGENT], engine="*", name="mine")
        await agents[0].drop()
        await agents[0].connect()
        p.publish("h", P_BLOCKS, POSITION)
        await agents[0].fence("h")
        assert (await d.request("h", D_BLOCKS)).done
        # The first token is good for nothing any more.
        async with channel_of(running.address, house.bearer(house.secrets[0])) as channel:
            assert await refusal(register(channel)) == UNKNOWN


async def test_a_token_file_that_is_lost(house: House) -> None:
    credentials = house.client([Role.OPERATOR])
    assert credentials.token_file is not None
    async with guarded(house) as running:
        with AdminClient(running.address, credentials=credentials) as client:
            await asyncio.to_thread(client.status)
            credentials.token_file.unlink()
            with pytest.raises(RestowError, match=r"token file .* can't be read"):
                await asyncio.to_thread(client.status)


@pytest.mark.parametrize("lost_when", ["registering", "streaming"])
async def test_a_session_waits_for_a_token_that_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch, lost_when: str
) -> None:
    # The session looks for the token again, as it does for the broker.
    credentials = house.client([Role.ENGINE], engine="e")
    path = credentials.token_file
    assert path is not None
    secret, address = path.read_text(), f"127.0.0.1:{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(guarded(house, listen=address))
        session = EngineSession("e", "1", model_layout(1), address, credentials)
        async with session:
            stream = session._stream
            register = stream.prepare

            async def register_and_lose() -> None:
                await register()
                path.unlink()

            if lost_when == "streaming":
                monkeypatch.setattr(stream, "prepare", register_and_lose)
            else:
                path.unlink()
            await stack.aclose()
            await stack.enter_async_context(guarded(house, listen=address))
            await until(lambda: not session.is_open and not path.exists())
            monkeypatch.setattr(stream, "prepare", register)
            path.write_text(secret)
            path.chmod(0o600)
            await until(lambda: session.is_open)
