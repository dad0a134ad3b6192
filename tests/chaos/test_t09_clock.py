"""T9: the broker's clock jumps by an hour."""

from __future__ import annotations

from pathlib import Path

import libfaketime
import pytest

from chaos.scene import prompt, scene

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(180)]


@pytest.mark.parametrize("hours", [1, -1])
async def test_t9_a_clock_that_jumps_ends_nothing_and_revives_nothing(
    tmp_path: Path, hours: int
) -> None:
    # Leases are lengths of time, and engines' clocks are never compared with the broker's.
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    library = Path(libfaketime.__file__).parent / "vendor/libfaketime/src/libfaketime.so.1"
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    async with scene(environment=environment) as world:
        await world.ready(prompt("kept"))
        world.cluster.decode(prompt("waits"))
        gone = prompt("gone", hold_ms=500, lease_ms=500)
        await world.ready(gone)
        assert await world.ends("gone", "P") == ("EXPIRED", "LEASE_EXPIRED")
        offset.write_text(f"{3600 * hours:+d}\n")
        world.cluster.decode(prompt("kept"))
        world.cluster.prefill(prompt("waits"))
        assert await world.ends("kept") == ("DONE", "")
        assert await world.ends("waits") == ("DONE", "")
        world.cluster.decode(prompt("gone", timeout_ms=1000))
        assert (await world.ends("gone"))[0] in ("REFUSED", "EXPIRED")
        await world.heals()
