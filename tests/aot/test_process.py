"""What becomes of a compiler's process: it is missing, it crashes, it hangs, it answers."""

import pytest

from cokernel import aot

STAND_IN = """#!/bin/sh
# Stands in for Python with a compiler: answers what the test wants.
{}
"""


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Returns a function that makes a script the interpreter in which the compiler runs."""

    def use(script):
        path = tmp_path / "python"
        path.write_text(STAND_IN.format(script))
        path.chmod(0o755)
        monkeypatch.setenv("COKERNEL_AOT_PYTHON", str(path))
        return path

    return use


READY = """echo '{"ready": true}'; read request"""


def test_a_missing_compiler_is_named_with_what_to_install(interpreter):
    path = interpreter("""echo '{"missing": "has no module libtpu"}'""")
    with (
        aot.Compiler(aot.TARGETS["v6e"]) as compiler,
        pytest.raises(
            aot.CompilerMissing, match=r"no compiler for v6e: .* has no module libtpu"
        ) as e,
    ):
        compiler.compile(b"")
    assert str(path) in str(e.value)
    assert "pip install 'cokernel[tpu]'" in str(e.value)


def test_a_compiler_that_crashes_is_a_finding_with_its_last_words(interpreter):
    interpreter(f"{READY}; echo 'F1202 Check failed: semaphores' >&2; kill -SEGV $$")
    with aot.Compiler(aot.TARGETS["v6e"]) as compiler:
        outcome = compiler.compile(b"")
    assert outcome.crashed
    assert outcome.compiled is None
    assert "crashed with SIGSEGV" in outcome.error
    assert "Check failed: semaphores" in outcome.error


def test_a_crash_leaves_the_compiler_usable(interpreter, tmp_path):
    interpreter(
        f'{READY}; if [ -e {tmp_path}/again ]; then echo \'{{"error": "no"}}\'; read more; fi; '
        f"touch {tmp_path}/again; exit 134"
    )
    with aot.Compiler(aot.TARGETS["v6e"]) as compiler:
        first, second = compiler.compile(b""), compiler.compile(b"")
    assert first.crashed
    assert "exit status 134" in first.error
    assert not second.crashed
    assert second.error == "no"


def test_a_compiler_that_takes_too_long_is_stopped(interpreter):
    interpreter(f"{READY}; exec sleep 60")
    with aot.Compiler(aot.TARGETS["v6e"], time_limit_s=0.2) as compiler:
        outcome = compiler.compile(b"")
    assert (outcome.crashed, outcome.timed_out) == (False, True)
    assert "longer than 0.2 s" in outcome.error


def test_that_the_compiler_takes_too_long_is_what_the_report_says(interpreter):
    interpreter(f"{READY}; exec sleep 60")
    report = aot.compile(lambda x: x, 1.0, target="v6e", time_limit_s=0.2)
    assert report.timed_out
    assert "for v6e: the compiler took too long" in str(report)


def test_a_compiler_that_ended_between_two_modules_is_a_finding(interpreter):
    interpreter(f'{READY}; echo \'{{"error": "no"}}\'')
    with aot.Compiler(aot.TARGETS["v6e"]) as compiler:
        compiler.compile(b"")
        compiler._process.wait()
        outcome = compiler.compile(b"")
    assert outcome.crashed
    assert "exit status 0" in outcome.error


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_of_seconds(limit):
    with pytest.raises(ValueError, match="time_limit_s must be a positive number of seconds"):
        aot.compile(lambda: None, target="v6e", time_limit_s=limit)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="what is compiled is a function of arrays, got 3"):
        aot.compile(3, target="v6e")


def test_a_compiler_that_does_not_start_is_an_error(interpreter):
    interpreter("echo broken >&2; exit 3")
    with (
        aot.Compiler(aot.TARGETS["v6e"]) as compiler,
        pytest.raises(
            aot.CompilerMissing, match=r"does not start in .*python: .* exit status 3: broken"
        ),
    ):
        compiler.compile(b"")


def test_what_is_not_python_is_shown_with_what_it_says(interpreter):
    interpreter("echo hello; exec sleep 60")
    with (
        aot.Compiler(aot.TARGETS["v6e"]) as compiler,
        pytest.raises(aot.CompilerMissing, match=r"does not start in .*: .*hello"),
    ):
        compiler.compile(b"")


def test_an_interpreter_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("COKERNEL_AOT_PYTHON", str(tmp_path / "nothing"))
    with (
        aot.Compiler(aot.TARGETS["h100"]) as compiler,
        pytest.raises(aot.CompilerMissing, match=r"cannot run .*nothing \(No such file") as error,
    ):
        compiler.compile(b"")
    assert "Set the environment variable COKERNEL_AOT_PYTHON" in str(error.value)


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="there is no target 'v99'; known are v5p, v6e, tpu7x"):
        aot.compile(lambda: None, target="v99")
