"""Why an engine is refused, and what to do: what ends no handoff that others see."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from restow.broker.advice import OTHER_VERSION, Advice

_READ_LAYOUT = "The message names the place; `restow layout check FILE` says the same of a file."
_READ_TRUST = "Read the message, and docs/security.md."

REFUSALS: Final[Mapping[str, Advice]] = MappingProxyType(
    {
        # Words about a handoff.
        "HANDOFF_CONFLICT": Advice(
            "The id was used before: a side said something else of the handoff than the first "
            "time, or asked for one that has ended.",
            "Have the router give each prompt an id that was never used, also when it tries again.",
        ),
        "HANDOFF_OWNED": Advice(
            "Another engine has this side of the handoff: it published or asked first, or all "
            "readers that P named have the state.",
            "Have the router send an id to one P and one D, or tell P how many D's there are "
            "(`readers`); of two engines with one id, see ENGINE_REPLACED.",
        ),
        "HANDOFF_UNKNOWN": Advice(
            "The broker knows no handoff of that id that the engine has a side of: it ended long "
            "ago, or the broker was started anew.",
            "Nothing, if it had ended; else compare the id with what the router gave.",
        ),
        # Words about prefixes.
        "CHAIN_INVALID": Advice(
            "Hashes of a prompt, or how they are said to be made, can't be a chain: their size, "
            "their number, or positions that do not rise. The message names the field.",
            "Mend what the message names in the engine's adapter or the router.",
        ),
        "CHAIN_FORM_DIFFERS": Advice(
            "Hashes are by another algorithm, or after other tokens, than those of the engines "
            "that hold states of this model; or an engine's do not divide its blocks.",
            "Have all engines of a model hash alike, with one seed; `restow holdings` shows how "
            "each does.",
        ),
        "WEIGHTS_UNKNOWN": Advice(
            "States are to be found by their content, and the model's layouts have no revision: "
            "nobody could tell its states from those of other weights.",
            "Give the layouts of all its engines a revision, equal exactly when the weights are "
            "(`restow layout from-config --revision`, `model_revision` of the vLLM connector).",
        ),
        "HOLDINGS_INVALID": Advice(
            "An engine says that it holds what it can't: of a group that it lacks, or too much at "
            "once. Nothing of that batch counts.",
            "It is a fault of the engine's adapter: the message names what is wrong.",
        ),
        "DIRECTORY_FULL": Advice(
            "The broker holds as many handoffs, engines or bytes as it may: the message says of "
            "what.",
            "See in `restow handoffs` what they wait for; raise `--max-live` or `--max-bytes` of "
            "`restow serve`.",
        ),
        "QUOTA_EXCEEDED": Advice(
            "The tenant holds as many handoffs, engines or bytes as it may: the message says of "
            "what.",
            "See in `restow handoffs` what they wait for; raise `--tenant-max-live`, "
            "`--tenant-max-engines` or `--tenant-max-bytes` of `restow serve`.",
        ),
        "MESSAGE_TOO_LARGE": Advice(
            "What an engine or agent says at once is more than a message may carry: nothing was "
            "sent.",
            "Publish in chunks (`final=False`); the message names what is too large.",
        ),
        "QUEUE_FULL": Advice(
            "The engine or agent reads its stream too slowly: it was closed.",
            "Nothing, if it connected again by itself; else look what its process is busy with.",
        ),
        "FIRST_MESSAGE_LATE": Advice(
            "A call's first message did not come whole in time; the call was ended.",
            "See whether its client was stopped, or what its network is busy with.",
        ),
        "PARAMETERS_INVALID": Advice(
            "A request's `kv_transfer_params` name no handoff, or no side of it.",
            "Have the router send what docs/vllm.md says; the message names what is wrong.",
        ),
        "BLOCKS_INVALID": Advice(
            "The lists of blocks that vLLM names hold no state that could be handed over.",
            "It is a fault of the connector: keep the engine's log.",
        ),
        "BROKER_SILENT": Advice(
            "The broker is gone, and has not come back in time to say how the handoff ended.",
            "See why the broker is away; engines register again by themselves when it is back.",
        ),
        "SESSION_CLOSED": Advice(
            "The engine closed its session before the handoff had ended.",
            "Nothing, if the engine was stopped.",
        ),
        # Who says it.
        "OTHER_SERVER": Advice(
            "What answers at the broker's address is no broker of Restow, or a gateway before it "
            "that has no route for the call, or a broker that is older than its client. An engine "
            "or agent that was let in before tries again until a broker answers.",
            "Nothing, if it passes; else compare the address with `restow serve --listen`, and "
            "look at what forwards calls to it.",
        ),
        "ENGINE_REPLACED": Advice(
            "Another process registered with the same engine id after this one, which is refused "
            "from then on: vLLM ends by itself.",
            "Give each process an id of its own; `restow engines` names both lives. After a "
            "restart it is as it should be.",
        ),
        "ENGINE_UNKNOWN": Advice(
            "No engine of that id is registered.",
            "Nothing, if the broker was started anew: engines register again by themselves.",
        ),
        "ENGINE_DRAINING": Advice(
            "The engine is about to leave, and takes part in nothing that began after that.",
            "Have the router send prompts to another engine; `restow drain --engine ID --off` has "
            "it take them again.",
        ),
        "ENGINE_CONNECTED": Advice(
            "An engine was to be forgotten that has a session or an agent connected.",
            "Drain it (`restow drain --engine ID --wait`) and end its processes: it is forgotten "
            "by itself then.",
        ),
        "SESSION_REPLACED": Advice(
            "The engine opened another stream after this one.",
            "Nothing: it is opened again where that was not meant.",
        ),
        "AGENT_UNKNOWN": Advice(
            "An agent serves a rank that its engine's layout does not have.",
            "Start as many agents as the engine has ranks, with the same engine id.",
        ),
        "AGENT_REPLACED": Advice(
            "Another agent registered for the same rank after this one, which has to stop.",
            "Run one agent for each rank; see `restow agents`.",
        ),
        "REGIONS_OVERLAP": Advice(
            "Regions of an engine lie on each other: one of two states would be lost.",
            "Give every region of every rank memory of its own; the message names both regions.",
        ),
        "AGENT_REGIONS_MISMATCH": Advice(
            "An agent's memory is not what its engine's layout says of the rank.",
            "Register in the agent what the layout describes; the message names the region.",
        ),
        "AGENT_RELEASE_DIFFERS": Advice(
            "The broker and an agent are of releases that write programs in different forms.",
            OTHER_VERSION,
        ),
        "REGION_INVALID": Advice(
            "Memory that an engine hands to its agent is not what its region says.",
            "The message names the region: compare its strides and pages with the memory.",
        ),
        "PAIR_NOT_READY": Advice(
            "Between the two engines nothing can be read now.",
            "See `restow engines` for who has no session or lacks agents.",
        ),
        "UNAUTHENTICATED": Advice(
            "The broker does not know who calls: no certificate or token of a known identity.",
            _READ_TRUST,
        ),
        "FORBIDDEN": Advice("The caller is known, and may not do this.", _READ_TRUST),
        "TRUST_INVALID": Advice("Settings or files of trust can't be used.", _READ_TRUST),
        "TRUST_SETTINGS_INVALID": Advice(
            "Settings of certificates and tokens do not go together.", _READ_TRUST
        ),
        "KEY_FILE_INVALID": Advice(
            "A certificate, key or authority can't be read or used.", _READ_TRUST
        ),
        "TOKEN_FILE_INVALID": Advice("The file of a token can't be read or used.", _READ_TRUST),
        "TOKEN_OVER_PLAINTEXT": Advice(
            "A token would go where everybody on the way could read it.", _READ_TRUST
        ),
        "BROKER_UNREACHABLE": Advice(
            "No broker answers at the address.",
            "Start it with `restow serve`, or name its address: `--broker`, RESTOW_BROKER, or "
            "`broker` in vLLM's extra config.",
        ),
        "ADDRESS_INVALID": Advice(
            "An address is not written as addresses are: it lacks a port, or brackets (IPv6).",
            "Write it as the message shows.",
        ),
        "FORKED": Advice(
            "A process was forked from one in which sessions, agents or clients had begun.",
            "Start processes by `spawn` or `forkserver`, or fork before the first one is made.",
        ),
        "NO_WELCOME": Advice(
            "An agent reached the broker and was not let in: its engine has not registered.",
            "Look in the engine's log why it does not register.",
        ),
        "DAEMON_UNREACHABLE": Advice(
            "No agent daemon answers at the socket.",
            "Start `restow agent --socket PATH` on the engine's host.",
        ),
        # A store.
        "STORE_TOO_SMALL": Advice(
            "The memory of a store has no room for a page of each sort.",
            "Give it more (`--memory`); the message says how much is needed.",
        ),
        "STORE_DISK_IN_USE": Advice(
            "Another store has the folder.", "Give each store a folder of its own (`--disk`)."
        ),
        "STORE_DISK_OTHER": Advice(
            "The folder is of another model, layout or version, or of another program.",
            "Give the store another folder, or remove what is in it; the message says what "
            "differs.",
        ),
        "STORE_DISK_UNUSABLE": Advice(
            "The folder can't be read or written.", "Mend what the message names, or leave it out."
        ),
        "STORE_RUN_LOST": Advice(
            "A state could not be written to the disk, or is not there as it was written.",
            "Nothing: it is computed again. If that is often so, look after the disk.",
        ),
        # An engine as it is.
        "LAYOUT_INVALID": Advice("The layout can't be accepted.", _READ_LAYOUT),
        "LAYOUT_MALFORMED": Advice("The layout's description is malformed.", _READ_LAYOUT),
        "LAYOUT_HOLE": Advice("No rank holds some element of a field.", _READ_LAYOUT),
        "LAYOUT_OVERLAP": Advice(
            "Two shards overlap without being replicas of each other.", _READ_LAYOUT
        ),
        "LAYOUT_STRIDE": Advice("A stride leaves the page or folds elements.", _READ_LAYOUT),
        "LAYOUT_MEMORY_SHARED": Advice(
            "Two shards of a rank claim the same bytes of a page.", _READ_LAYOUT
        ),
        "LAYOUT_RANKS_DISAGREE": Advice(
            "Two ranks describe the same thing differently.", _READ_LAYOUT
        ),
        "TP_SIZE_NOT_ALLOWED": Advice(
            "The model's heads or groups can't be cut into that many ranks.",
            "Take another tensor-parallel size; the message names what can't be cut.",
        ),
        "STAGES_NOT_ALLOWED": Advice(
            "The model's layers can't be cut into those pipeline stages.",
            "Take other stages; the message names the layers.",
        ),
        "MODEL_TYPE_UNKNOWN": Advice(
            "No family describes models of that type.",
            "README.md lists the types that are known; a layout file can say outright what lies "
            "where.",
        ),
        "SETTINGS_INVALID": Advice(
            "Something in `kv_connector_extra_config` can't be meant.",
            "The message names the key; docs/vllm.md lists them.",
        ),
        "ENGINE_UNSUPPORTED": Advice(
            "An engine of vLLM was started in a way that the connector does not know.",
            "The message names the option; docs/vllm.md says what is not yet supported.",
        ),
        "CACHE_UNKNOWN": Advice(
            "A cache of vLLM's does not lie as the model's config says that it must.",
            f"{OTHER_VERSION} Take a version of vLLM that docs/vllm.md names.",
        ),
    }
)
"""By reason."""
