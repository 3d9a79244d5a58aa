"""Ahead of time: compiles for a chip that is not there, and reports what its compiler says."""

from cokernel.aot.compiling import compile as compile  # noqa: A004
from cokernel.aot.compiling import compile_with as compile_with
from cokernel.aot.process import Compiler as Compiler
from cokernel.aot.process import CompilerMissing as CompilerMissing
from cokernel.aot.report import Report as Report
from cokernel.aot.targets import TARGETS as TARGETS

__all__ = ["TARGETS", "Compiler", "CompilerMissing", "Report", "compile", "compile_with"]
