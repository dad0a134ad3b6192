"""Why a handoff did not end DONE, or an engine is refused: what it means, and what to do about it.

`restow handoff` says it, `restow reasons` lists all, docs/runbook.md holds the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from restow.broker.advice import OTHER_VERSION, Advice
from restow.broker.fleet_reasons import FLEET_REASONS
from restow.broker.refusals import REFUSALS

REASONS: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        **REFUSALS,
        **FLEET_REASONS,
        # What a side wanted, or did not do in time.
        "CANCELLED": Advice(
            "A side gave the handoff up, as it does when the request is aborted.",
            "Nothing, unless it was not meant: the detail names the engine.",
        ),
        "RELEASED": Advice(
            "An operator gave the handoff up (`restow release`).",
            "Nothing: P's pages are free, and D's when no rank may write to them any more.",
        ),
        "ABANDONED": Advice(
            "The router gave the handoff up before D had asked for it, because its client had "
            "left.",
            "Nothing: P's pages are free.",
        ),
        "DECLINED": Advice(
            "D goes on without P's state, for example because it has the prompt cached.",
            "Nothing: P's pages are free.",
        ),
        "NOT_HELD": Advice(
            "A state was asked for by its content, and nobody has it, or not any more: no engine "
            "says that it holds it, or each that does declined.",
            "Nothing: D computes it. If most are so, see `restow holdings`: where many offers are "
            "declined, states are evicted soon; a store with more memory or disk keeps them.",
        ),
        "NOT_PUBLISHED": Advice(
            "D's patience ran out before P had published and fenced all of the state.",
            "See in the timeline what was lacking; look whether P prefills at all, and whether its "
            "requests wait longer than D's patience.",
        ),
        "LEASE_EXPIRED": Advice(
            "P's lease ran out: nobody asked for the state, P's session was gone for longer than "
            "the lease, or P said again only a part of what it had.",
            "See in the timeline who was missing; if D comes late, publish with a longer hold.",
        ),
        "LEASE_TOO_SHORT": Advice(
            "What was left of P's lease was too short for a read.",
            "Renew leases more often, or give longer ones.",
        ),
        "TIMEOUT_TOO_SHORT": Advice(
            "What was left of D's patience was too short for a read.",
            "Give D's requests a longer timeout.",
        ),
        "NOT_ASKED_FOR": Advice(
            "Nobody asked for the state: no engine of its model is there besides P, or D's demand "
            "was refused and no other came.",
            "See `restow engines` for the missing D, and D's log for the refusal.",
        ),
        # What the two sides say of one state does not fit together.
        "PUBLICATION_REFUSED": Advice(
            "The broker refused what P published, and the detail says why.",
            "Mend what the detail names in P's engine.",
        ),
        "CONTENT_MISMATCH": Advice(
            "D asked for the state of other tokens than P computed, or of another adapter, image "
            "or salt.",
            "Have the router send one and the same prompt to P and D under one handoff id, and a "
            "new id for every prompt.",
        ),
        "CONTENT_NOT_NAMED": Advice(
            "A side published or asked without naming the state's content, and the broker serves "
            "only what it can compare (`restow serve --require-content`).",
            "Name it on both sides: `content=content_of(prompt, position)`, with "
            "`position_tokens`.",
        ),
        "READ_DEADLINE": Advice(
            "The read, or the gathering before it, took longer than its grant; nothing that came "
            "later was used.",
            "Look whether P's host is slow or paused; raise `restow serve --grant-s` for large "
            "states on slow links.",
        ),
        "READS_QUEUED": Advice(
            "D's patience ran out while its agents were reading other states: more was asked for "
            "at once than the way between P and D carries in that time.",
            "Give D's requests a longer timeout, send fewer at once, or add decode engines.",
        ),
        "TAKEN_BACK": Advice(
            "P preempted the prompt when a part of it had been read. All of it is read when P has "
            "computed it again, so this is seen only where no time was left for that.",
            "Give P more memory for its cache, or fewer prompts at once; give D's requests a "
            "longer timeout.",
        ),
        "PLAN_LATE": Advice(
            "D's patience ran out before the broker had made the plan between the two layouts.",
            "Nothing, if it is rare: the plan is kept for the next handoff. Else give D's requests "
            "a longer timeout, and look whether the broker has a processor of its own.",
        ),
        "COSTS_LATE": Advice(
            "D's patience ran out before the agents had measured what reading costs between P's "
            "host and D's.",
            "Nothing, if it is rare: costs are kept. Else give D's requests a longer timeout, or "
            "name the costs (`restow serve --costs`), so that nothing is measured.",
        ),
        "BROKER_DRAINING": Advice(
            "D's patience ran out while the broker was draining and granted nothing.",
            "End the drain (`restow drain --off`), or send the request again: where there are "
            "several brokers, another one leads by then.",
        ),
        "READ_NOT_BEGUN": Advice(
            "D's agent had no turn for the read inside its grant. The grant is given again, so "
            "this is seen only where no time was left for that.",
            "As for READS_QUEUED.",
        ),
        "GRANT_OUTLIVED": Advice(
            "D's agent reported the end of its read after the grant: P's pages may have changed.",
            "As for READ_DEADLINE; look whether D's host was paused.",
        ),
        # Who was lost.
        "ENGINE_LOST": Advice(
            "An engine unregistered, was replaced by a new life of its own, or was not heard of "
            "any more.",
            "See `restow engines`, and the engine's own log for its end.",
        ),
        "AGENT_LOST": Advice(
            "The agent of a rank is gone or came back as another process: what it had read or held "
            "is lost.",
            "See `restow agents` for who is missing, and the log of that rank.",
        ),
        "AGENT_MISSING": Advice(
            "An engine was registered, and not all of its ranks had an agent in time.",
            "Start the missing agents: `restow engines` shows how many there are.",
        ),
        "PAGES_NOT_FREE": Advice(
            "An engine closed its session while a rank of its might still have been writing.",
            "Close the engine's agents; then its pages are free.",
        ),
        "PEER_LOST": Advice(
            "D's agent could not reach P's agent, or lost it within the read.",
            "Look whether P's process lives, and whether the two hosts reach each other's UCX "
            "ports (UCX_TLS, UCX_NET_DEVICES, firewalls).",
        ),
        "AGENT_CLOSED": Advice(
            "The agent was closed before it was done.",
            "Nothing, if the engine was stopped.",
        ),
        # What the two sides said does not fit.
        "POSITION_MISMATCH": Advice(
            "P's state stands at another position than D goes on from.",
            "Have both cut the prompt alike: P before its last token where the model has "
            "recurrent state.",
        ),
        "NOT_SAMPLED": Advice(
            "D goes on behind the token that P samples, and P has published none.",
            "Have the router ask both sides alike for that, with the same parameters of sampling.",
        ),
        "ARGUMENT_INVALID": Advice(
            "A side said something that can't be meant; the detail names it.",
            "It is a fault of the engine's integration: read the detail.",
        ),
        "PAGES_INVALID": Advice(
            "Page ids do not fit the layout or the positions.",
            "It is a fault of the engine's integration: read the detail.",
        ),
        "PAGE_COUNT": Advice(
            "Too few or too many page ids for the tokens that they should hold.",
            "It is a fault of the engine's integration: read the detail.",
        ),
        "PAGE_OUT_OF_RANGE": Advice(
            "A page id is outside of the memory that the agent registered.",
            "Look whether engine and agents were started with the same number of pages.",
        ),
        "PAGE_REPEATED": Advice(
            "A list names a page twice, or two open handoffs of an engine name one page that one "
            "of them will have written: one of two states would be lost.",
            "It is a fault of the engine's integration: the message names the page and the other "
            "handoff. If the id is its null block, its layout has to say so.",
        ),
        "NULL_BLOCK": Advice(
            "An engine gave its null block where state is read or written.",
            "It is a fault of the engine's integration: look which blocks it freed before their "
            "state was handed over.",
        ),
        "MODEL_MISMATCH": Advice(
            "The two engines serve different models, or one with other weights, another adapter, "
            "quantisation or shapes.",
            "Run both from one checkpoint: `restow engines` shows what each serves. Where two are "
            "known to be alike, give both one revision (`model_revision` in vLLM).",
        ),
        "REVISION_CHANGED": Advice(
            "An engine's weights were replaced while it computed or waited for this state.",
            "Send the prompt again: the engines compute it with their present weights.",
        ),
        "REVISION_UNKNOWN": Advice(
            "A vLLM engine's weights were replaced while it ran, and nobody can say which they are "
            "now, or its prefix cache still has states of the weights before.",
            "Reset its prefix cache and the connector's (`/reset_prefix_cache`, `reset_external`); "
            "where the weights did not come from a checkpoint, tell their version as well "
            "(`/finish_weight_update`, `/update_weight_version`).",
        ),
        "SCALES_MISMATCH": Advice(
            "A field's elements are multiplied by other scales on the two sides.",
            "Load both engines from the same checkpoint, with the same KV scales.",
        ),
        "BLOCK_TOKENS_MISMATCH": Advice(
            "D keeps the blocks of its windows for other prompts, and P's blocks are no multiple "
            "of them: P may have freed what one of D's begins with.",
            "Give both engines blocks of as many tokens, or start D without prefix caching.",
        ),
        "CAST_UNSUPPORTED": Advice(
            "A field's types differ, and no exact or allowed cast exists between them.",
            "Store it in the same type on both sides.",
        ),
        "NARROWING_NOT_ALLOWED": Advice(
            "D stores a field in a narrower type than P.",
            "Store it alike, or start the broker with --allow-narrowing.",
        ),
        "STRATEGY_REFUSED": Advice(
            "The strategy that the broker was told to use can't serve this pair.",
            "Start the broker with `--strategy auto`; `restow plan --explain` says why.",
        ),
        "TOO_MANY_PIECES": Advice(
            "A plan between these layouts would fall into more pieces than can be handled.",
            "Use larger pages on one of the sides.",
        ),
        "PLAN_INVALID": Advice(
            "Nothing can be planned between the two layouts.",
            "Run `restow plan P.json D.json`: it says why.",
        ),
        # What an agent could not do.
        "STAGING_EXHAUSTED": Advice(
            "A state needs more staging memory than the agent's whole pool has.",
            "Give the agents more staging: `staging_mb` in vLLM, `AgentSettings.staging_bytes`.",
        ),
        "ORDER_TOO_LARGE": Advice(
            "The handoff needs more descriptors than an agent makes at once.",
            "Larger pages, or pages that both sides lay out alike, need fewer; so do shorter "
            "prompts.",
        ),
        "AGENT_BUSY": Advice(
            "The agent had more orders at once than it takes.",
            "Ask for fewer handoffs at once, or spread them over more engines.",
        ),
        "ORDER_INVALID": Advice(
            "The agent was sent an order that does not fit what was sent before it.",
            OTHER_VERSION,
        ),
        "PROGRAM_INVALID": Advice(
            "The agent was sent a program that would touch bytes outside of its pages.",
            OTHER_VERSION + " If they are, it is a fault of Restow: keep the logs.",
        ),
        "METADATA_REFUSED": Advice(
            "P's NIXL metadata is malformed, ended the process that D's agent loads it in first, "
            "or is another agent's.",
            "Restart P's engine, with the same version of NIXL as D's. If it comes again, somebody "
            "changes metadata on its way: look at who runs the broker and P's host.",
        ),
        "READ_FAILED": Advice(
            "NIXL refused or broke a read for another reason than a lost peer, or P's agent gave "
            "up gathering what was being read.",
            "See the log of D's agent: UCX says there what it met; and that of P's agent.",
        ),
        "COPY_FAILED": Advice(
            "The agent could not copy, multiply or hash: its device has no memory left or broke, "
            "or rows overlap.",
            "See the log of the agent; look at the GPU's health, and at how much of its memory the "
            "engine leaves free.",
        ),
        "TRANSPORT_FAILED": Advice(
            "NIXL could not be set up, or would not register memory.",
            "See the log of the agent: limits on locked memory are a common cause.",
        ),
        "CUDA_UNAVAILABLE": Advice(
            "The agent was told of memory on a CUDA device that it can't reach.",
            "Give its process or container that device and its driver.",
        ),
        "DIGEST_MISMATCH": Advice(
            "What D read is not what P hashed: the state was thrown away.",
            "Find what changes P's pages or the bytes on the way. Whatever it is, take the host "
            "out of service until it is found.",
        ),
        "DIGEST_MISSING": Advice(
            "Content was to be compared, and P's agent made no digest.",
            OTHER_VERSION,
        ),
        "INTERNAL": Advice(
            "Something failed that should not: the detail says what.",
            "It is a fault of Restow: keep the logs of the broker and of both agents.",
        ),
    }
)
"""By reason. What agents report may be of a newer version, and then is not in here."""

ORDINARY: Final = frozenset({"CANCELLED", "RELEASED", "ABANDONED", "DECLINED", "NOT_HELD"})
"""Reasons of ordinary ends: somebody gave the handoff up, or D does without a state. No log calls
them failures, and no alert counts them (`RestowHandoffsFail` in docker/prometheus/alerts.yaml)."""

UNKNOWN: Final = Advice(
    "This version of Restow does not know the reason: an agent or engine of another one gave it.",
    OTHER_VERSION,
)


def advice_for(reason: str) -> Advice:
    """What to say of a reason."""
    return REASONS.get(reason, UNKNOWN)
