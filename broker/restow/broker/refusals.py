"""Reasons why an engine, agent, broker or call is refused, which end no handoff, with advice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Advice(NamedTuple):
    """What a reason means, and what to do about it."""

    meaning: str
    next_step: str


OTHER_VERSION: Final = "Run one version of Restow on the broker and on all hosts."
_READ_LAYOUT = "The message names the place; `restow layout check FILE` checks a file."
_READ_TRUST = "Read the message, and docs/security.md."
_ITSELF = "Nothing: the broker retries by itself."

REFUSALS: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        # Messages about handoffs.
        "HANDOFF_CONFLICT": Advice(
            "The id was used before: a side contradicted its first message about the handoff, "
            "or the handoff has ended.",
            "Have the router give each prompt an id that was never used, also for a retry.",
        ),
        "HANDOFF_OWNED": Advice(
            "Another engine has this side of the handoff: it published or asked first, or all "
            "readers that P named have the state.",
            "Have the router send an id to one P and one D, or tell P how many D's there are "
            "(`readers`); if two engines have the same id, see ENGINE_REPLACED.",
        ),
        "HANDOFF_UNKNOWN": Advice(
            "The engine has no side of a handoff with that id: it ended long ago, or the broker "
            "was restarted.",
            "Nothing, if it had ended; otherwise compare the id with the router's.",
        ),
        # Messages about prefixes.
        "CHAIN_INVALID": Advice(
            "Hashes of a prompt, or their form, are invalid: their size, their number, or "
            "positions that do not rise. The message names the field.",
            "Correct what the message names in the engine's adapter or the router.",
        ),
        "CHAIN_FORM_DIFFERS": Advice(
            "The hashes use another algorithm or quantum than those of the engines that hold "
            "states of this model; or an engine's quantum does not divide its blocks.",
            "Configure all engines of a model with the same hash algorithm and seed; `restow "
            "holdings` shows the form of each engine.",
        ),
        "WEIGHTS_UNKNOWN": Advice(
            "States were requested by content, but the model's layouts have no revision, so "
            "states of other weights could not be told apart.",
            "Give the layouts of all its engines a revision, equal exactly when the weights are "
            "(`restow layout from-config --revision`, `model_revision` of the vLLM connector).",
        ),
        "HOLDINGS_INVALID": Advice(
            "An engine announced holdings that it cannot have: of a group that it lacks, or too "
            "many at once. The batch was ignored.",
            "This is a fault of the engine's adapter: the message names what is wrong.",
        ),
        "DIRECTORY_FULL": Advice(
            "The broker holds its maximum of handoffs, engines or bytes: the message says which.",
            "See in `restow handoffs` what they wait for; raise `--max-live` or `--max-bytes` "
            "of `restow serve`.",
        ),
        "QUOTA_EXCEEDED": Advice(
            "The tenant has reached its quota of handoffs, engines or bytes: the message says "
            "which.",
            "See in `restow handoffs` what they wait for; raise `--tenant-max-live`, "
            "`--tenant-max-engines` or `--tenant-max-bytes` of `restow serve`.",
        ),
        "MESSAGE_TOO_LARGE": Advice(
            "A message of an engine or agent exceeds the size limit; nothing was sent.",
            "Publish in chunks (`final=False`); the message names what is too large.",
        ),
        "QUEUE_FULL": Advice(
            "The engine or agent read its stream too slowly, and the broker closed it.",
            "Nothing, if it connected again by itself; otherwise check what its process is busy "
            "with.",
        ),
        "FIRST_MESSAGE_LATE": Advice(
            "The first message of a call did not arrive completely in time, and the broker "
            "ended the call.",
            "Check whether its client was stopped, or its network is overloaded.",
        ),
        "PARAMETERS_INVALID": Advice(
            "The `kv_transfer_params` of a request name no handoff, or no side of it.",
            "Have the router send what docs/vllm.md describes; the message names what is wrong.",
        ),
        "BLOCKS_INVALID": Advice(
            "The lists of blocks that vLLM names contain no state to hand over.",
            "This is a fault of the connector: keep the engine's log.",
        ),
        "BROKER_SILENT": Advice(
            "The broker is gone, and did not return in time to report the end of the handoff.",
            "Find out why the broker is away; engines register again by themselves when it is "
            "back.",
        ),
        "SESSION_CLOSED": Advice(
            "The engine closed its session before the handoff had ended.",
            "Nothing, if the engine was stopped.",
        ),
        # Commands about states.
        "COMMAND_CONFLICT": Advice(
            "A command has the id of an earlier command that says something else.",
            "Give each command an id that was never used (`restow state` does).",
        ),
        "COMMAND_UNKNOWN": Advice(
            "No command has that id: it was not given to this broker since its start, or it ended "
            "more than ten minutes ago.",
            "Give the command again: a store that has carried it out answers as before.",
        ),
        "COMMAND_LATE": Advice(
            "A store did not carry a command out in time. A pin is released again.",
            "See in the store's log what it does, and whether it runs this version of Restow.",
        ),
        "NO_STORE": Advice(
            "A command names an engine that is no store.",
            "Name a store; or have the engine compute the prompt with max_tokens 1.",
        ),
        "SAME_STORE": Advice(
            "A store's state was to move, and no other store was named.",
            "Name another store (`--to`).",
        ),
        "NO_REPLY": Advice(
            "No reply of the engine that can move begins with these tokens: it has ended, or it "
            "depends on more than its tokens, or its router would have no engine go on with it.",
            "Nothing: the reply ends where it is.",
        ),
        "NOT_ARRIVED": Advice(
            "A store has requested a state for a command, and did not get it.",
            "The detail says how the handoff ended, and the reason there what to do.",
        ),
        "NOT_PINNED": Advice(
            "A store has no pin of the state: it has ended, or the store has been restarted.",
            "Nothing.",
        ),
        "PINNED": Advice(
            "A state was not evicted, because it is pinned.",
            "Release it first (`restow state release`), or wait until its pin ends.",
        ),
        "PINS_FULL": Advice(
            "The pins of a store have reached their limit.",
            "Wait until pins end, release some, or raise `--pin-memory` of `restow store`.",
        ),
        "STORE_FULL": Advice(
            "A store has no room for a state: pinned states, and states that are being read, stay.",
            "Give the store more memory, or pin less.",
        ),
        # Engines, agents and callers.
        "OTHER_SERVER": Advice(
            "The server at the broker's address is no Restow broker, is a gateway without a "
            "route for the call, or is a broker older than its client. An engine or agent that "
            "was connected before retries until a broker answers.",
            "Nothing, if it passes; otherwise compare the address with `restow serve --listen`, "
            "and check what forwards calls to it.",
        ),
        "ENGINE_REPLACED": Advice(
            "A newer process registered with the same engine id; this process is refused from "
            "then on, and vLLM exits by itself.",
            "Give each process an id of its own; `restow engines` names both incarnations. "
            "After a restart this is expected.",
        ),
        "ENGINE_UNKNOWN": Advice(
            "No engine with that id is registered.",
            "Nothing, if the broker was restarted: engines register again by themselves.",
        ),
        "ENGINE_DRAINING": Advice(
            "The engine is draining and joins no handoff that began after its drain.",
            "Have the router send prompts to another engine; `restow drain --engine ID --off` "
            "ends the drain.",
        ),
        "ENGINE_CONNECTED": Advice(
            "A connected engine cannot be removed: it has a session or an agent.",
            "Drain it (`restow drain --engine ID --wait`) and end its processes; it is then "
            "removed by itself.",
        ),
        "SESSION_REPLACED": Advice(
            "The engine opened another stream after this stream.",
            "Nothing: the client opens a new stream if that was unintended.",
        ),
        "AGENT_UNKNOWN": Advice(
            "An agent serves a rank that its engine's layout does not have.",
            "Start as many agents as the engine has ranks, with the same engine id.",
        ),
        "AGENT_REPLACED": Advice(
            "A newer agent registered for the same rank, and this agent must stop.",
            "Run a single agent for each rank; see `restow agents`.",
        ),
        "REGIONS_OVERLAP": Advice(
            "Regions of an engine overlap: one of two states would be lost.",
            "Give every region of every rank memory of its own; the message names both regions.",
        ),
        "AGENT_REGIONS_MISMATCH": Advice(
            "An agent's memory differs from its engine's layout of the rank.",
            "Register the memory that the layout describes; the message names the region.",
        ),
        "AGENT_RELEASE_DIFFERS": Advice(
            "The releases of the broker and an agent use different program formats.",
            OTHER_VERSION,
        ),
        "REGION_INVALID": Advice(
            "Memory that an engine passes to its agent does not match its region.",
            "The message names the region: compare its strides and pages with the memory.",
        ),
        "PAIR_NOT_READY": Advice(
            "Nothing can be read between the two engines at present.",
            "See `restow engines` for engines without a session or without agents.",
        ),
        "UNAUTHENTICATED": Advice(
            "The broker does not know the caller: it presented no certificate or token of a "
            "known identity.",
            _READ_TRUST,
        ),
        "FORBIDDEN": Advice("The caller is known but has no right to make this call.", _READ_TRUST),
        "TRUST_INVALID": Advice(
            "Settings or files of certificates and tokens are unusable.", _READ_TRUST
        ),
        "TRUST_SETTINGS_INVALID": Advice(
            "Settings of certificates and tokens contradict each other.", _READ_TRUST
        ),
        "KEY_FILE_INVALID": Advice(
            "A certificate, key or authority cannot be read or used.", _READ_TRUST
        ),
        "TOKEN_FILE_INVALID": Advice("The file of a token cannot be read or used.", _READ_TRUST),
        "TOKEN_OVER_PLAINTEXT": Advice(
            "A token would travel in plaintext, where others could read it.", _READ_TRUST
        ),
        "BROKER_UNREACHABLE": Advice(
            "No broker answers at the address.",
            "Start it with `restow serve`, or name its address: `--broker`, RESTOW_BROKER, or "
            "`broker` in vLLM's extra config.",
        ),
        "ADDRESS_INVALID": Advice(
            "An address is malformed: it lacks a port, or brackets (IPv6).",
            "Write it in the form that the message shows.",
        ),
        "FORKED": Advice(
            "A process was forked after sessions, agents or clients had been started in it.",
            "Start processes by `spawn` or `forkserver`, or fork before the first of them is "
            "created.",
        ),
        "NO_WELCOME": Advice(
            "An agent reached the broker but was not admitted: its engine has not registered.",
            "Check in the engine's log why it does not register.",
        ),
        "DAEMON_UNREACHABLE": Advice(
            "No agent daemon answers at the socket.",
            "Start `restow agent --socket PATH` on the engine's host.",
        ),
        # Stores.
        "STORE_TOO_SMALL": Advice(
            "The store's memory has no room for a page of each kind.",
            "Give it more memory (`--memory`); the message says how much it needs.",
        ),
        "STORE_DISK_IN_USE": Advice(
            "Another store uses the folder.", "Give each store a folder of its own (`--disk`)."
        ),
        "STORE_DISK_OTHER": Advice(
            "The folder belongs to another model, layout, version or program.",
            "Give the store another folder, or remove the folder's content; the message says "
            "what differs.",
        ),
        "STORE_DISK_UNUSABLE": Advice(
            "The folder cannot be read or written.",
            "Correct what the message names, or start without `--disk`.",
        ),
        "STORE_RUN_LOST": Advice(
            "A state could not be written to the disk, or was damaged there.",
            "Nothing: it is computed again. If this recurs, check the disk.",
        ),
        # Layouts and engines.
        "LAYOUT_INVALID": Advice("The layout is invalid.", _READ_LAYOUT),
        "LAYOUT_MALFORMED": Advice("The layout's description is malformed.", _READ_LAYOUT),
        "LAYOUT_HOLE": Advice("No rank holds some element of a field.", _READ_LAYOUT),
        "SCALES_UNKNOWN": Advice(
            "Nothing identifies the static scales of the engine's keys and values, so another "
            "engine may have other scales. The layout is for looking at.",
            "Make it again with `--revision TEXT`, or `--kv-scales static "
            "--kv-scales-fingerprint TEXT`: a text that is equal exactly where the scales are.",
        ),
        "LAYOUT_OVERLAP": Advice(
            "Two shards overlap without being replicas of each other.", _READ_LAYOUT
        ),
        "LAYOUT_STRIDE": Advice(
            "A stride leaves the page or maps two elements to the same bytes.", _READ_LAYOUT
        ),
        "LAYOUT_MEMORY_SHARED": Advice(
            "Two shards of a rank claim the same bytes of a page.", _READ_LAYOUT
        ),
        "LAYOUT_RANKS_DISAGREE": Advice(
            "Two ranks describe the same field, group or model differently.", _READ_LAYOUT
        ),
        "TP_SIZE_NOT_ALLOWED": Advice(
            "The model's heads or groups cannot be divided by the tensor-parallel size.",
            "Use another tensor-parallel size; the message names what cannot be divided.",
        ),
        "STAGES_NOT_ALLOWED": Advice(
            "The model's layers cannot be divided into those pipeline stages.",
            "Use other stages; the message names the layers.",
        ),
        "MODEL_TYPE_UNKNOWN": Advice(
            "No family describes models of that type.",
            "README.md lists the known types; a layout file can describe any other model.",
        ),
        "SETTINGS_INVALID": Advice(
            "The option `kv_connector_extra_config` has an invalid value.",
            "The message names the key; docs/vllm.md lists them.",
        ),
        "ENGINE_UNSUPPORTED": Advice(
            "A vLLM engine was started with an option that the connector does not support.",
            "The message names the option; docs/vllm.md lists what is not yet supported.",
        ),
        "CACHE_UNKNOWN": Advice(
            "A vLLM cache does not have the layout that the model's config implies.",
            f"{OTHER_VERSION} Take a version of vLLM that docs/vllm.md names.",
        ),
        # Several brokers.
        "NOT_LEADER": Advice(
            "The broker is a standby; the message names the leader.",
            "Nothing, if it passes: engines, agents and routers follow by themselves. Otherwise "
            "check that they can reach the leader's address (`restow serve --advertise`), and run "
            "`restow doctor`.",
        ),
        "NO_LEADER": Advice(
            "No broker leads at the moment: the leader is gone and no standby has followed yet, "
            "or the brokers cannot reach etcd.",
            "Nothing, if it passes within a few seconds; otherwise `restow brokers` says why etcd "
            "does not answer, and `restow doctor --etcd` checks etcd.",
        ),
        "EPOCH_OVER": Advice(
            "A broker spoke in a past epoch, for example after it was paused. Engines and agents "
            "left its stream and ignored the message.",
            "Nothing: they ask the leader. If this recurs, find out what pauses brokers: memory, "
            "a paused host, or a changed clock.",
        ),
        "ADDRESS_TAKEN": Advice(
            "Another broker advertises the address of this broker, or a former life of this "
            "broker did until a moment ago.",
            "Nothing, if it passes when that lease has ended; otherwise give each broker an "
            "`--advertise` of its own.",
        ),
        "BROKER_LEASE_ENDED": Advice(
            "The broker did not renew its lease in time: another broker may lead.",
            "Nothing: it joins again by itself. If this recurs, find out what delays the broker "
            "or etcd, or use a longer `--member-lease-s`.",
        ),
        # Etcd.
        "ETCD_UNREACHABLE": Advice(
            "No etcd answers the broker in time. The broker grants nothing while its lease may "
            "have ended.",
            "Check that most of etcd's members run, and that the broker reaches them: "
            "`restow doctor --etcd` with the broker's options tries each.",
        ),
        "ETCD_NO_LEADER": Advice(
            "Etcd answers, but has no leader: it agrees on nothing until its members elect a "
            "leader.",
            "Nothing, if it passes within a few seconds; otherwise check that most of its members "
            "run and reach each other.",
        ),
        "ETCD_REFUSED": Advice(
            "Etcd does not know the broker's user or certificate, or does not let it read and "
            "write the brokers' keys.",
            "Give the broker `--etcd-user` and `--etcd-password-file`, or `--etcd-cert`, of a user "
            "with a role that may read and write keys that begin with /restow/.",
        ),
        "ETCD_TOO_OLD": Advice(
            "The server at the address is an etcd older than 3.4, or no etcd.",
            "Use a later release; the message has the address.",
        ),
        "ETCD_SETTINGS_INVALID": Advice(
            "Settings of etcd's addresses, TLS or password contradict each other, or one of "
            "their files is unusable.",
            "Correct what the message names.",
        ),
        "ETCD_FAILED": Advice(
            "Etcd refused a call; the message has its own words.",
            "Read the message: a full quota (`etcdctl alarm list`) is a common cause.",
        ),
        "ETCD_TOKEN_ENDED": Advice("The broker's token at etcd has expired.", _ITSELF),
        "ETCD_LEASE_GONE": Advice("A lease at etcd has ended, with all its keys.", _ITSELF),
        # Kubernetes Leases.
        "KUBERNETES_UNREACHABLE": Advice(
            "No API server answers the broker in time. The broker grants nothing while its lease "
            "may have ended.",
            "Nothing, if it passes within a few seconds; otherwise check that the pod can reach "
            "the API server. A longer `--member-lease-s` bridges restarts of the API server.",
        ),
        "KUBERNETES_REFUSED": Advice(
            "Kubernetes does not know the broker's service account, or does not permit the call.",
            "Give the account a Role that may get, list, create, update and delete leases of "
            "coordination.k8s.io in that namespace: the chart has this Role.",
        ),
        "KUBERNETES_SETTINGS_INVALID": Advice(
            "The given service account, namespace or names are unusable.",
            "Correct what the message names.",
        ),
        "KUBERNETES_FAILED": Advice(
            "Kubernetes refused a call; the message has its own words.", "Read the message."
        ),
        "KUBERNETES_CONFLICT": Advice("A Lease has changed since the broker read it.", _ITSELF),
    }
)
"""Advice by reason."""
