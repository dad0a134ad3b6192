"""The proof that a layout is whole: every element of every field is held, and nothing collides.

Run once at registration, so that the planner needs no defensive ifs. Whatever numbers come in, the
work is bounded: sizes are limited before anything is counted out.
"""

from restow.broker.layout.check.whole_layout import check_counts, check_layout

__all__ = ["check_counts", "check_layout"]
