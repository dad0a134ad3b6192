"""The status page, put together from its files: one document that loads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("page")
SCRIPTS: Final = ("units", "marks", "charts", "engines", "pairs", "tables", "gantt", "main")
"""Each uses what those before it define."""


def status_page_html() -> str:
    """The document, with its style and its script inside."""
    document, style = _text("page.html"), _text("page.css")
    script = "".join(_text(f"{name}.js") for name in SCRIPTS)
    return document.replace("<style></style>", f"<style>\n{style}</style>", 1).replace(
        "<script></script>", f'<script>\n"use strict";\n{script}</script>', 1
    )


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
