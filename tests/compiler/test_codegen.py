"""From LLVM IR to machine code: functions that are equal become one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.compiler import codegen
from tests.compiler.harness import MESH, expect_same, run


def nests(computation, *arrays, capsys):
    """How many loop nests the computation is emitted as, and how many are left in the end."""
    capsys.readouterr()
    run(computation, *arrays, dump_llvm=True)
    ir = capsys.readouterr().out
    return tuple(
        len(re.findall("^define internal", text, re.MULTILINE))
        for text in (ir, codegen.optimise(ir))
    )


def layers(*constants):
    def computation(x, y):
        return jnp.tanh(x) * constants[0], jnp.tanh(y) * constants[1]

    return computation


@pytest.mark.parametrize(("second", "left"), [(3.0, 1), (4.0, 2)])
def test_equal_nests_on_different_arrays_are_compiled_once(second, left, capsys):
    x, y = np.random.default_rng(0).standard_normal((2, 300, 40), dtype=np.float32)
    assert nests(layers(3.0, second), x, y, capsys=capsys) == (2, left)


@pytest.mark.parametrize("second", [3, 4])
def test_arrays_that_share_a_nest_keep_their_own_values(second):
    x, y = np.random.default_rng(1).integers(-9, 9, (2, 300, 40), dtype=np.int32)
    expect_same(lambda x, y: (x * 3 + 1, y * second + 1, (x - y) * 3 + 1), x, y)


def test_equal_coroutines_keep_an_entry_each(capsys):
    def body(out_ref, semaphore):
        pl.semaphore_signal(semaphore, 1, device_id={"core": 0})
        pl.semaphore_wait(semaphore, 1)
        out_ref[...] = jnp.arange(8, dtype=jnp.int32)

    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct((8,), jnp.int32),
        scratch_types=[pltpu.SemaphoreType.REGULAR],
        compiler_params=cokernel.CompilerParams(dump_llvm=True),
    )
    capsys.readouterr()
    np.testing.assert_array_equal(kernel(), np.arange(8))
    ir = capsys.readouterr().out
    [program] = re.findall(r"^define [^\n]*presplitcoroutine.*?^}\n", ir, re.MULTILINE | re.DOTALL)
    twin = program.replace("cokernel_program_0", "cokernel_program_1")
    code = codegen.LoadedCode(codegen.compile_object(ir + twin))
    assert code.address("cokernel_program_0") != code.address("cokernel_program_1")


def test_interleaved_vectors_are_compared_with_one_of_their_rows():
    def rows(x):
        pairs = lax.stack([x * 3, x + 1], axis=1)
        return (pairs == pairs[0]).all(-1), (pairs != pairs[0]).any(-1)

    for dtype in (np.uint32, np.float32, np.int8):
        expect_same(rows, np.arange(4, dtype=dtype))


@pytest.fixture
def fresh_host():
    yield codegen.host.cache_clear
    codegen.host.cache_clear()


def test_features_that_the_environment_names_are_done_without(monkeypatch, fresh_host):
    with_all = codegen.host()
    monkeypatch.setenv(codegen.WITHOUT_VARIABLE, "avx,sse4.")
    fresh_host()
    triple, cpu, features = codegen.host()
    assert (triple, cpu) == with_all[:2]
    present = {name[1:] for name in with_all[2].split(",") if name[0] == "+"}
    expected = {name for name in present if not name.startswith(("avx", "sse4."))}
    assert {name[1:] for name in features.split(",") if name[0] == "+"} == expected


def test_a_feature_that_no_processor_has_is_an_error(monkeypatch, fresh_host):
    monkeypatch.setenv(codegen.WITHOUT_VARIABLE, "avx5l2")
    fresh_host()
    with pytest.raises(ValueError, match="no feature of a processor begins with 'avx5l2'"):
        codegen.host()
