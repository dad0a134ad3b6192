"""Block ids as callers give them: whole numbers in a list, an array, or anything like these."""

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
from restow.broker.client.engine.prefix_side import Change
from restow.broker.errors import ChainFormError, PageRangeError, RequestError
from restow.broker.layout.rows import Int64s
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import check_size
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import check_form, check_revision, check_salt
from restow.v1 import broker_pb2 as pb

ALL_IDS = 1 << 31
"""Ids travel as int32."""


def checked_ids(handoff_id: str, group: str, ids: object, limit: int) -> Int64s:
    """Return the ids as an array.

    Raises `PageRangeError` if an id is no whole number of [0, ``limit``).
    """
    listed = list(ids) if isinstance(ids, Iterator) else ids
    array = whole_numbers(listed, limit)
    if array is None:
        raise _wrong(handoff_id, group, first_wrong(listed, limit), limit)
    return array


def _wrong(handoff_id: str, group: str, one: object, limit: int) -> PageRangeError:
    shown = cut(repr(one.item() if isinstance(one, np.generic) else one), 64)
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
    """What sessions have in common: messages are made, and checked, before they are said."""

    def __init__(self, block_counts: Mapping[str, int] | None) -> None:
        """Take ids of a group up to its count, of any other group up to int32."""
        self._block_counts = dict(block_counts or {})
        self._form: HashForm | None = None
        self._revision = ""
        """Revision of the weights since they were replaced; empty: they are the layout's."""

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

        ``blocks`` has for each group of the layout the ids of its blocks: those that hold the
        tokens from 0 on, in their order, or the one that holds the snapshot. ``position_tokens``
        is how many tokens the state has absorbed: N-1 of a prompt of N where the model is
        recurrent.

        A long prompt may be published in chunks, of which only the last is ``final``:
        ``first_blocks`` says for a group which place in its whole list the first id given here has
        (left out: 0). ``position_tokens`` and ``content`` count in the last chunk alone. Every
        chunk has a future, and all of one handoff end together.

        ``lease_ms`` is for how long P's pages are promised at a time. The session renews the lease
        for ``hold_ms``, then lets it run out: a D that never asks costs P's pages no longer than
        both together. At least 1: how long 0, the broker's own, is, a session that loses the broker
        would not know.
        ``trace_parent`` is the W3C trace context of the request, for a broker that traces.
        ``content`` names the state's content (`content_of`): a D that asks for another is refused.
        Empty: not named.

        ``readers`` is how many D's must have the state before the pages are free: each that asks
        has a delivery of its own, one that fails uses up none, and the lease ends it in any case.
        The `HandoffEnded` says how many had it. 0: one D, and whatever way its delivery ends, the
        publication ends with it. Said alike in every chunk.

        ``sampled_token`` is what P sampled behind the position, which is then the end of the
        prompt: a D that takes it goes on from there, and computes nothing twice. It counts in the
        last chunk alone. None: D samples itself.

        ``revision`` is for stores, which publish states of any weights. Empty: that of the engine,
        by its layout or by `set_revision`.

        Raises `RequestError` for such a lease, `PageRangeError` for an id that is none of the
        engine's, `PagesError` for a list longer than a message carries, and `MessageTooLargeError`
        for lists that are together (say them in chunks): nothing was sent then.
        `HandoffConflictError`, for an id that this session
        has published before, is raised at once on an event loop, and by the future for threads.
        The future raises `BrokerCallError` if the broker refuses this message; futures of other
        calls for the handoff wait on.
        """
        if lease_ms < 1:
            raise RequestError(
                f"handoff {cut(handoff_id, 64)}: a lease has 1 ms at least, not {lease_ms}",
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
        """Ask for the state of ``handoff_id``; the delivery tells how it ended.

        ``blocks`` are D's own, by group, as in `publish`. Of the first ``held_tokens`` tokens D
        holds the KV already (of a prefix that it has cached, say): it is not moved, and blocks are
        named from token 0 on all the same. Snapshots move always.

        It fails if the state stands elsewhere than at ``position_tokens``; 0: anywhere. ``content``
        names what D wants the state of, up to that position; P's must be the same, if P names any.
        ``timeout_ms`` is D's patience, publication included; 0: 30 s. A broker that can't be
        reached is waited for no longer. Cancelling the delivery cancels the demand. The blocks are
        D's again when its `pages_free` is done, however the delivery ended.

        ``readers`` is for how many D's the router says that the handoff is: with it D's may ask
        side by side before P has published. 0: not known.

        ``prefix`` asks for a state by what it is of, whoever holds it: the broker offers it to
        those who say so, one after the other, and the delivery ends CANCELLED, NOT_HELD, when
        nobody is left. ``handoff_id`` is then D's own, such as a random one; ``position_tokens``,
        ``content`` and ``readers`` are left out. A store names in it which weights' state it wants.

        With ``takes_sampled_token`` D goes on behind the token that P sampled at
        ``position_tokens``: the delivery's ``sampled`` tells it as soon as P has published, before
        the state is there, and whether or not it comes. Where P names none the handoff fails,
        NOT_SAMPLED. Not beside a prefix.

        ``write_mark`` is for an engine that queues work on a device: the agents write to the blocks
        when each was told (`Agent.writes_done`) that all is done which the engine had queued before
        that mark. Marks rise from 1. 0: nothing that is queued writes to the blocks.

        Raises `RequestError` for those beside a prefix, `ChainInvalidError` for hashes of another
        size, and `PageRangeError`, `PagesError` and `MessageTooLargeError`, as `publish` does:
        nothing was sent then. The delivery raises `BrokerCallError` if the broker refuses.
        """
        if prefix is not None and (position_tokens or content or readers or takes_sampled_token):
            raise RequestError(
                f"handoff {cut(handoff_id, 64)}: a demand for a prefix has its position and "
                f"content, and one reader, and nobody samples for it",
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
        """Go on without the state of ``handoff_id``: P's pages are free at once.

        P need not have published it. ``detail`` says why, to P and to operators. The delivery tells
        when the broker knows, by the reason DECLINED. Of several ``readers``, as in `request`, this
        is one that needs no pages. Raises `MessageTooLargeError`.
        """
        declined = pb.Decline(handoff_id=handoff_id, detail=cut(detail), readers=readers)
        return self._ask(handoff_id, _checked(handoff_id, pb.EngineMessage(decline=declined)))

    def set_revision(self, revision: str) -> None:
        """Say that the engine's weights, or what else its states are made by, were replaced.

        All that is said from now on is of ``revision``, a text that is equal exactly when the
        weights are. The broker forgets what the engine holds. Its demands that are open end FAILED,
        REVISION_CHANGED, and so do its publications, but for those that are published whole and
        fenced: a D of their revision may still read these. Hand nothing over that was computed in
        part with the weights before, and fence nothing of it.

        Raises `RequestError` for an empty text, or one of more than 256 characters.
        """
        OWN_PROCESS.check()
        check_revision(revision)
        self._revision = revision
        self._revise(revision)

    def forget_states(self, revision: str = "") -> None:
        """Have the stores of the engine's model drop the states of ``revision``.

        Empty: the revision that the engine has now. Raises `RequestError`.
        """
        OWN_PROCESS.check()
        if revision:
            check_revision(revision)
        dropped = pb.ForgetStates(revision=revision or self._revision)
        self._say(pb.EngineMessage(forget_states=dropped))

    def decline_offer(self, handoff_id: str, detail: str = "") -> None:
        """Answer an offer of ``handoff_id`` with no: the engine holds that no longer, say.

        ``detail`` says why. The handoff is offered to the next at once. What comes too late means
        nothing.
        """
        OWN_PROCESS.check()
        declined = pb.DeclineOffer(handoff_id=handoff_id, detail=cut(detail))
        self._say(pb.EngineMessage(decline_offer=declined))

    def keep(self, prefix: Prefix) -> None:
        """Say that the state of ``prefix``, which the engine has told of, is worth keeping.

        A store is told of it, and may ask for it as any engine does. Where there is none, or no
        stream is open, nothing comes of it. Raises `ChainInvalidError`.
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
        """Say that the engine holds blocks or snapshots of ``group``, so that others find them.

        Each of ``hashes`` stands for the block that ends where it does (or is filled to there), or
        for the snapshot at that token; null blocks are not told. ``parent`` is the hash before the
        first in its chain, where that is known: what is told in pieces is then kept as one. The
        session keeps all that is held, and tells it again on each new stream, until it is evicted.

        ``salt`` is what the hashes are kept apart by; empty: nothing, or it is in them.
        ``revision`` is for stores, as in `publish`. All calls
        of a session have one ``form``. Raises `ChainFormError` for another, and
        `ChainInvalidError` for a hash of another size, or a form or salt that no broker takes. What
        the broker refuses is logged.
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
        """Say that ``group`` holds these ``hashes`` no longer; of what it never held, nothing.

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
                f"this session tells of hashes by {self._form}, and these are by {form}: an engine "
                f"has one form"
            )
        listed = tuple(hashes)
        check_form(**asdict(form))
        check_salt(salt)
        joined(form, [parent, *listed] if parent else listed)
        self._form = form
        self._tell(Change(form, salt, group, listed, held, parent, revision or self._revision))

    @abstractmethod
    def _say(self, message: pb.EngineMessage) -> None:
        """Say what is not said again on another stream."""

    @abstractmethod
    def _revise(self, revision: str) -> None:
        """Say that the weights were replaced."""

    @abstractmethod
    def _tell(self, change: Change) -> None:
        """Say what is held from now on, or no longer."""

    @abstractmethod
    def _publish(self, message: pb.EngineMessage, hold_ms: int) -> Published:
        """Say a publication."""

    @abstractmethod
    def _ask(self, handoff_id: str, message: pb.EngineMessage) -> Asked:
        """Say a demand or a decline."""

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
    check_size(f"what is said of handoff {cut(handoff_id, 64)}", message.ByteSize())
    return message
