"""Runs a chip's compiler in a process of its own, so that its crash is a finding and not ours."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from cokernel.aot.targets import Target

# Names a Python that has the compilers, where the one that runs has not.
INTERPRETER_VARIABLE = "COKERNEL_AOT_PYTHON"

_START_LIMIT_S = 120.0


class CompilerMissing(RuntimeError):
    """No compiler for the chip can be started; most often, its wheel is not installed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one module: `compiled`, what the compiler tells of it; else `error`.

    `crashed` says that the error is not the compiler's message but how its process ended, and
    `timed_out` that it was stopped because it took too long.
    """

    compiled: Mapping[str, Any] | None
    error: str = ""
    crashed: bool = False
    timed_out: bool = False


class Compiler:
    """The compiler of one chip; a context manager, whose process serves any number of modules.

    Args:
      target: the chip.
      time_limit_s: seconds that one module may take.

    Raises:
      CompilerMissing: when it is started or first used, if its wheel is not installed.
      ValueError: if the time limit is not a positive number.
    """

    def __init__(self, target: Target, time_limit_s: float = 300.0):
        # Written so that NaN is refused too.
        if not 0 < time_limit_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"time_limit_s must be a positive number of seconds, got {time_limit_s}"
            )
        self.target = target
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory(prefix="cokernel-aot-")

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._folder.cleanup()

    def compile(self, module: bytes) -> Outcome:
        """Compiles a StableHLO module, given as bytecode."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        path = pathlib.Path(self._folder.name) / "module.mlirbc"
        path.write_bytes(module)
        # A process that has ended since its last answer says so below.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{path}\n")
            self._process.stdin.flush()
        answer = self._next_answer(self._time_limit_s)
        if answer is None:
            timed_out = self._timed_out
            error = self._epitaph(self._time_limit_s)
            return Outcome(None, error, crashed=not timed_out, timed_out=timed_out)
        if "error" in answer:
            return Outcome(None, answer["error"])
        return Outcome(answer)

    def start(self) -> None:
        """Starts the process, if it does not run already.

        Raises:
          CompilerMissing: if the compiler's wheel is not installed, or its process does not start.
        """
        if self._process is not None:
            return
        target = self.target
        interpreter = os.environ.get(INTERPRETER_VARIABLE) or sys.executable
        settings = {
            "platform": target.platform,
            "topology": target.topology,
            "topology_options": dict(target.topology_options),
            "modules": list(target.modules),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        }
        for folder in target.folders.values():
            pathlib.Path(self._folder.name, folder).mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            **target.environment,
            **{
                name: str(pathlib.Path(self._folder.name, folder))
                for name, folder in target.folders.items()
            },
        }
        # The worker finds its own packages, and not those that this process was pointed to.
        for name in ("PYTHONPATH", "MOSAIC_GPU_RUNTIME_LIB_PATH"):
            environment.pop(name, None)
        worker = pathlib.Path(__file__).with_name("worker.py")
        self._log = pathlib.Path(self._folder.name, "log").open("w+")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [interpreter, str(worker), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise CompilerMissing(
                f"no compiler for {target.name}: cannot run {interpreter} ({error.strerror}). Set "
                f"the environment variable {INTERPRETER_VARIABLE} to the path of a Python, or unset"
                " it"
            ) from error
        self._answers = queue.Queue()
        threading.Thread(
            target=_forward, args=(self._process.stdout, self._answers), daemon=True
        ).start()
        answer = self._next_answer(_START_LIMIT_S)
        if answer is None:
            raise CompilerMissing(
                f"the compiler for {target.name} does not start in {interpreter}: "
                f"{self._epitaph(_START_LIMIT_S)}. Set the environment variable "
                f"{INTERPRETER_VARIABLE} to a Python that has cokernel[{target.extra}]"
            )
        if "missing" in answer:
            self._stop()
            raise CompilerMissing(
                f"no compiler for {target.name}: {interpreter} {answer['missing']}. Run `pip "
                f"install 'cokernel[{target.extra}]'`, or name a Python that has it in the "
                f"environment variable {INTERPRETER_VARIABLE}"
            )

    def _next_answer(self, limit_s: float) -> dict[str, Any] | None:
        """Returns the worker's next answer, or None if it ended, took too long or made no sense."""
        self._timed_out = False
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._timed_out = True
            return None
        if line is None:
            return None
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            # Whatever runs is not the worker. What it said is shown with the rest.
            print(line, file=self._log, flush=True)
            assert self._process is not None
            self._process.kill()
            return None
        assert isinstance(answer, dict)
        return answer

    def _epitaph(self, limit_s: float) -> str:
        """Ends the worker and returns how it ended, with the last that it had to say."""
        assert self._process is not None
        if self._timed_out:
            how = f"the compiler took longer than {limit_s:g} s and was stopped"
            self._process.kill()
            self._process.wait()
        else:
            status = self._process.wait()
            how = f"the compiler ended with exit status {status}"
            if status < 0:
                how = f"the compiler crashed with {signal.Signals(-status).name}"
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        self._stop()
        said = [line for line in lines if _is_telling(line)] or lines
        return f"{how}: {' / '.join(said[:3])[:2000]}" if said else how

    def _stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        # A process that is gone already is what was wanted.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.close()


def _forward(lines: Any, answers: "queue.Queue[str | None]") -> None:
    for line in lines:
        answers.put(line)
    answers.put(None)
    lines.close()


def _is_telling(line: str) -> bool:
    """Whether a line of a crashed compiler's log says why: a fatal message or a failed check."""
    return line.startswith("F") or "Check failed" in line or "LLVM ERROR" in line
