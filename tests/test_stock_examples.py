"""The stock Pallas examples compute what NumPy does, on every chip, by one worker and by two."""

import ast
import importlib.util
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import cokernel
import cokernel.pallas
from cokernel import parameters

EXAMPLES = Path(__file__).parent.parent / "examples" / "stock"
# What each prints, and how far its results may be from NumPy's.
EXPECTED = {
    "embedding_bag.py": ("every bag has its sum", 1e-5),
    "histogram.py": ("every value is counted", 0),
    "matmul.py": ("the product is right", 1e-2),
    "mixture_of_experts.py": ("every token came back", 1e-3),
    "paged_cache.py": ("every sequence is in one piece", 0),
    "ragged_all_gather.py": ("every subcore has the rows of all", 0),
    "segment_sum.py": ("every segment has its sum", 1e-4),
    "softmax.py": ("every row adds up to one", 1e-6),
    "sparse_dense_product.py": ("the product is right", 1e-4),
    "top_k.py": ("every row has its greatest values", 0),
}


def test_every_stock_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_kernel_uses_public_pallas_only_and_is_short(name):
    text = (EXAMPLES / name).read_text()
    public = {"jax", "jax.numpy", "jax.lax", "jax.experimental.pallas", "numpy"}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import):
            assert {alias.name for alias in statement.names} <= public
        elif isinstance(statement, ast.ImportFrom):
            assert statement.module in public | {"jax.experimental"}
    assert "jax._src" not in text
    assert text.count("cokernel") == text.partition("__main__")[2].count("cokernel")
    assert len(text.splitlines()) <= 125


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_it_prints_a_check_when_run_as_a_script(name, capsys):
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        cokernel.pallas.disable()
        cokernel.set_target(None)
    assert EXPECTED[name][0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("chip", "size", "workers"), [("v5p", 1, 2), ("v6e", 2, 1), ("tpu7x", 3, 2)]
)
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_it_computes_what_numpy_computes(name, chip, size, workers, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Stock programs cannot say how many workers they want.
    resolve = parameters.resolve
    monkeypatch.setattr(
        parameters, "resolve", lambda params: resolve(params).replace(num_workers=workers)
    )
    with cokernel.target(chip), cokernel.pallas.enabled():
        arguments = module.inputs(np.random.default_rng(size), size)
        results = jax.block_until_ready(jax.tree.leaves(module.run(*arguments)))
    launch = cokernel.last_launch()
    assert launch is not None
    assert f"def {launch.kernel}(" in (EXAMPLES / name).read_text()
    tolerance = EXPECTED[name][1]
    for result, expected in zip(results, jax.tree.leaves(module.expected(*arguments)), strict=True):
        np.testing.assert_allclose(
            np.asarray(result, np.float32), expected, rtol=tolerance, atol=tolerance
        )
