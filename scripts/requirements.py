"""Prints the requirements in pyproject.toml, those of developers' extras included, one a line."""

import pathlib
import tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
requirements = list(project["dependencies"])
# The vendors' compilers are large, and have an environment of their own (make test-aot).
for extra in ("test", "lint", "bench"):
    requirements += project["optional-dependencies"][extra]
print("\n".join(requirements))
