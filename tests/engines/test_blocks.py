"""The Transformers engine's blocks: a request that finds too few takes none."""

from __future__ import annotations

import pytest

from broker.fakes import model_layout
from restow.demo.transformers.ranks import BlockPool, OutOfBlocksError, take_from_each


def test_who_finds_too_few_blocks_of_one_group_takes_none_of_another() -> None:
    regions = {region.group: region for region in model_layout().ranks[0].regions}
    pools = {
        group: BlockPool(region, tokens=64, requests=1, seed=1) for group, region in regions.items()
    }
    first = take_from_each(pools, 64)
    for last in pools:
        for group in pools:
            if group != last:
                pools[group].give_back(first[group])
        with pytest.raises(OutOfBlocksError):
            take_from_each(pools, 64)
        for group in pools:
            if group != last:
                pools[group].take(64)
