"""The numbers that the contract's comments name are those that the code goes by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from restow.broker.block_ids import ID_BYTES, MAX_BLOCKS
from restow.broker.client.connection import brokers
from restow.broker.client.connection.errors import MAY_PASS
from restow.broker.client.engine import open_handoffs
from restow.broker.core.engines.engine import MAX_FENCES
from restow.broker.core.handoffs.handoff import MAX_DETAIL, MAX_REASON
from restow.broker.core.handoffs.publication import MAX_PUBLICATION_BYTES
from restow.broker.core.ledger.handoff_table import MAX_ID_LENGTH
from restow.broker.core.prefix import changes
from restow.broker.layout import values as layout
from restow.broker.printable import MAX_WORD_LENGTH
from restow.broker.rpc import sizes, status
from restow.broker.server import serve
from restow.broker.server.base import outbox, standing, watching
from restow.broker.server.base import waiting_calls as expected
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.gate import guard as first_messages
from restow.broker.server.services import checked_messages as checked
from restow.broker.trust.identity import MAX_NAME_LENGTH

PROTO = Path(__file__).resolve().parents[2] / "proto" / "restow" / "v1"
MIB, GIB = 1 << 20, 1 << 30
LIMITS = BrokerSettings().limits()
MAX_MS = int(LIMITS.max_lease_s * 1000)

SAID = {
    "broker.proto": (
        f"handoffs, and tenants, have 1 to {MAX_ID_LENGTH} characters",
        f"keeps {status.MAX_MESSAGE_BYTES // 1024} KiB of a detail, and {MAX_DETAIL} characters",
        f"an agent names has at most {min(MAX_REASON, MAX_WORD_LENGTH)} characters",
        f"A message to the broker has at most {sizes.MAX_TO_BROKER_BYTES // MIB} MiB",
        f"A message from the broker has at most {sizes.MAX_FROM_BROKER_BYTES // MIB} MiB",
        f"several messages should have at most {sizes.MAX_BATCH_BYTES // MIB} MiB",
        f"may refuse more than {serve.MAX_METADATA_BYTES >> 10} KiB of metadata",
        f"Leases and timeouts are at most {LIMITS.max_lease_s:g} s",
        f"lease is {LIMITS.lease_s:g} s and the default timeout is {LIMITS.timeout_s:g} s, unless",
        f"read for at most {LIMITS.grant_s:g} s (--grant-s)",
        f"ends at least {LIMITS.lease_margin_s:g} s before P's lease",
        f"less than {LIMITS.min_grant_s:g} s is left",
        f"whole within {first_messages.WAIT_S:g} s (FIRST_MESSAGE_LATE)",
        f"accepts {LIMITS.max_live} handoffs (--max-live) and {LIMITS.max_engines} engines",
        f"more than {BrokerSettings().max_queue} messages (--max-queue)",
        f"or {outbox.MAX_QUEUE_BYTES // MIB} MiB unread",
        f"no open handoff after --engine-idle-s ({LIMITS.engine_idle_s:g} s)",
        f"letters, digits and '.+-_', at most {checked.MAX_VERSION_LENGTH}".replace("'", '"'),
        f"A list holds at most {MAX_BLOCKS} ids, all",
        f"lists of a publication {MAX_PUBLICATION_BYTES // ID_BYTES}.",
        f"A message has at most {sizes.MAX_TO_BROKER_BYTES // MIB} MiB, so publish",
        f"{checked.MIN_CONTENT_BYTES} to {checked.MAX_CONTENT_BYTES} bytes, equal exactly",
        f"the pages unchanged, counted from the broker's receipt. 0: the broker's default. At most "
        f"{MAX_MS}.",
        f"for the publication, counted from the broker's receipt. 0: the default. At "
        f"most {MAX_MS}.",
        f"0: the broker's default. At most {MAX_MS}. int32 lease_ms = 2",
        f"only to open the session. At most {sizes.MAX_TO_BROKER_BYTES // MIB} MiB in all",
        # What clients do, as those in Python do it.
        f"Pause for {brokers.FIRST_S:g} s, doubled after each failure up to {brokers.LAST_S:g} s, "
        f"each time multiplied by a random factor from {1 - brokers.JITTER:g} to "
        f"{1 + brokers.JITTER:g}. Begin at {brokers.FIRST_S:g} s again after a stream has lasted "
        f"{brokers.HELD_S:g} s",
        f"until {open_handoffs.SILENCE_S:g} s after D's deadline",
        f"until {open_handoffs.SILENCE_S:g} s after the last lease",
        f"pings every {sizes.PING_EVERY_S:g} s",
        f"is not answered within {sizes.ANSWER_S:g} s",
        f"Both sides then know within {sizes.NOTICED_S:g} s",
        f"every {sizes.SEVERAL_EVERY_S:g} s and give up after {sizes.SEVERAL_ANSWER_S:g} s",
        f"refuses pings more often than every {sizes.LEAST_EVERY_S:g} s",
        f"for another leader, for at most {standing.LEADER_WAIT_S:g} s",
        f'metadata "{brokers.UNREACHED_KEY}"',
        f"keeps the last {changes.MAX_CHANGES} changes of a tenant, at most "
        f"{changes.MAX_LOG_BYTES // MIB} MiB",
        f"At most {watching.MAX_WATCHERS} streams watch a tenant",
    ),
    "agent_link.proto": (
        f"before its engine waits for {expected.WAIT_S:g} s",
        f"The broker waits {LIMITS.agent_wait_s:g} s for the agent",
        f"every incarnation: 1 to {MAX_ID_LENGTH} characters",
        f"Limited by the {sizes.MAX_TO_BROKER_BYTES // MIB} MiB",
        f"at most {MAX_ID_LENGTH} characters. The broker has the cost",
        f"An engine may have {MAX_FENCES} early fences",
        f"at most {checked.MAX_VERSION_LENGTH}.",
    ),
    "layout.proto": (
        f"At most {layout.MAX_RANKS} ranks; at most {layout.MAX_SHARDS} fields, regions and shards "
        f"each; at most {layout.MAX_GROUPS} groups",
        f"each of at most {layout.MAX_WORD_LENGTH} characters",
        f"Names of its axes, at most {layout.MAX_AXES};",
        f"zero or more than {layout.MAX_PAGE_BYTES // GIB} GiB",
        f"0 means 1. At most {layout.MAX_PAGES_PER_BLOCK}.",
    ),
}


def words_of(name: str) -> str:
    """Return a file of the contract in one line, without comment marks."""
    return " ".join(re.sub(r"^ *//", "", (PROTO / name).read_text(), flags=re.MULTILINE).split())


@pytest.mark.parametrize(("name", "sentence"), [(n, one) for n in SAID for one in SAID[n]])
def test_a_number_of_the_contract_is_that_of_the_code(name: str, sentence: str) -> None:
    assert sentence in words_of(name)


def test_a_lease_is_renewed_at_a_third() -> None:
    assert open_handoffs.RENEWALS_PER_LEASE == 3
    assert "Renew a lease at a third of its length" in words_of("broker.proto")


def test_names_of_identities_are_as_long_as_ids() -> None:
    assert MAX_NAME_LENGTH == MAX_ID_LENGTH


def test_statuses_that_are_tried_again_are_named() -> None:
    assert "after {}, {} and {}, after every".format(*MAY_PASS) in words_of("broker.proto")
    assert "{}, {}, {} and ENGINE_UNKNOWN".format(*MAY_PASS) in words_of("agent_link.proto")
