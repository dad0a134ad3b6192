"""Reasons why handoffs fail or engines are refused, with their meaning and advice for operators.

`restow handoff` shows the advice of a handoff, `restow reasons` lists all, and docs/runbook.md has
the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from restow.broker.refusals import OTHER_VERSION, REFUSALS, Advice

REASONS: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        **REFUSALS,
        # A side gave up, or was late.
        "CANCELLED": Advice(
            "A side cancelled the handoff, for example because its request was aborted.",
            "Nothing, unless that was unintended: the detail names the engine.",
        ),
        "RELEASED": Advice(
            "An operator released the handoff (`restow release`).",
            "Nothing: P's pages are free, and D's pages are free once no rank may write to them.",
        ),
        "ABANDONED": Advice(
            "The router gave up the handoff before D had asked for it, because its client had "
            "left.",
            "Nothing: P's pages are free.",
        ),
        "DECLINED": Advice(
            "D continues without P's state, for example because it has the prompt cached.",
            "Nothing: P's pages are free.",
        ),
        "NOT_HELD": Advice(
            "A state was requested by content, but no engine has announced it, or all engines "
            "that had announced it declined the offer.",
            "Nothing: D computes it. If most requests end so, see `restow holdings`: many "
            "declined offers mean that states are evicted soon; a store with more memory or "
            "disk keeps them longer.",
        ),
        "NOT_PUBLISHED": Advice(
            "D's request timed out before P had published and fenced the whole state.",
            "See in the timeline what was missing; check whether P prefills at all, and whether "
            "its requests wait longer than D's timeout.",
        ),
        "LEASE_EXPIRED": Advice(
            "P's lease expired: nobody asked for the state, P's session was gone for longer "
            "than the lease, or P repeated only a part of its publication.",
            "See in the timeline who was missing; if D comes late, publish with a longer hold.",
        ),
        "LEASE_TOO_SHORT": Advice(
            "The rest of P's lease was too short for a read.",
            "Renew leases more often, or request longer leases.",
        ),
        "TIMEOUT_TOO_SHORT": Advice(
            "The rest of D's timeout was too short for a read.",
            "Give D's requests a longer timeout.",
        ),
        "NOT_ASKED_FOR": Advice(
            "Nobody asked for the state: P is the only engine of its model, or D's demand was "
            "refused and no other demand came.",
            "See `restow engines` for the missing D, and D's log for the refusal.",
        ),
        # The two sides contradict each other.
        "PUBLICATION_REFUSED": Advice(
            "The broker refused P's publication; the detail says why.",
            "Correct what the detail names in P's engine.",
        ),
        "CONTENT_MISMATCH": Advice(
            "P and D have different tokens, adapters, images or salts.",
            "Have the router send the same prompt to P and D under the same handoff id, and use "
            "a new id for every prompt.",
        ),
        "CONTENT_NOT_NAMED": Advice(
            "A side published or asked without naming the state's content, and the broker "
            "serves only content that it can compare (`restow serve --require-content`).",
            "Name the content on both sides: `content=content_of(prompt, position)`, with "
            "`position_tokens`.",
        ),
        "READ_DEADLINE": Advice(
            "The read, or the gathering before it, took longer than its grant; nothing that "
            "came later was used. The broker grants such a read again with twice the time, so "
            "this appears only if P's lease or D's timeout left no time for that.",
            "Check whether P's host or D's is slow or paused; raise `restow serve --grant-s` for "
            "large states on slow links, and give D's requests a longer timeout.",
        ),
        "READS_QUEUED": Advice(
            "D's request timed out while its agents read other states: the requests exceed the "
            "read rate between P and D.",
            "Give D's requests a longer timeout, send fewer at once, or add decode engines.",
        ),
        "TAKEN_BACK": Advice(
            "P preempted the prompt after a part of it had been read. D reads everything when P "
            "has computed it again, so this appears only if no time was left for that.",
            "Give P more cache memory or fewer concurrent prompts; give D's requests a longer "
            "timeout.",
        ),
        "PLAN_LATE": Advice(
            "D's request timed out before the broker had made the plan between the two layouts.",
            "Nothing, if it is rare: the plan is kept for the next handoff. Otherwise give D's "
            "requests a longer timeout, and check that the broker has a processor of its own.",
        ),
        "BROKER_DRAINING": Advice(
            "D's request timed out while the broker was draining and granted nothing.",
            "End the drain (`restow drain --off`), or send the request again: where there are "
            "several brokers, another broker leads by then.",
        ),
        "READ_NOT_BEGUN": Advice(
            "D's agent could not start the read inside its grant. The broker grants again, so "
            "this appears only if no time was left for that.",
            "As for READS_QUEUED.",
        ),
        "GRANT_OUTLIVED": Advice(
            "D's agent reported the read after the grant had ended, so P's pages may have changed. "
            "The broker grants again, so this appears only if no time was left for that.",
            "As for READ_DEADLINE; check whether D's host was paused.",
        ),
        # An engine or agent was lost.
        "ENGINE_LOST": Advice(
            "An engine unregistered, was replaced by a new incarnation, or fell silent.",
            "See `restow engines`, and the end of the engine's own log.",
        ),
        "AGENT_LOST": Advice(
            "The agent of a rank is gone or came back as another process; what it had read or "
            "held is lost.",
            "See `restow agents` for missing agents, and the log of that rank.",
        ),
        "AGENT_MISSING": Advice(
            "An engine was registered, but not all of its ranks had an agent in time.",
            "Start the missing agents: `restow engines` shows how many there are.",
        ),
        "PAGES_NOT_FREE": Advice(
            "An engine closed its session while one of its ranks might still have been writing.",
            "Close the engine's agents; then its pages are free.",
        ),
        "PEER_LOST": Advice(
            "D's agent could not reach P's agent, or lost the connection during the read.",
            "Check that P's process runs, and that the two hosts reach each other's UCX ports "
            "(UCX_TLS, UCX_NET_DEVICES, firewalls).",
        ),
        "AGENT_CLOSED": Advice(
            "The agent was closed before it had finished.",
            "Nothing, if the engine was stopped.",
        ),
        # A message is invalid, or the two sides do not fit together.
        "POSITION_MISMATCH": Advice(
            "P's state is not at the position from which D continues.",
            "Have both sides cut the prompt at the same token: P stops before its last token if "
            "the model has recurrent state.",
        ),
        "NOT_SAMPLED": Advice(
            "D continues after the token that P samples, but P published no sampled token.",
            "Have the router request the sampled token from both sides, with the same sampling "
            "parameters.",
        ),
        "ARGUMENT_INVALID": Advice(
            "A side sent an invalid value; the detail names it.",
            "This is a fault of the engine's integration: read the detail.",
        ),
        "PAGES_INVALID": Advice(
            "Page ids do not fit the layout or the positions.",
            "This is a fault of the engine's integration: read the detail.",
        ),
        "PAGE_COUNT": Advice(
            "The number of page ids does not match the number of tokens.",
            "This is a fault of the engine's integration: read the detail.",
        ),
        "PAGE_OUT_OF_RANGE": Advice(
            "A page id is outside of the memory that the agent registered.",
            "Check that engine and agents were started with the same number of pages.",
        ),
        "PAGE_REPEATED": Advice(
            "A list names a page twice, or two open handoffs of an engine name a page that one "
            "of them will write. One of two states would be lost.",
            "This is a fault of the engine's integration: the message names the page and the "
            "other handoff. If the id is the null block, the layout must declare it.",
        ),
        "NULL_BLOCK": Advice(
            "An engine named its null block where state is read or written.",
            "This is a fault of the engine's integration: check which blocks it freed before "
            "their state was handed over.",
        ),
        "MODEL_MISMATCH": Advice(
            "The two engines serve different models, or models with different weights, "
            "adapters, quantisation or shapes.",
            "Run both engines from one checkpoint; `restow engines` shows what each engine "
            "serves. If two models are known to be equal, give both the same revision "
            "(`model_revision` in vLLM).",
        ),
        "REVISION_CHANGED": Advice(
            "An engine's weights were replaced while it computed or waited for this state.",
            "Send the prompt again: the engines compute it with their present weights.",
        ),
        "REVISION_UNKNOWN": Advice(
            "A vLLM engine's weights were replaced at runtime and their version is unknown, or "
            "its prefix cache still has states of the earlier weights.",
            "Reset its prefix cache and the connector's (`/reset_prefix_cache`, "
            "`reset_external`). If the weights did not come from a checkpoint, also announce "
            "their version (`/finish_weight_update`, `/update_weight_version`).",
        ),
        "SCALES_MISMATCH": Advice(
            "The two sides multiply a field's elements by different scales.",
            "Load both engines from the same checkpoint, with the same KV scales.",
        ),
        "BLOCK_TOKENS_MISMATCH": Advice(
            "D keeps blocks of windows for other prompts, and the size of P's blocks is no "
            "multiple of D's: P may have freed the beginning of a block of D's.",
            "Use the same block size in both engines, or start D without prefix caching.",
        ),
        "CAST_UNSUPPORTED": Advice(
            "A field's types differ, and no exact or allowed cast exists between them.",
            "Store the field with the same type on both sides.",
        ),
        "NARROWING_NOT_ALLOWED": Advice(
            "D stores a field in a narrower type than P.",
            "Store the field with the same type on both sides, or start the broker with "
            "--allow-narrowing.",
        ),
        "STRATEGY_REFUSED": Advice(
            "The strategy that the broker was told to use cannot serve this pair.",
            "Start the broker with `--strategy auto`; `restow plan --explain` says why.",
        ),
        "TOO_MANY_PIECES": Advice(
            "The plan between these layouts would have too many pieces.",
            "Use larger pages on one of the sides.",
        ),
        "PLAN_INVALID": Advice(
            "No plan exists between the two layouts.",
            "Run `restow plan P.json D.json`: it says why.",
        ),
        # An agent failed.
        "STAGING_EXHAUSTED": Advice(
            "A state needs more staging memory than the agent's whole pool has.",
            "Give the agents more staging memory: `staging_mb` in vLLM, "
            "`AgentSettings.staging_bytes`.",
        ),
        "ORDER_TOO_LARGE": Advice(
            "The handoff needs more descriptors than an agent makes at once.",
            "Use larger pages, the same page layout on both sides, or shorter prompts.",
        ),
        "AGENT_BUSY": Advice(
            "The agent had more orders at once than it accepts.",
            "Request fewer handoffs at once, or spread them over more engines.",
        ),
        "ORDER_INVALID": Advice(
            "The agent received an order that does not fit earlier orders.",
            OTHER_VERSION,
        ),
        "PROGRAM_INVALID": Advice(
            "The agent received a program that would touch bytes outside of its pages.",
            OTHER_VERSION + " If they are, it is a fault of Restow: keep the logs.",
        ),
        "METADATA_REFUSED": Advice(
            "P's NIXL metadata is malformed, belongs to another agent, or crashed the process "
            "in which D's agent tests it.",
            "Restart P's engine, with the same version of NIXL as D's. If this recurs, somebody "
            "changes metadata in transit: check who runs the broker and P's host.",
        ),
        "READ_FAILED": Advice(
            "NIXL refused or aborted a read for a reason other than a lost peer, or P's agent "
            "stopped gathering what was being read.",
            "See the log of D's agent, where UCX reports its error, and the log of P's agent.",
        ),
        "COPY_FAILED": Advice(
            "The agent could not copy, multiply or hash: its device has no memory left or "
            "failed, or rows overlap.",
            "See the log of the agent; check the GPU's health, and how much of its memory the "
            "engine leaves free.",
        ),
        "TRANSPORT_FAILED": Advice(
            "NIXL could not be set up, or could not register memory.",
            "See the log of the agent: limits on locked memory are a common cause.",
        ),
        "CUDA_UNAVAILABLE": Advice(
            "The agent cannot reach the CUDA device of its memory.",
            "Give its process or container that device and its driver.",
        ),
        "DIGEST_MISMATCH": Advice(
            "D's bytes differ from those that P hashed; the state was discarded.",
            "Find what changes P's pages or the bytes in transit, and take the host out of "
            "service until then.",
        ),
        "DIGEST_MISSING": Advice(
            "Content was to be compared, but P's agent made no digest.",
            OTHER_VERSION,
        ),
        "INTERNAL": Advice(
            "An internal error occurred: the detail says what.",
            "This is a fault of Restow: keep the logs of the broker and of both agents.",
        ),
    }
)
"""Advice by reason. Agents of a newer version may report reasons that are missing here."""

ORDINARY: Final = frozenset({"CANCELLED", "RELEASED", "ABANDONED", "DECLINED", "NOT_HELD"})
"""Reasons of ordinary ends: somebody gave the handoff up, or D does without the state. Logs do not
report them as failures, and alerts ignore them (`RestowHandoffsFail` in
docker/prometheus/alerts.yaml)."""

UNKNOWN: Final = Advice(
    "This version of Restow does not know the reason: an agent or engine of another version "
    "gave it.",
    OTHER_VERSION,
)


def advice_for(reason: str) -> Advice:
    """Return the advice for a reason, known or not."""
    return REASONS.get(reason, UNKNOWN)
