"""The tables of docs/benchmarks.md are those that the results in bench/results make."""

from __future__ import annotations

from bench.page import PAGE, fresh


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert fresh(page) == page, "docs/benchmarks.md is older than bench/results: run bench/page.py"
