"""Print what the package and the extras named as arguments require, one requirement a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for group in (project["dependencies"], *(extras[name] for name in sys.argv[1:])):
    print("\n".join(group))
