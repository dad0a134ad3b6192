"""The commands of docs/vllm.md as they stand there, and what clients hear over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.fakes import model_layout
from forked.ports import free_port
from restow.broker.client import AdminClient, EngineSession
from restow.demo.recall.task import Prompt, decode
from vllm_harness.house import GRANT_S

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "vllm.md"
START_S = 300.0
ENDS_S = 240.0
"""vLLM waits for its workers (7 s on a host at rest), and longer on a host that is loaded."""
ALWAYS_THE_LIKELIEST = {"temperature": 1.0, "top_k": 1}
"""vLLM gives one answer alone with a temperature of 0."""


@dataclass(frozen=True)
class Served:
    """What the commands have started, on ports of the test's own."""

    router: str
    prefill: str
    decode: str
    broker: str
    ask: str
    """The page's own request, as a command."""


def blocks() -> list[str]:
    """Return the page's shell commands."""
    return re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    """Run the page's commands on other ports, so that tests do not meet other programs."""
    ports = [free_port() for _ in range(4)]
    broker, prefill, decode_, router = (f"127.0.0.1:{port}" for port in ports)
    start, ask = blocks()[:2]
    for old, new in zip(("8100", "8200", "8000"), ports[1:], strict=True):
        assert old in start
        start, ask = start.replace(old, str(new)), ask.replace(old, str(new))
    log = tmp_path_factory.mktemp("page") / "log"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    environment |= {"RESTOW_BROKER": broker, "RESTOW_LISTEN": broker, "HF_HUB_OFFLINE": "1"}
    environment["RESTOW_GRANT_S"] = f"{GRANT_S:g}"
    with log.open("wb") as out:
        shell = subprocess.Popen(  # noqa: ASYNC220 - it only starts others
            ["/bin/bash", "-ec", start + "wait -n"],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        for base in (prefill, decode_, router):
            await asyncio.to_thread(_wait_for, base, shell, log)
        yield Served(router, prefill, decode_, broker, ask)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _wait_for(base: str, shell: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server is healthy, as the page tells its reader to do."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and shell.poll() is None:
        try:
            urllib.request.urlopen(f"http://{base}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"{base} does not answer:\n{log.read_text(errors='replace')[-4000:]}")


def post(base: str, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, str]:
    """Return the status and the text of an answer to a POST."""
    request = urllib.request.Request(
        f"http://{base}{path}",
        json.dumps({"model": "recall", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(base: str, path: str) -> tuple[int, str]:
    """Return the status and the text of an answer to a GET; status 0: nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{base}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


async def said(base: str, prompt: Prompt) -> str:
    status, text = await asyncio.to_thread(
        post, base, {"prompt": prompt.text, "max_tokens": len(prompt.answer_ids)}
    )
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    return " ".join(choice["text"].split())


async def test_the_request_of_the_page(served: Served) -> None:
    done = await asyncio.to_thread(
        subprocess.run, ["/bin/bash", "-ec", served.ask], capture_output=True, check=True
    )
    (choice,) = json.loads(done.stdout)["choices"]
    assert choice["text"].strip() == "stone . apple . river ."
    with AdminClient(served.broker) as admin:
        (handoff,) = admin.handoffs().handoffs
    assert handoff.bytes > 0


async def test_all_at_once_through_the_router(served: Served, prompts: tuple[Prompt, ...]) -> None:
    found = await asyncio.gather(*(said(served.router, one) for one in prompts))
    assert found == [decode(one.answer_ids) for one in prompts]


async def test_a_stream_through_the_router(served: Served, prompts: tuple[Prompt, ...]) -> None:
    body = {"prompt": prompts[0].text, "max_tokens": 6, "stream": True}
    status, text = await asyncio.to_thread(post, served.router, body)
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events.pop() == "[DONE]"
    words = "".join(json.loads(one)["choices"][0]["text"] for one in events)
    assert " ".join(words.split()) == decode(prompts[0].answer_ids)


async def test_the_engines_have_the_names_of_the_page(served: Served) -> None:
    with AdminClient(served.broker) as admin:
        engines = admin.engines()
    assert [one.engine_id for one in engines] == ["d0", "p0"]
    assert all(one.agents == one.ranks and one.session for one in engines)
    status, _ = await asyncio.to_thread(get, served.router, "/health")
    assert status == 200
    status, text = await asyncio.to_thread(get, served.router, "/v1/models")
    assert (status, json.loads(text)["data"][0]["id"]) == (200, "recall")


def choices(text: str) -> list[str]:
    return [" ".join(one["text"].split()) for one in json.loads(text)["choices"]]


async def handed_over(served: Served, since: int) -> dict[str, int]:
    """Return the bytes of each handoff but the oldest ``since``."""
    with AdminClient(served.broker) as admin:
        found = (await asyncio.to_thread(admin.handoffs)).handoffs
    assert all(one.bytes for one in found), found
    return {one.handoff_id: one.bytes for one in found[: len(found) - since]}


async def test_many_answers_to_many_prompts_through_the_router(
    served: Served, prompts: tuple[Prompt, ...]
) -> None:
    """Check that each answer reads a state of its own, and that P computes each prompt once."""
    with AdminClient(served.broker) as admin:
        before = len(admin.handoffs().handoffs)
    body = {
        "prompt": [prompts[0].text, prompts[1].text],
        "n": 3,
        **ALWAYS_THE_LIKELIEST,
        "max_tokens": 6,
        "min_tokens": 2,
    }
    computed = await prompt_tokens(served.prefill)
    status, text = await asyncio.to_thread(post, served.router, body)
    assert status == 200, text
    assert choices(text) == [decode(one.answer_ids) for one in prompts[:2] for _ in range(3)]
    ids = await handed_over(served, before)
    (id_,) = {one.partition("/")[0] for one in ids}
    assert sorted(ids) == [
        *(id_, f"{id_}/choice1", f"{id_}/choice2"),
        *(f"{id_}/prompt1", f"{id_}/prompt1/choice1", f"{id_}/prompt1/choice2"),
    ]
    tokens = sum(len(one.token_ids) - 1 for one in prompts[:2])
    assert await prompt_tokens(served.prefill) - computed == tokens


async def prompt_tokens(base: str) -> float:
    """Return how many tokens of prompts the engine has computed."""
    _, text = await asyncio.to_thread(get, base, "/metrics")
    name = "vllm:prompt_tokens_total"
    return sum(float(one.rsplit(" ", 1)[1]) for one in text.splitlines() if one.startswith(name))


async def test_many_answers_through_a_router_that_sends_n_on(
    served: Served, prompts: tuple[Prompt, ...]
) -> None:
    # P computes the prompt for each answer, and D is told what P answered.
    body = {"prompt": prompts[2].text, "n": 2, **ALWAYS_THE_LIKELIEST}
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    status, text = await asyncio.to_thread(
        post, served.prefill, {**body, "max_tokens": 1, **params}
    )
    assert status == 200, text
    given = {"kv_transfer_params": json.loads(text)["kv_transfer_params"]}
    status, text = await asyncio.to_thread(post, served.decode, {**body, "max_tokens": 6, **given})
    assert status == 200, text
    assert choices(text) == [decode(prompts[2].answer_ids)] * 2


async def test_a_prompt_longer_than_a_block(served: Served) -> None:
    body = {"prompt": "<bos> " + "anna has apple . " * 60 + "? anna :", "max_tokens": 2}
    alone = await asyncio.to_thread(post, served.decode, body)
    status, text = await asyncio.to_thread(post, served.router, body)
    assert (alone[0], status) == (200, 200), (alone, text)
    assert choices(text) == choices(alone[1])


async def test_parameters_that_are_no_use(served: Served, prompts: tuple[Prompt, ...]) -> None:
    nixl = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2]}
    for base in (served.prefill, served.decode):
        for params in ({"handoff_id": 7}, {"do_remote_prefill": True}, nixl):
            body = {"prompt": prompts[0].text, "max_tokens": 1, "kv_transfer_params": params}
            status, text = await asyncio.to_thread(post, base, body)
            assert status == 400, text
            assert json.loads(text)["error"]["message"].startswith("PARAMETERS_INVALID: ")
    many = {
        "prompt": [one.text for one in prompts[:2]],
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    status, text = await asyncio.to_thread(post, served.prefill, many)
    assert (status, "list of prompts" in text) == (400, True), text


async def test_a_handoff_that_is_asked_for_twice(
    served: Served, prompts: tuple[Prompt, ...]
) -> None:
    params = {"kv_transfer_params": {"handoff_id": "asked twice"}}
    body = {"prompt": prompts[3].text, "max_tokens": 6, **params}
    assert (await asyncio.to_thread(post, served.prefill, {**body, "max_tokens": 1}))[0] == 200
    assert (await asyncio.to_thread(post, served.decode, body))[0] == 200
    status, text = await asyncio.to_thread(post, served.decode, body)
    assert status == 500
    message = json.loads(text)["error"]["message"]
    assert message.startswith("no state was handed over: HANDOFF_CONFLICT: "), message


async def test_what_the_client_did_wrong_is_told(served: Served) -> None:
    status, text = await asyncio.to_thread(
        post, served.router, {"prompt": "<bos> anna has", "max_tokens": 100_000}
    )
    assert status == 400
    assert "max_tokens" in text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_reason_reaches_the_client(
    served: Served, prompts: tuple[Prompt, ...], stream: bool
) -> None:
    # D is asked to go on where P's state does not stand.
    params = {"handoff_id": f"other prompt, {stream}"}
    short = prompts[0].text.rsplit(maxsplit=3)[0]
    status, _ = await asyncio.to_thread(
        post, served.prefill, {"prompt": short, "max_tokens": 1, "kv_transfer_params": params}
    )
    assert status == 200
    body = {"prompt": prompts[0].text, "max_tokens": 6, "stream": stream}
    status, text = await asyncio.to_thread(
        post, served.decode, {**body, "kv_transfer_params": params}
    )
    assert status == (200 if stream else 500)
    (event, *_) = [one for one in text.splitlines() if "error" in one]
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error["message"].startswith("no state was handed over: POSITION_MISMATCH: ")
    assert error["handoff"]["handoff_id"] == params["handoff_id"]


async def test_metrics(served: Served) -> None:
    _, text = await asyncio.to_thread(get, served.decode, "/metrics")
    received = "vllm:restow_received_bytes_sum"
    (line,) = [one for one in text.splitlines() if one.startswith(received)]
    assert float(line.rsplit(" ", 1)[1]) > 0
    for reason in ("POSITION_MISMATCH", "HANDOFF_CONFLICT"):
        assert f'reason="{reason}"' in text


async def test_an_engine_that_was_replaced_ends(served: Served) -> None:
    # Another process gets the same id. This is the last test: P does not come back.
    async with EngineSession("p0", "another", model_layout(), served.broker):
        with AdminClient(served.broker) as admin:
            (p0,) = [one for one in admin.engines() if one.engine_id == "p0"]
        assert (p0.incarnation, len(p0.replaced)) == ("another", 1)

        def gone() -> None:
            while get(served.prefill, "/health")[0] == 200:
                time.sleep(0.2)

        def silent() -> None:
            while get(served.prefill, "/health")[0]:
                time.sleep(0.2)

        await asyncio.wait_for(asyncio.to_thread(gone), ENDS_S)
        body = {"prompt": "<bos> anna has apple . ? anna :", "max_tokens": 2}
        # P answers the router with an error, and D computes the prompt itself.
        assert (await asyncio.to_thread(post, served.router, body))[0] == 200
        # vLLM's HTTP server stands until somebody asks an engine that is gone.
        await asyncio.wait_for(asyncio.to_thread(silent), ENDS_S)
        assert (await asyncio.to_thread(post, served.router, body))[0] == 200
