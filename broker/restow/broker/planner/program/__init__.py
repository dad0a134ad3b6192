"""Programs: what a destination's agent does for a plan, without page ids.

A program is a list of steps, each of which is a table of rows. Most rows copy ``count`` elements
from a page of a source region to a page of a destination region; a per-token row repeats for every
token. Pages and tokens are bound when a handoff is executed (`restow.agents.binding`). A program
does not know heads, groups or Mamba, and an agent needs nothing beside it.
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
