"""Draw the pictures of these pages anew: python docs/pictures/make.py [FOLDER].

Always by slices, so that they do not change when the costs of the ways do.
"""

from __future__ import annotations

import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from restow.broker.cli.main import app

HERE = Path(__file__).resolve().parent
PICTURES = {
    "nemotron3-nano-p2-d4-ds": (
        *("nemotron3-nano", "--tp 2 --conv-layout DS", "--tp 4 --conv-layout DS"),
    ),
    "nemotron3-nano-p2-d4-sd": (
        *("nemotron3-nano", "--tp 2 --conv-layout SD", "--tp 4 --conv-layout SD"),
    ),
    "groups1-p1-d2": ("granite4-h-small", "--tp 1 --conv-layout DS", "--tp 2 --conv-layout DS"),
    "groups1-p4-d2": ("granite4-h-small", "--tp 4 --conv-layout DS", "--tp 2 --conv-layout DS"),
}
"""The model, P's settings and D's settings, by the name of the picture."""


def restow(*words: str) -> None:
    """Run a command in this process."""
    app(list(words), standalone_mode=False)


def main(out: Path) -> None:
    """Draw all pictures into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, *sides) in PICTURES.items():
            layouts = [Path(folder) / f"{side}.json" for side in "pd"]
            for layout, settings in zip(layouts, sides, strict=True):
                with layout.open("w") as file, redirect_stdout(file):
                    config = str(HERE / f"{model}.json")
                    words = ("--quiet", "--name", model, *settings.split())
                    restow("layout", "from-config", config, *words)
            svg = ("--strategy", "slices", "--svg", str(out / f"{name}.svg"))
            with redirect_stdout(io.StringIO()):
                restow("plan", *map(str, layouts), *svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
