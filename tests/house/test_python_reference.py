"""docs/python.md has every public name, and each has words for all that it is given."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import pytest

from restow.broker.errors import RestowError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()


def _generator() -> ModuleType:
    spec = util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["reference"] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _generator()
PUBLIC = [one for module in REFERENCE.MODULES for one in REFERENCE.public(module)]
FIRST_WORDS = re.compile(r"^[A-Z][a-z ]")


def test_the_page_is_that_of_the_docstrings() -> None:
    fresh = "\n\n".join(REFERENCE.Page().blocks()) + "\n"
    assert fresh == PAGE, (
        "docs/python.md is not what the docstrings say: python docs/reference.py > docs/python.md"
    )


@pytest.mark.parametrize("module", REFERENCE.MODULES)
def test_every_public_name_is_there(module: str) -> None:
    # The names come from `dir`, and not from the code that makes the page.
    for name in REFERENCE.MODULES[module] or import_module(module).__all__:
        value = getattr(import_module(module), name)
        if isinstance(value, type) and issubclass(value, RestowError):
            assert f"| `{name}` | " in PAGE
            continue
        assert f"\n### {name}\n" in PAGE
        if not isinstance(value, type) or module in REFERENCE.VALUES:
            continue
        for member in dir(value):
            owner = next(one for one in value.__mro__ if member in vars(one) or one is object)
            if owner.__module__.startswith("restow.") and not member.startswith("_"):
                assert (
                    f"\n#### {name}.{member}\n" in PAGE
                    or f"\n- `{member}`: " in PAGE.partition(f"\n### {name}\n")[2]
                ), f"{name}.{member}"


def test_every_error_that_a_docstring_names_is_there() -> None:
    named = set(re.findall(r"`(\w+Error)`", PAGE))
    rows = set(re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE))
    assert named - rows == {"CancelledError", "RuntimeError", "ValueError"}


@pytest.mark.parametrize("one", PUBLIC, ids=lambda one: one.name)
def test_everything_has_words_and_all_that_is_given_has_a_meaning(one: object) -> None:
    assert isinstance(one, REFERENCE.Public)
    assert FIRST_WORDS.match(one.words), one.name
    for each in [*one.methods, *([one.begin] if one.begin else [])]:
        assert FIRST_WORDS.match(each.words), f"{one.name}: {each.name}"
        of_all = {} if each in one.methods else one.attributes
        for given in each.parameters:
            named = f"``{given.name}``" in each.words + one.words or given.name in of_all
            said = "like `" in each.words or " as `" in each.words
            assert named or said, f"{one.name}: nobody says what {given.name} of {each.name} is"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^\| `(\w+Error)`", PAGE, re.MULTILINE))))
def test_an_error_has_a_reason_of_its_own_and_words(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, reason, status, words, _ = row.split(" | ".strip())
    assert reason.strip()
    assert status.strip()
    assert len(words) > 20


def test_what_is_not_said_is_seen() -> None:
    """Check that the rule on missing meanings fails for a function that lacks them."""

    def bare(handoff_id: str) -> None:
        """Do something."""

    callee = REFERENCE.Callee("bare", bare)
    assert [one.name for one in callee.parameters] == ["handoff_id"]
    assert inspect.signature(bare).return_annotation == "None"
    with pytest.raises(AssertionError, match="what handoff_id of bare is"):
        test_everything_has_words_and_all_that_is_given_has_a_meaning(
            REFERENCE.Public("bare", bare)
        )
