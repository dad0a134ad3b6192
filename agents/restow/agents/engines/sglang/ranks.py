"""Let rank 0 speak for all ranks of an SGLang engine, over a process group of their own.

Every rank has a scheduler, and all of them take the same steps. So each rank queues the same jobs,
and its thread for them meets the other ranks' threads here.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=1)
"""Longest time that ranks wait for rank 0; a rank that dies breaks the group at once."""


class Ranks:
    """The ranks of an engine, or a single rank without a group. Belongs to one thread."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make a process group of the ranks of ``group``; all of them do so in the same order."""
        self.count = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._group = group
        if group is not None:
            members = dist.get_process_group_ranks(group)
            self._group = dist.new_group(members, PATIENCE, "gloo", use_local_synchronization=True)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks with the broker."""
        return self.rank == 0

    def gather(self, said: bytes) -> list[bytes]:
        """Return what each rank says, in their order; every rank calls it."""
        if self._group is None:
            return [said]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(said)]), group=self._group)
        longest = 1 + max(int(size) for size in sizes)
        mine = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine, group=self._group)
        pairs = zip(parts, sizes, strict=True)
        return [part.numpy().tobytes()[: int(size)] for part, size in pairs]

    def agree(self, said: object) -> bool:
        """Return whether all ranks say the same."""
        return len(set(self.gather(repr(said).encode()))) == 1

    def tell(self, word: str = "") -> str:
        """Return the word of rank 0, which gives it; every rank calls it."""
        return self.gather(word.encode())[0].decode()
