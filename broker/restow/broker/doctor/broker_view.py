"""Check the broker, its engines and its agents, by an operator's calls."""

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
    for pair in client.costs().hosts:
        if pair.failure:
            yield warn(
                f"costs {pair.source_host} to {pair.destination_host}",
                f"could not be measured ({pair.failure}): ways are chosen by general costs",
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
    ready = [engine for engine in engines if engine.agents]
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
    versions = [(f"engine {engine.engine_id}", engine.version) for engine in engines]
    versions += [(f"agent {agent.engine_id}.{agent.rank}", agent.version) for agent in agents]
    others = [f"{who} {version}" for who, version in versions if version not in ("", broker)]
    if others:
        yield warn(
            "versions",
            f"the broker runs {broker}, others do not: {', '.join(others)}"[:1000],
            "run one version everywhere; between two versions, handoffs may be refused",
        )
    elif versions:
        yield ok("versions", f"all known versions are {broker}")


def judge_engine(engine: pb.EngineInfo) -> Finding:
    """Check that the session and all agents of an engine are connected."""
    of = "" if engine.tenant in ("", "default") else f"{engine.tenant}/"
    subject = f"engine {of}{engine.engine_id}"
    if engine.agents < engine.ranks:
        return bad(
            subject,
            f"{engine.agents} of {engine.ranks} agents are connected: its handoffs wait",
            "`restow agents` shows which; the logs of the others say why they are not",
        )
    if not engine.session:
        return warn(
            subject,
            "its agents are connected, and its session is not: it hears of no end",
            "is its scheduler's process alive?",
        )
    if engine.draining:
        return warn(
            subject,
            f"it drains: it takes nothing new, and {engine.open} of its handoffs have not ended",
            f"stop it, or `restow drain --engine {engine.engine_id} --off`",
        )
    words = f"{engine.ranks} ranks of {model_of(engine)}, session and agents"
    if not engine.revision:
        return warn(
            subject,
            f"{words}; with no revision nothing tells its weights from others of the same shapes",
            "let it name its checkpoint: `model_revision` in vLLM, `ModelSpec.revision`",
        )
    return ok(subject, words)


def judge_pair(source: str, destination: str, probe: pb.ProbePairResponse) -> Finding:
    """Judge the probe of a pair."""
    subject = f"pair {source}:{destination}"
    if probe.reason:
        return bad(
            subject,
            f"rank {probe.destination_rank} can't read from rank {probe.source_rank}: "
            f"{probe.reason}: {probe.detail}",
            "D's agent must reach P's host over its UCX devices (UCX_NET_DEVICES, firewalls)",
        )
    words = f"reads over {probe.transport} ({probe.method})"
    if probe.transport.startswith(SLOW):
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
        step = f"this command has version {own}: use the version of the broker"
        return warn(subject, words, step)
    if status.draining:
        return warn(subject, f"{words}, and it drains: it grants nothing", "`restow drain --off`")
    return ok(subject, f"{words}, {status.agents} agents")


def _judge_content(status: pb.GetStatusResponse) -> Finding:
    if status.requires_content:
        return ok("content", "every publication and demand names its content")
    return warn(
        "content",
        "content that a side does not name is not compared: D may get another prompt's state",
        "name it on both sides (vLLM's connector does), then `restow serve --require-content`",
    )


def _audit(client: AdminClient) -> Finding:
    try:
        audit = client.audit()
    except RestowError as error:
        if error.status != "PERMISSION_DENIED":
            raise
        return ok(
            "audit",
            "left out: it needs an operator of all tenants, and you are an operator of one tenant",
        )
    if audit.findings:
        words = "; ".join(audit.findings)[:1000]
        return bad(
            "audit", words, "this is a fault of Restow: keep this output, and the broker's log"
        )
    return ok("audit", f"all is well with {audit.handoffs} handoffs")
