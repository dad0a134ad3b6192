"""Programs: what one destination agent does for a plan, with the page ids left open.

A program is a list of steps, each a table of rows. A row copies ``count`` elements from a page of a
source region to a page of a destination region, for the most part; a per-token row repeats for
every token. Which pages, and which tokens, is bound when a handoff is executed
(`restow.agents.binding`). Nothing here knows heads, groups or Mamba any more, and an agent needs
nothing else.
"""

from restow.broker.planner.program.forms import (
    CLEAR_PAGES,
    FORMS,
    GATHER_IN_ORDER,
    GATHER_PLACED,
    GATHERED,
    PROJECT_SPANS,
    READ_OR_GATHERED,
    READ_PAGES,
    READ_SPANS,
    SCATTER_PLACED,
    SCATTER_SPANS,
    Column,
    Form,
    Operand,
    ProjectColumn,
    StepKind,
    columns_of,
)
from restow.broker.planner.program.pairs import (
    NO_LIST,
    GroupPair,
    PageForm,
    cut_shared,
    most_pages,
    most_stretches,
    most_tokens,
    moved_tokens,
)
from restow.broker.planner.program.programs import Program, Step, joined_steps, no_rows

__all__ = [
    "CLEAR_PAGES",
    "FORMS",
    "GATHERED",
    "GATHER_IN_ORDER",
    "GATHER_PLACED",
    "NO_LIST",
    "PROJECT_SPANS",
    "READ_OR_GATHERED",
    "READ_PAGES",
    "READ_SPANS",
    "SCATTER_PLACED",
    "SCATTER_SPANS",
    "Column",
    "Form",
    "GroupPair",
    "Operand",
    "PageForm",
    "Program",
    "ProjectColumn",
    "Step",
    "StepKind",
    "columns_of",
    "cut_shared",
    "joined_steps",
    "most_pages",
    "most_stretches",
    "most_tokens",
    "moved_tokens",
    "no_rows",
]
