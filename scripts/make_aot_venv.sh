#!/usr/bin/env bash
# Makes the virtual environment $1 with the compilers of TPUs and GPUs, and with the JAX that the
# Python $2 has. A compiler that cannot be had is left out: its tests are skipped and say so.
set -eu
cd "$(dirname "$0")/.."
venv=$1
python=$2

"$python" -m venv --clear "$venv"
pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}
# One more line for each compiler; without dependencies, which are for running on the chip.
readarray -t jax < <("$python" - <<'PYTHON'
from importlib.metadata import version

for name in ("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum"):
    print(f"{name}=={version(name)}")
PYTHON
)
pip --no-deps "${jax[@]}"
readarray -t extras < <("$python" - <<'PYTHON'
import pathlib
import tomllib
from importlib.metadata import version

extras = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
for requirement in extras["tpu"] + extras["gpu"]:
    name = requirement.split(">")[0]
    print(f"{name}=={version('jaxlib')}" if name.startswith("jax-") else requirement)
PYTHON
)
for requirement in "${extras[@]}"; do
  pip --no-deps "$requirement" || echo "$requirement cannot be had; what needs it is skipped" >&2
done
