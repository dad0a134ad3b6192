"""Checks of the broker and of its engines and agents, by an operator's calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from restow.broker.client.admin import AdminClient
from restow.broker.doctor.local import Finding, bad, ok, warn
from restow.broker.errors import RestowError
from restow.broker.layout import ModelIdentity
from restow.broker.versions import own_version
from restow.v1 import admin_pb2 as pb

Pair = tuple[str, str]
SLOW = "tcp"


def look_at_broker(client: AdminClient) -> Iterator[Finding]:
    """Check the broker and its engines. Raises `RestowError` if the broker does not answer."""
    status = client.status()
    yield _status("broker", status)
    yield _judge_content(status)
    yield _audit(client)
    engines = client.engines()
    yield from judge_versions(status.version, engines, client.agents())
    for engine in engines:
        yield judge_engine(engine)
    for one in client.costs().hosts:
        if one.failure:
            yield warn(
                f"costs {one.source_host} to {one.destination_host}",
                f"could not be measured ({one.failure}): ways are chosen by general costs",
                "the agents' logs say more",
            )


def look_at_pairs(client: AdminClient, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Check how D's agent reads from P's agent. Each pair takes seconds."""
    for source, destination in pairs:
        try:
            yield judge_pair(source, destination, client.probe_pair(source, destination))
        except RestowError as error:
            yield bad(f"pair {source}:{destination}", error.message, f"reason {error.reason}")


def all_pairs(engines: Sequence[pb.EngineInfo]) -> list[Pair]:
    """Return all pairs of engines that serve one model and have agents, in both directions."""
    ready = [one for one in engines if one.agents]
    return [
        (p.engine_id, d.engine_id)
        for p in ready
        for d in ready
        if p.engine_id != d.engine_id and model_of(p) == model_of(d)
    ]


def model_of(engine: pb.EngineInfo) -> ModelIdentity:
    """Return the model that an engine serves."""
    return ModelIdentity(engine.model, engine.revision, engine.adapter, engine.quantisation)


def judge_versions(
    broker: str, engines: Sequence[pb.EngineInfo], agents: Sequence[pb.AgentInfo]
) -> Iterator[Finding]:
    """Check that engines and agents run the version of the broker."""
    told = [(f"engine {one.engine_id}", one.version) for one in engines]
    told += [(f"agent {one.engine_id}.{one.rank}", one.version) for one in agents]
    others = [f"{who} {version}" for who, version in told if version not in ("", broker)]
    if others:
        yield warn(
            "versions",
            f"the broker is of {broker}, others are not: {', '.join(others)}"[:1000],
            "run one version everywhere; between two, handoffs are refused where they must be",
        )
    elif told:
        yield ok("versions", f"all that tell theirs are of {broker}")


def judge_engine(engine: pb.EngineInfo) -> Finding:
    """Check that the session and all agents of an engine are connected."""
    of = "" if engine.tenant in ("", "default") else f"{engine.tenant}/"
    subject = f"engine {of}{engine.engine_id}"
    if engine.agents < engine.ranks:
        return bad(
            subject,
            f"{engine.agents} of {engine.ranks} agents are connected: its handoffs wait",
            "`restow agents` shows which; their logs say why the others are not",
        )
    if not engine.session:
        return warn(
            subject,
            "its agents are there, and its session is not: it hears of no end",
            "is its scheduler's process alive?",
        )
    if engine.draining:
        return warn(
            subject,
            f"it drains: it takes nothing new, and {engine.open} handoffs of its have not ended",
            f"stop it, or `restow drain --engine {engine.engine_id} --off`",
        )
    words = f"{engine.ranks} ranks of {model_of(engine)}, session and agents"
    if not engine.revision:
        return warn(
            subject,
            f"{words}; with no revision nothing tells its weights from others of the same shapes",
            "have it name its checkpoint: `model_revision` in vLLM, `ModelSpec.revision`",
        )
    return ok(subject, words)


def judge_pair(source: str, destination: str, found: pb.ProbePairResponse) -> Finding:
    """Judge the probe of a pair."""
    subject = f"pair {source}:{destination}"
    if found.reason:
        return bad(
            subject,
            f"rank {found.destination_rank} can't read from rank {found.source_rank}: "
            f"{found.reason}: {found.detail}",
            "D's agent must reach P's host over its UCX devices (UCX_NET_DEVICES, firewalls)",
        )
    words = f"reads over {found.transport} ({found.method})"
    if found.transport.startswith(SLOW):
        return warn(
            subject,
            words,
            "on one host CMA is faster (ptrace_scope, one user); between hosts RDMA, if there is "
            "any: UCX_TLS and UCX_NET_DEVICES must not leave it out",
        )
    return ok(subject, words)


def _status(subject: str, status: pb.GetStatusResponse) -> Finding:
    own, words = own_version(), f"version {status.version}, {status.engines} engines"
    if status.version != own:
        step = f"this command is of version {own}: use the broker's"
        return warn(subject, words, step)
    if status.draining:
        return warn(subject, f"{words}, and it drains: it grants nothing", "`restow drain --off`")
    return ok(subject, f"{words}, {status.agents} agents")


def _judge_content(status: pb.GetStatusResponse) -> Finding:
    if status.requires_content:
        return ok("content", "every publication and demand names its content")
    return warn(
        "content",
        "what a side does not name is not compared: D may get the state of another prompt",
        "name it on both sides (vLLM's connector does), then `restow serve --require-content`",
    )


def _audit(client: AdminClient) -> Finding:
    try:
        found = client.audit()
    except RestowError as error:
        if error.status != "PERMISSION_DENIED":
            raise
        return ok("audit", "for operators of all tenants, and you are one of one tenant: left out")
    if found.findings:
        words = "; ".join(found.findings)[:1000]
        return bad("audit", words, "it is a fault of Restow: keep this, and the broker's log")
    return ok("audit", f"all is well with {found.handoffs} handoffs")
