"""A program that starts NIXL and prints the paths of the UCX libraries it loads, as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_UCP = re.compile(r"(/\S*/libucp[^/\s]*)$", re.MULTILINE)


def loaded_ucx(maps: str) -> list[str]:
    """Return the path of every libucp in a process's memory map.

    >>> loaded_ucx('''7f1-7f2 r-xp 0000 00:1b 77   /a/nixl.libs/libucp-1c.so.0
    ... 7f2-7f3 r--p 0000 00:1b 77   /a/nixl.libs/libucp-1c.so.0
    ... 7f3-7f4 r--p 0000 00:1b 78   /usr/lib/libm.so.6''')
    ['/a/nixl.libs/libucp-1c.so.0']
    """
    return sorted(set(_UCP.findall(maps)))


def main() -> None:
    """Print the list. Raises `TransportFailedError`."""
    from restow.agents.reading.nixl_transport import NixlTransport

    transport = NixlTransport("doctor")
    sys.stdout.write("\n" + json.dumps(loaded_ucx(Path("/proc/self/maps").read_text())) + "\n")
    transport.close()


if __name__ == "__main__":
    main()
