"""Reports and warnings of programs that launch several kernels."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cokernel

OUT = jax.ShapeDtypeStruct((1,), jnp.int32)


def first_races(out_ref):
    out_ref[0] = lax.axis_index("core")


def second_races(x_ref, out_ref):
    out_ref[0] = x_ref[0] + lax.axis_index("core")


def two_kernels():
    mesh = cokernel.CoreMesh(core=2)
    first, second = (cokernel.kernel(body, OUT, mesh=mesh) for body in (first_races, second_races))
    return jax.jit(lambda: second(first()))


def writing_line(body):
    lines, start = inspect.getsourcelines(body)
    return start + next(i for i, line in enumerate(lines) if "out_ref[0] =" in line)


def run_and_catch(options):
    with cokernel.checked(options), pytest.warns(cokernel.CheckWarning) as caught:
        jax.block_until_ready(two_kernels()())
    return caught


def test_each_kernel_of_a_program_warns_at_its_users_line():
    caught = run_and_catch(cokernel.Checked(on_finding="warn"))
    places = [(warning.filename, warning.lineno) for warning in caught]
    bodies = (first_races, second_races)
    assert places == [(__file__, writing_line(body)) for body in bodies]
    texts = [str(warning.message) for warning in caught]
    assert all(body.__name__ in text for body, text in zip(bodies, texts, strict=True))


def test_there_is_a_report_of_each_kernel_of_a_program():
    run_and_catch(cokernel.Checked(on_finding="warn"))
    reports = cokernel.reports()[-2:]
    assert [report.kernel for report in reports] == ["first_races", "second_races"]
    assert all(report.of_kind("Race") for report in reports)
    assert cokernel.last_report() is reports[-1]


def test_what_was_not_checked_is_warned_of_at_the_line_that_made_the_kernel():
    def calls_back(x_ref, out_ref):
        jax.debug.callback(lambda x: None, x_ref[0])
        out_ref[0] = x_ref[0]

    kernel = cokernel.kernel(calls_back, OUT, mesh=cokernel.CoreMesh(core=1))
    with cokernel.checked(), pytest.warns(cokernel.CheckWarning, match="Not checked") as caught:
        jax.block_until_ready(kernel(jnp.ones(1, jnp.int32)))
    [warning] = caught
    here = test_what_was_not_checked_is_warned_of_at_the_line_that_made_the_kernel
    lines, start = inspect.getsourcelines(here)
    made = start + next(i for i, line in enumerate(lines) if "kernel = cokernel.kernel" in line)
    assert (warning.filename, warning.lineno) == (__file__, made)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_warning_that_filters_make_an_error_says_that_it_is_one(wrap):
    kernel = cokernel.kernel(first_races, OUT, mesh=cokernel.CoreMesh(core=2))
    with cokernel.checked(on_finding="warn"):
        with (
            warnings.catch_warnings(action="error"),
            pytest.raises(jax.errors.JaxRuntimeError, match="Race") as caught,
        ):
            jax.block_until_ready(wrap(kernel)())
        text = str(caught.value)
        assert "CheckWarning, which the warning filters of Python make an error" in text
        with pytest.warns(cokernel.CheckWarning, match="Race"):
            jax.block_until_ready(wrap(kernel)())


def test_an_exception_of_what_shows_warnings_is_told_behind_the_report(monkeypatch):
    def show(*args, **kwargs):
        raise KeyError("nowhere to show it")

    kernel = cokernel.kernel(first_races, OUT, mesh=cokernel.CoreMesh(core=2))
    with cokernel.checked(on_finding="warn"), warnings.catch_warnings(action="always"):
        monkeypatch.setattr(warnings, "showwarning", show)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Race") as caught:
            jax.block_until_ready(kernel())
    text = str(caught.value)
    assert "Traceback" not in text
    assert "showing it raised KeyError: 'nowhere to show it'" in text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_exception_leads_to_the_report_of_its_own_launch(wrap):
    mesh = cokernel.CoreMesh(core=2)
    first = cokernel.kernel(first_races, OUT, mesh=mesh)
    second = cokernel.kernel(second_races, OUT, mesh=mesh)
    errors = []
    with cokernel.checked():
        for run in (lambda: wrap(first)(), lambda: wrap(second)(jnp.ones(1, jnp.int32))):
            with pytest.raises(jax.errors.JaxRuntimeError) as caught:
                jax.block_until_ready(run())
            errors.append(caught.value)
    kernels = ["first_races", "second_races"]
    assert [cokernel.report_of(error).kernel for error in errors] == kernels
    assert cokernel.report_of(errors[1]) is cokernel.last_report()


def test_an_exception_raised_from_another_leads_to_the_report_of_that_one():
    kernel = cokernel.kernel(first_races, OUT, mesh=cokernel.CoreMesh(core=2))

    def step():
        try:
            jax.block_until_ready(kernel())
        except jax.errors.JaxRuntimeError as error:
            raise ExceptionGroup("several", [ValueError("the step failed")]) from error

    with pytest.raises(ExceptionGroup) as caught, cokernel.checked():
        step()
    assert cokernel.report_of(caught.value).of_kind("Race")


def test_an_exception_of_no_checked_launch_has_no_report():
    kernel = cokernel.kernel(first_races, OUT, mesh=cokernel.CoreMesh(core=2))
    with cokernel.checked(on_finding="warn"), pytest.warns(cokernel.CheckWarning):
        jax.block_until_ready(kernel())
    assert cokernel.report_of(ValueError("Race")) is None
    with pytest.raises(TypeError, match="takes an exception"):
        cokernel.report_of("Race")
