"""Commands print tables for people, or documents for scripts, in the form of an `Output`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from restow.broker.errors import RestowError
from restow.broker.printable import shown_values

FOUND = 4
"""Exit status of a command that looked for something bad or different, and found it."""
Form = Literal["wide", "json", "yaml", "name"]


@dataclass(frozen=True)
class Output:
    """Print what a command found, in the form that the user chose. Each field is an option."""

    form: Annotated[
        Form | None,
        typer.Option(
            "--output",
            "-o",
            help="All columns, nothing cut; a document; or ids alone. Default: a table.",
        ),
    ]
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as -o json: errors are JSON too.")
    ]

    @property
    def document(self) -> Literal["json", "yaml"] | None:
        """The form of the document, if the user asked for a document."""
        if self.as_json or self.form == "json":
            return "json"
        return "yaml" if self.form == "yaml" else None

    def answer(
        self,
        value: Any,
        show: Callable[[Any, bool], None],
        names: Callable[[Any], Iterable[str]] | None = None,
    ) -> None:
        """Print what a command found: as a document, as ``names``, or as ``show`` does.

        ``show`` prints for people: it is given texts with escapes, and told whether all columns
        are wanted.
        """
        if self.document:
            print_document(value, self.document)
        elif self.form != "name":
            show(shown_values(value), self.form == "wide")
        elif names is None:
            raise typer.BadParameter("there are no names to print here", param_hint="-o")
        else:
            sys.stdout.write("".join(f"{name}\n" for name in names(value)))


def asked_form(arguments: Sequence[str]) -> Literal["json", "yaml"] | None:
    """Return the form of a document that a command line asks for, as far as it can be read.

    >>> asked_form(["status", "-o", "yaml"]), asked_form(["status", "-ojson"])
    ('yaml', 'json')
    >>> asked_form(["status", "--json"]), asked_form(["status", "-o", "wide"])
    ('json', None)
    """
    line = f" {' '.join(arguments)} "
    if re.search(r" (--json|(-o|--output)[ =]?json) ", line):
        return "json"
    return "yaml" if re.search(r" (-o|--output)[ =]?yaml ", line) else None


def print_document(value: Any, form: Literal["json", "yaml"], *, in_a_row: bool = False) -> None:
    """Print a value; with ``in_a_row``, on a line of its own, or as one document of many."""
    if form == "json":
        sys.stdout.write(json.dumps(value) + "\n") if in_a_row else print_json(value)
        return
    import yaml

    plain = json.loads(json.dumps(value))  # members of enums become text
    yaml.safe_dump(plain, sys.stdout, sort_keys=False, explicit_start=in_a_row)


def print_json(value: Any) -> None:
    """Print a JSON value."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def colors_unwanted() -> bool:
    """Return whether the user wants no colors from any program (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def print_error(error: RestowError, form: Literal["json", "yaml"] | None) -> None:
    """Print an error as one line on stderr, or as a document on stdout."""
    if form:
        fields = "status", "reason", "message", "subject"
        print_document({"error": {name: getattr(error, name) for name in fields}}, form)
        return
    line = " ".join(f"{error.reason}: {error.message}".split())
    red, plain = ("\x1b[31m", "\x1b[0m")
    if colors_unwanted() or not sys.stderr.isatty():
        red = plain = ""
    sys.stderr.write(f"{red}error{plain}: {line}\n")
