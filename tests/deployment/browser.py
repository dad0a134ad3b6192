"""A headless Chromium, by its command line: what a page is after its script has run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def found() -> str | None:
    """Return the browser's path, or None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Opens one page a call, with a profile of its own."""

    def __init__(self, path: str, profile: Path) -> None:
        self._command = [
            *(path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=2500"),
        ]

    def dom(self, url: str) -> str:
        """Return the page's document as markup."""
        return self._run("--dump-dom", url)

    def picture(self, url: str, file: Path, width: int, height: int, dark: bool = False) -> None:
        """Write a PNG of the page to ``file``."""
        dim = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        self._run(*dim, f"--screenshot={file}", f"--window-size={width},{height}", url)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._command, *words], capture_output=True, text=True, timeout=280, check=True
        )
        return done.stdout
