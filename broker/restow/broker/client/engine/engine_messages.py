"""The methods of both kinds of sessions, which check and build an engine's messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Generic, TypeVar

import numpy as np

from restow.broker.block_ids import first_wrong, whole_numbers
from restow.broker.client.connection.channel import OWN_PROCESS
from restow.broker.client.engine.chains import (
    HashForm,
    Prefix,
    joined,
    keep_message,
    prefix_to_proto,
)
from restow.broker.client.engine.commands import answer_message
from restow.broker.client.engine.prefix_side import Change
from restow.broker.errors import ChainFormError, PageRangeError, RequestError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import check_size
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import check_form, check_revision, check_salt
from restow.broker.state_commands import Answer
from restow.v1 import broker_pb2 as pb

ALL_IDS = 1 << 31
"""Ids are sent as int32."""


def checked_ids(handoff_id: str, group: str, ids: object, limit: int) -> Int64s:
    """Return the ids as an array.

    Raises `PageRangeError` if an id is not a whole number in [0, ``limit``).
    """
    listed = list(ids) if isinstance(ids, Iterator) else ids
    array = whole_numbers(listed, limit)
    if array is None:
        raise _wrong(handoff_id, group, first_wrong(listed, limit), limit)
    return array


def _wrong(handoff_id: str, group: str, wrong: object, limit: int) -> PageRangeError:
    shown = cut(repr(wrong.item() if isinstance(wrong, np.generic) else wrong), 64)
    return PageRangeError(
        f"handoff {cut(handoff_id, 64)}, group {group}: block id {shown} is none of [0, {limit})",
        handoff=cut(handoff_id, 64),
        group=group,
        page=shown,
        range=f"[0, {limit})",
    )


Blocks = Mapping[str, Iterable[int]]
Published = TypeVar("Published")
Asked = TypeVar("Asked")


class EngineWords(ABC, Generic[Published, Asked]):
    """The common part of sessions: builds and checks messages before they are sent."""

    def __init__(self, block_counts: Mapping[str, int] | None) -> None:
        """Accept ids of a group up to its count, and of other groups up to int32."""
        self._block_counts = dict(block_counts or {})
        self._form: HashForm | None = None
        self._revision = ""
        """Revision of the weights after they were replaced; empty while they are the layout's."""

    def publish(
        self,
        handoff_id: str,
        blocks: Blocks,
        position_tokens: int,
        *,
        final: bool = True,
        first_blocks: Mapping[str, int] | None = None,
        lease_ms: int = 30_000,
        hold_ms: int = 300_000,
        trace_parent: str = "",
        content: bytes = b"",
        readers: int = 0,
        sampled_token: int | None = None,
        revision: str = "",
    ) -> Published:
        """Publish blocks of ``handoff_id``; the future tells when P's pages are free again.

        ``blocks`` has the block ids of each group of the layout: the blocks that hold the tokens
        from 0 on, in order, or the one block that holds the snapshot. ``position_tokens`` is the
        number of tokens that the state includes: for a recurrent model, N-1 of a prompt of N.

        A long prompt may be published in chunks, of which only the last is ``final``.
        ``first_blocks`` gives, by group, the index of the first id in the group's whole list
        (default 0). ``position_tokens`` and ``content`` count only in the last chunk. Every chunk
        has a future, and all futures of a handoff end together.

        ``lease_ms`` is how long P's pages are promised at a time, at least 1. The session renews
        the lease for ``hold_ms``, then lets it expire. So a D that never asks delays P's pages by
        no more than both together. A lease of 0 would mean the broker's default, which a session
        that loses the broker would not know. ``trace_parent`` is the W3C trace context of the
        request, for a broker that traces. ``content`` names the state's content (`content_of`); a D
        that asks for another content is refused. Empty: not named.

        ``readers`` is how many D's must have the state before the pages are free. Each D has its
        own delivery, a failed delivery does not count, and the end of the lease frees the pages in
        any case. The `HandoffEnded` says how many D's had the state. 0 means one D; the publication
        ends with its delivery, however that ends. Every chunk must give the same number.

        ``sampled_token`` is the token that P sampled after the position, which is then the end of
        the prompt. A D that takes the token continues after it and computes nothing twice. It
        counts only in the last chunk. None: D samples itself.

        ``revision`` is for stores, which publish states of any weights. Empty: the engine's, from
        its layout or `set_revision`.

        Raises `RequestError` for a lease below 1 ms, `PageRangeError` for an id that the engine
        does not have, `PagesError` for a list longer than a message can hold, and
        `MessageTooLargeError` for lists that are too long together (publish them in chunks);
        nothing was sent then. `HandoffConflictError`, for an id that this session has published
        before, is raised at once on an event loop, and by the future for threads. The future raises
        `BrokerCallError` if the broker refuses this message; futures of other calls for the handoff
        are not affected.
        """
        if lease_ms < 1:
            raise RequestError(
                f"handoff {cut(handoff_id, 64)}: a lease must have at least 1 ms, not {lease_ms}",
                field="lease_ms",
            )
        firsts = first_blocks or {}
        publication = pb.Publication(
            handoff_id=handoff_id,
            blocks=self._lists(handoff_id, blocks, firsts),
            position_tokens=position_tokens,
            final=final,
            lease_ms=lease_ms,
            trace_parent=trace_parent,
            content=content,
            readers=readers,
            sampled_token=sampled_token,
            revision=revision or self._revision,
        )
        return self._publish(_checked(handoff_id, pb.EngineMessage(publish=publication)), hold_ms)

    def request(
        self,
        handoff_id: str,
        blocks: Blocks,
        *,
        held_tokens: int = 0,
        position_tokens: int = 0,
        timeout_ms: int = 30_000,
        trace_parent: str = "",
        content: bytes = b"",
        readers: int = 0,
        prefix: Prefix | None = None,
        takes_sampled_token: bool = False,
        write_mark: int = 0,
    ) -> Asked:
        """Ask for the state of ``handoff_id``; the delivery tells how the demand ended.

        ``blocks`` are D's own, by group, as in `publish`. D holds the KV of the first
        ``held_tokens`` tokens already, for example from a cached prefix. It is not transferred, but
        blocks are named from token 0 on nevertheless. Snapshots are always transferred.

        The demand fails if the state ends elsewhere than at ``position_tokens``; 0 means anywhere.
        ``content`` names the content that D wants, up to that position; if P names its content,
        both must be equal. ``timeout_ms`` is how long D waits, including for the publication; 0
        means 30 s. A session waits no longer for a broker that it cannot reach, either. Cancelling
        the delivery cancels the demand. The blocks are D's again when the delivery's `pages_free`
        is done, however the demand ended.

        ``readers`` is the number of D's for which the router sends the handoff; with it D's may ask
        at the same time, before P has published. 0: not known.

        ``prefix`` asks for a state by its content, from whoever holds it. The broker offers the
        demand to the holders in turn, and it ends CANCELLED, NOT_HELD, if no holder is left.
        ``handoff_id`` is then chosen by D, for example at random; ``position_tokens``, ``content``
        and ``readers`` must be omitted. A store names in the prefix the revision of the weights.

        With ``takes_sampled_token`` D continues after the token that P sampled at
        ``position_tokens``. The delivery's ``sampled`` has the token as soon as P has published,
        before the state arrives, and even if it never does. If P names no token the handoff fails,
        NOT_SAMPLED. Not possible with a prefix.

        ``write_mark`` is for an engine that queues work on a device. Agents write to the blocks
        only after they were told (`Agent.writes_done`) that all work is done which the engine had
        queued before that mark. Marks rise from 1. 0: no queued work writes to the blocks.

        Raises `RequestError` for arguments that exclude a prefix, `ChainInvalidError` for hashes of
        a wrong size, and `PageRangeError`, `PagesError` and `MessageTooLargeError` as `publish`
        does; nothing was sent then. The delivery raises `BrokerCallError` if the broker refuses.
        """
        if prefix is not None and (position_tokens or content or readers or takes_sampled_token):
            raise RequestError(
                f"handoff {cut(handoff_id, 64)}: a demand for a prefix must not have "
                f"position_tokens, content, readers or takes_sampled_token",
                field="prefix",
            )
        demand = pb.Demand(
            handoff_id=handoff_id,
            blocks=self._lists(handoff_id, blocks, {}),
            held_tokens=held_tokens,
            position_tokens=position_tokens if prefix is None else prefix.position_tokens,
            timeout_ms=timeout_ms,
            trace_parent=trace_parent,
            content=content,
            readers=readers,
            prefix=None if prefix is None else prefix_to_proto(prefix),
            takes_sampled_token=takes_sampled_token,
            revision=(prefix.revision if prefix is not None else "") or self._revision,
            write_mark=write_mark,
        )
        return self._ask(handoff_id, _checked(handoff_id, pb.EngineMessage(request=demand)))

    def decline(self, handoff_id: str, detail: str = "", *, readers: int = 0) -> Asked:
        """Continue without the state of ``handoff_id``, so that P's pages are free at once.

        P need not have published it. ``detail`` gives the reason to P and to operators. The
        delivery ends with the reason DECLINED once the broker knows. With several ``readers``, as
        in `request`, this D counts as a D that needs no pages. Raises `MessageTooLargeError`.
        """
        declined = pb.Decline(handoff_id=handoff_id, detail=cut(detail), readers=readers)
        return self._ask(handoff_id, _checked(handoff_id, pb.EngineMessage(decline=declined)))

    def set_revision(self, revision: str) -> None:
        """Tell that the engine's weights, or other inputs of its states, were replaced.

        All later messages belong to ``revision``, a text that is equal exactly if the weights are.
        The broker forgets what the engine holds. Its open demands end FAILED, REVISION_CHANGED, and
        so do its publications, except those that are published completely and fenced: a D of their
        revision may still read these. Hand over nothing that was computed in part with the former
        weights, and fence nothing of it.

        Raises `RequestError` for an empty text, or a text of more than 256 characters.
        """
        OWN_PROCESS.check()
        check_revision(revision)
        self._revision = revision
        self._revise(revision)

    def forget_states(self, revision: str = "") -> None:
        """Let the stores of the engine's model drop the states of ``revision``.

        Empty means the engine's present revision. Raises `RequestError`.
        """
        OWN_PROCESS.check()
        if revision:
            check_revision(revision)
        dropped = pb.ForgetStates(revision=revision or self._revision)
        self._say(pb.EngineMessage(forget_states=dropped))

    def decline_offer(self, handoff_id: str, detail: str = "") -> None:
        """Decline an offer of ``handoff_id``, for example because the state is gone.

        ``detail`` gives the reason. The handoff is offered to the next holder at once. A late
        answer has no effect.
        """
        OWN_PROCESS.check()
        declined = pb.DeclineOffer(handoff_id=handoff_id, detail=cut(detail))
        self._say(pb.EngineMessage(decline_offer=declined))

    def answer_command(self, command_id: str, answer: Answer) -> None:
        """Answer command ``command_id``, which ``on_command`` has brought, with ``answer``."""
        OWN_PROCESS.check()
        self._say(answer_message(command_id, answer))

    def keep(self, prefix: Prefix) -> None:
        """Tell that the state of ``prefix``, which the engine has reported, is worth keeping.

        A store is told of it, and may request it as any engine can. Without a store, or without an
        open stream, nothing happens. Raises `ChainInvalidError`.
        """
        OWN_PROCESS.check()
        self._say(keep_message(prefix, self._revision))

    def hold(
        self,
        form: HashForm,
        group: str,
        hashes: Iterable[bytes],
        *,
        parent: bytes = b"",
        salt: str = "",
        revision: str = "",
    ) -> None:
        """Report that the engine holds blocks or snapshots of ``group``, so that others find them.

        Each of ``hashes`` names the block that ends at the hash's token (or is filled up to it), or
        the snapshot at that token; null blocks are not reported. ``parent`` is the hash before the
        first in its chain, if known: parts that are reported separately are then kept as one chain.
        The session remembers all that is held, and reports it again on each new stream, until
        evicted.

        ``salt`` keeps equal hashes apart; empty: none, or it is part of the hashes. ``revision`` is
        for stores, as in `publish`. All calls of a session must have one ``form``. Raises
        `ChainFormError` for another form, and `ChainInvalidError` for a hash of another size, or a
        form or salt that no broker accepts. Refusals by the broker are logged.
        """
        self._change(form, group, hashes, salt, revision, True, parent)

    def evict(
        self,
        form: HashForm,
        group: str,
        hashes: Iterable[bytes],
        *,
        salt: str = "",
        revision: str = "",
    ) -> None:
        """Report that ``group`` no longer holds these ``hashes``; unknown hashes are ignored.

        ``form``, ``salt`` and ``revision`` are as in `hold`, which raises the same.
        """
        self._change(form, group, hashes, salt, revision, False)

    def _change(
        self,
        form: HashForm,
        group: str,
        hashes: Iterable[bytes],
        salt: str,
        revision: str,
        held: bool,
        parent: bytes = b"",
    ) -> None:
        OWN_PROCESS.check()
        if form != (self._form or form):
            raise ChainFormError(
                f"this session reports hashes by {self._form}, but these are by {form}: an engine "
                f"must use one form"
            )
        listed = tuple(hashes)
        check_form(**asdict(form))
        check_salt(salt)
        joined(form, [parent, *listed] if parent else listed)
        self._form = form
        self._tell(Change(form, salt, group, listed, held, parent, revision or self._revision))

    @abstractmethod
    def _say(self, message: pb.EngineMessage) -> None:
        """Send a message that is not repeated on another stream."""

    @abstractmethod
    def _revise(self, revision: str) -> None:
        """Tell that the weights were replaced."""

    @abstractmethod
    def _tell(self, change: Change) -> None:
        """Report what is held from now on, or no longer."""

    @abstractmethod
    def _publish(self, message: pb.EngineMessage, hold_ms: int) -> Published:
        """Send a publication."""

    @abstractmethod
    def _ask(self, handoff_id: str, message: pb.EngineMessage) -> Asked:
        """Send a demand or a decline."""

    def _lists(
        self, handoff_id: str, blocks: Blocks, firsts: Mapping[str, int]
    ) -> list[pb.BlockList]:
        OWN_PROCESS.check()
        lists = []
        for group, ids in blocks.items():
            limit = self._block_counts.get(group, ALL_IDS)
            checked = checked_ids(handoff_id, group, ids, limit)
            lists.append(wire.block_list(group, checked, firsts.get(group, 0)))
        return lists


def _checked(handoff_id: str, message: pb.EngineMessage) -> pb.EngineMessage:
    OWN_PROCESS.check()
    check_size(f"the message about handoff {cut(handoff_id, 64)}", message.ByteSize())
    return message
