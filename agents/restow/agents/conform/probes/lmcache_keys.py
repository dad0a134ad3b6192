"""Ask LMCache which object each rank of D looks for.

LMCache keeps whole objects and cuts nothing: D has P's state if it finds P's key.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from .asking import Asked, Copied, MissedError, NotAskedError, answer_all
from .sources import folder_of, take


def _keys(api: Path, tp: int) -> list[int]:
    """Return the part of each rank's key that tells ranks apart."""
    rank = take(api, "ObjectKey.ComputeKVRank").ComputeKVRank
    key = SimpleNamespace(ComputeKVRank=rank)
    look_up = take(api, "_lookup_kv_ranks", known={"ObjectKey": key})._lookup_kv_ranks
    return [
        number
        for worker in range(tp)
        for number in look_up(SimpleNamespace(world_size=tp, worker_id=worker))
    ]


def answer(asked: Asked) -> Copied:
    """Compare the keys of both sides."""
    api = folder_of("lmcache") / "v1" / "distributed" / "api.py"
    stored, wanted = (_keys(api, tp) for tp in (asked.p_tp, asked.d_tp))
    if set(stored) & set(wanted):
        raise NotAskedError("D finds P's objects: their keys have the ranks, and no layout")
    raise MissedError(
        f"keys have the world size and the rank: rank 0 of P stores {stored[0]:#010x}, "
        f"rank 0 of D asks for {wanted[0]:#010x}, so no rank finds anything"
    )


if __name__ == "__main__":
    answer_all(version("lmcache"), answer)
