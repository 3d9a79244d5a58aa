"""Prints the requirements in pyproject.toml, extras included, one a line."""

import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
for extra in project["optional-dependencies"].values():
    requirements += extra
print("\n".join(requirements))
