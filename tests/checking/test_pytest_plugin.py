"""The pytest plugin, on tests of its own."""

import pathlib
import re
import subprocess
import sys
import textwrap

TESTS = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu, tpu_sc as plsc
    import cokernel

    OUT = jax.ShapeDtypeStruct((1,), jnp.int32)

    def last_wins(out_ref):
        out_ref[0] = lax.axis_index("core")

    def test_a_kernel_with_a_race():
        jax.block_until_ready(cokernel.kernel(last_wins, OUT, mesh=cokernel.CoreMesh(core=3))())

    def test_a_kernel_without():
        jax.block_until_ready(cokernel.kernel(last_wins, OUT, mesh=cokernel.CoreMesh(core=1))())

    def test_a_stock_kernel_with_a_race():
        def body(x_ref, out_ref):
            pltpu.sync_copy(x_ref, out_ref)

        with cokernel.target("v6e"):
            mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
            kernel = pl.kernel(body, jax.ShapeDtypeStruct((8,), jnp.int32), mesh=mesh)
            jax.block_until_ready(kernel(jnp.arange(8)))
    """
)


SWALLOWING_TESTS = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, pytest
    from jax import lax
    import cokernel

    def last_wins(out_ref):
        out_ref[0] = lax.axis_index("core")

    kernel = cokernel.kernel(
        last_wins, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=3)
    )

    def test_swallowed():
        try:
            jax.block_until_ready(kernel())
        except Exception:
            pass

    @pytest.fixture
    def swallows():
        try:
            jax.block_until_ready(kernel())
        except Exception:
            pass

    def test_of_a_fixture(swallows):
        pass

    def test_expected():
        with pytest.raises(Exception, match="Race"):
            jax.block_until_ready(kernel())

    def test_of_another_expectation():
        try:
            jax.block_until_ready(kernel())
        except Exception:
            with pytest.raises(ValueError):
                int("x")

    def test_asked_for():
        with cokernel.checked(on_finding="warn"):
            jax.block_until_ready(kernel())
        assert cokernel.explore(kernel, schedules=3).of_kind("Race")

    @pytest.mark.xfail(strict=True)
    def test_expected_to_fail():
        test_swallowed()

    def test_clean():
        pass
    """
)


def run(folder: pathlib.Path, *arguments: str, tests: str = TESTS) -> str:
    (folder / "test_kernels.py").write_text(tests)
    # By name, so that it is this plugin whether Cokernel is installed or on the path; pytest
    # leaves out the entry point of the same name.
    plugin = ["-p", "cokernel.checking.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q", *arguments]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return ran.stdout + ran.stderr


def test_races_fail_the_tests_that_have_them(tmp_path):
    text = run(tmp_path, "--cokernel-check=3")
    assert "2 failed, 1 passed" in text
    assert "Race: program 'last_wins'" in text
    assert "a DMA of program 'body'" in text
    assert "3 launches of 2 kernels" in text


def test_one_launch_of_one_kernel_is_told_in_the_singular(tmp_path):
    text = run(tmp_path, "--cokernel-check=3", "-k", "a_stock_kernel")
    assert "1 launch of 1 kernel, 1 finding\n" in text


def test_options_say_what_is_looked_for(tmp_path):
    text = run(tmp_path, "--cokernel-check", "--cokernel-check-options=races=off")
    assert "3 passed" in text
    assert "0 different findings" in text


def test_without_the_option_kernels_run_natively(tmp_path):
    text = run(tmp_path, "-k", "not stock")
    assert "2 passed" in text
    assert "checked mode" not in text


def test_an_option_that_is_not_understood_is_a_usage_error(tmp_path):
    text = run(tmp_path, "--cokernel-check-options=rices=off")
    assert "'rices=off' is no option" in text


def test_two_numbers_of_schedules_are_a_usage_error(tmp_path):
    text = run(tmp_path, "--cokernel-check=4", "--cokernel-check-options=schedules=3")
    assert "contradict each other" in text


def test_a_path_that_the_option_takes_is_told_so(tmp_path):
    text = run(tmp_path, "--cokernel-check", "test_kernels.py")
    assert "takes a number of schedules, got 'test_kernels.py'" in text
    assert "--cokernel-check=1" in text


