"""All kernels of the tests and examples, as they were lowered while those ran natively."""

import contextlib
import dataclasses
import pathlib
import runpy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import cokernel.pallas
from cokernel import _jax, lowering, primitive

ROOT = pathlib.Path(__file__).parents[2]
TPUS = ("v5p", "v6e", "tpu7x")


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A kernel that ran natively.

    Attributes:
      source: where it is from: "examples/ring.py", or a test without its parameters.
      name: the kernel's name.
      avals: the types of its inputs.
      params: the parameters of the primitive.
      chip: the chip whose sizes its programs have been written out for; None if they fit any.
    """

    source: str
    name: str
    avals: tuple[Any, ...]
    params: dict[str, Any]
    chip: str | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The kernel as a function of its inputs."""

        def kernel(*args: Any) -> Any:
            return primitive.mpmd_map_p.bind(*args, **self.params)

        kernel.__name__ = self.name
        return kernel

    @property
    def args(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the inputs, as arrays."""
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.avals]

    @property
    def names_only_tpu_features(self) -> bool:
        """Whether all its meshes are a TPU's, and it runs on one device."""
        tpu_meshes = (_jax.TensorCoreMesh, _jax.ScalarSubcoreMesh, _jax.VectorSubcoreMesh)
        meshes = (*self.params["meshes"], *self.params["external_meshes"])
        own_axes = {axis for mesh in meshes for axis in mesh.shape}
        outer_axes = {
            effect.name
            for jaxpr in self.params["jaxprs"]
            for effect in jaxpr.effects
            if isinstance(effect, _jax.NamedAxisEffect) and effect.name not in own_axes
        }
        return all(isinstance(mesh, tpu_meshes) for mesh in meshes) and not outer_axes

    @property
    def is_mixed(self) -> bool:
        """Whether it has programs for TensorCores and for SparseCores."""
        on_tensor_core = [isinstance(m, _jax.TensorCoreMesh) for m in self.params["meshes"]]
        return any(on_tensor_core) and not all(on_tensor_core)


class _Recorder:
    """Keeps every kernel that is lowered for a CPU, with what ran at the time."""

    def __init__(self) -> None:
        self.source = ""
        self.chip: str | None = None
        self.cases: dict[Any, Case] = {}

    def lower(self, platforms: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
        results = _original_lower(platforms, ctx, *operands, **params)
        name = params["name"] or "kernel"
        case = Case(self.source, name, tuple(ctx.avals_in), dict(params), self.chip)
        text = "\n".join(map(str, params["jaxprs"])) + str(params["meshes"])
        self.cases.setdefault((case.source, case.name, str(case.args), text, case.chip), case)
        return results

    # A plugin of pytest, too.

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # How many workers run a kernel makes no difference to it, and test_checked.py runs the
        # others once more, in processes of their own.
        items[:] = [
            item
            for item in items
            if not {"2_workers", "4_workers"} & _ids(item) and item.path.name != "test_checked.py"
        ]

    def pytest_runtest_setup(self, item: Any) -> None:
        path = pathlib.Path(item.path).relative_to(ROOT)
        self.source = f"{path}::{getattr(item, 'originalname', item.name)}"


_original_lower = lowering.lower


def _ids(item: Any) -> set[str]:
    return set(item.callspec.id.split("-")) if hasattr(item, "callspec") else set()


@contextlib.contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    with mock.patch.object(lowering, "lower", recorder.lower):
        yield


def collect() -> list[Case]:
    """Runs the examples and tests/kernels natively, and returns the kernels that they lowered.

    Raises:
      RuntimeError: if any of them fails.
    """
    everything = (ROOT / "examples").rglob("*.py")
    examples = sorted(path for path in everything if path.parent.name != "gpu")
    return _collect([ROOT / "tests" / "kernels"], examples)


def collect_gpu() -> list[Case]:
    """Runs kernels of GPU programs in JAX's interpreter, and returns those that it took.

    Raises:
      RuntimeError: if any of them fails.
    """
    names = ("test_lowering_gpu_allocations.py", "test_lowering_gpu_merge.py")
    tests = [ROOT / "tests" / name for name in names]
    return _collect(tests, sorted((ROOT / "examples" / "gpu").glob("*.py")))


def _collect(tests: Sequence[pathlib.Path], examples: Sequence[pathlib.Path]) -> list[Case]:
    recorder = _Recorder()
    with _recording(recorder):
        status = pytest.main(
            ["-q", "-x", "-p", "no:cacheprovider", "--no-header", *map(str, tests)],
            plugins=[recorder],
        )
        if status != 0:
            raise RuntimeError(f"the kernels do not run natively: pytest ended with {status!r}")
        for path in examples:
            recorder.source = str(path.relative_to(ROOT))
            jax.clear_caches()
            if path.parent.name == "stock":
                _run_on_each_chip(recorder, path)
            else:
                runpy.run_path(str(path), run_name="__main__")
    return list(recorder.cases.values())


def _run_on_each_chip(recorder: _Recorder, path: pathlib.Path) -> None:
    """Runs a stock example as it is for each TPU: it asks how many cores and lanes that has."""
    example = runpy.run_path(str(path))
    for chip in TPUS:
        recorder.chip = chip
        with cokernel.target(chip), cokernel.pallas.enabled():
            arguments = example["inputs"](np.random.default_rng(0), 1)
            jax.block_until_ready(example["run"](*arguments))
    recorder.chip = None