def test_findings_whose_exceptions_are_swallowed_fail_the_test(tmp_path):
    text = run(tmp_path, "--cokernel-check=2", "-rA", tests=SWALLOWING_TESTS)
    # How many warnings there are depends on how the package is installed.
    assert re.search(r"2 failed, 3 passed, 1 xfailed, .*1 error in", text)
    assert "FAILED test_kernels.py::test_swallowed" in text
    assert "FAILED test_kernels.py::test_of_another_expectation" in text
    assert "ERROR test_kernels.py::test_of_a_fixture" in text
    assert "this passes, but its kernels have findings" in text
    assert "Race: program 'last_wins'" in text


def test_findings_that_only_warn_fail_no_test(tmp_path):
    options = "--cokernel-check-options=on_finding=warn"
    text = run(tmp_path, options, "-k", "swallowed or fixture", tests=SWALLOWING_TESTS)
    assert "2 passed" in text
    assert "CheckWarning: Checked: kernel 'last_wins'" in text


UNWAITED_TESTS = textwrap.dedent(
    """
    import os
    import threading

    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"

    import jax
    import jax.numpy as jnp
    import pytest

    import cokernel

    def last_wins(x_ref, out_ref):
        out_ref[0] = x_ref[0]

    KERNEL = cokernel.kernel(
        last_wins, jax.ShapeDtypeStruct((1,), jnp.float32), mesh=cokernel.CoreMesh(core=2)
    )

    # What is launched waits for what takes long.
    def slow(a):
        return jax.lax.fori_loop(0, 40, lambda i, a: a @ a, a)[0, :1]

    def launch(hold):
        hold.append(KERNEL(jax.jit(slow)(jnp.eye(500))))

    def launch_in_a_thread(hold):
        whole = jax.jit(lambda a: KERNEL(slow(a)))
        thread = threading.Thread(target=lambda: hold.append(whole(jnp.eye(500))))
        thread.start()
        thread.join()

    def launch_on_another_device(hold):
        hold.append(KERNEL(jax.jit(slow)(jax.device_put(jnp.eye(500), jax.devices()[2]))))

    def launch_on_all_devices(hold):
        mesh = jax.make_mesh((3,), ("device",))
        per_device = jax.shard_map(
            lambda a: KERNEL(slow(a[0])),
            mesh=mesh,
            in_specs=jax.P("device"),
            out_specs=jax.P("device"),
            check_vma=False,
        )
        hold.append(jax.jit(per_device)(jnp.stack([jnp.eye(500)] * 3)))

    def launch_into_a_ref(hold):
        def body(x_ref, into_ref):
            into_ref[0] = x_ref[0]

        kernel = cokernel.kernel(body, (), mesh=cokernel.CoreMesh(core=2))
        into = jax.new_ref(jnp.zeros(1))
        jax.jit(lambda a, into: kernel(slow(a), into))(jnp.eye(500), into)

    LAUNCHES = [
        launch, launch_in_a_thread, launch_on_another_device, launch_on_all_devices,
        launch_into_a_ref,
    ]

    HELD = []

    @pytest.fixture
    def launches_at_its_end():
        yield
        launch([])

    # The second time JAX needs to compile nothing.
    @pytest.mark.parametrize(
        "launches", [one for launches in LAUNCHES for one in [launches, launches, None]]
    )
    def test_that_drops_the_result(launches):
        if launches is not None:
            launches([])

    def test_that_keeps_the_result():
        launch(HELD)

    def test_that_has_nothing_to_do_with_that():
        pass

    def test_whose_fixture_launches(launches_at_its_end):
        pass

    def test_that_has_nothing_to_do_with_the_fixture():
        pass
    """
)


def test_findings_of_launches_that_nobody_waits_for_fail_their_own_test(tmp_path):
    text = run(tmp_path, "--cokernel-check", "-rA", tests=UNWAITED_TESTS)
    kinds = ("", "_in_a_thread", "_on_another_device", "_on_all_devices", "_into_a_ref")
    for number, kind in enumerate(kinds):
        for time in (0, 1):
            assert f"FAILED test_kernels.py::test_that_drops_the_result[launch{kind}{time}]" in text
        assert f"PASSED test_kernels.py::test_that_drops_the_result[None{number}]" in text
    assert "FAILED test_kernels.py::test_that_keeps_the_result" in text
    assert "ERROR test_kernels.py::test_whose_fixture_launches" in text
    for name in ("that", "the_fixture"):
        assert f"PASSED test_kernels.py::test_that_has_nothing_to_do_with_{name}" in text
