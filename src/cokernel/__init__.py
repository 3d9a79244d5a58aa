"""Cokernel: kernels of several cooperating programs, written in Pallas, run natively anywhere."""

import importlib
from typing import Any

from cokernel import lowering as lowering
from cokernel import pallas as pallas
from cokernel import rules as rules
from cokernel.checking.explore import explore as explore
from cokernel.checking.findings import Finding as Finding
from cokernel.checking.findings import Party as Party
from cokernel.checking.launches import last_report as last_report
from cokernel.checking.launches import report_of as report_of
from cokernel.checking.launches import reports as reports
from cokernel.checking.options import Checked as Checked
from cokernel.checking.report import CheckWarning as CheckWarning
from cokernel.checking.report import Report as Report
from cokernel.checking.state import checked as checked
from cokernel.checking.state import set_checked as set_checked
from cokernel.meshes import CoreMesh as CoreMesh
from cokernel.meshes import private as private
from cokernel.meshes import set_target as set_target
from cokernel.meshes import shared as shared
from cokernel.meshes import target as target
from cokernel.parameters import CompilerParams as CompilerParams
from cokernel.statistics import LaunchStatistics as LaunchStatistics
from cokernel.statistics import ProgramStatistics as ProgramStatistics
from cokernel.statistics import last_launch as last_launch
from cokernel.tracing import kernel as kernel
from cokernel.tracing import mpmd_map as mpmd_map

lowering.register_call_targets()


def __getattr__(name: str) -> Any:
    """Imports `cokernel.aot` when it is first asked for: few programs need it."""
    if name != "aot":
        raise AttributeError(f"module 'cokernel' has no attribute {name!r}")
    return importlib.import_module("cokernel.aot")


__all__ = [
    "CheckWarning",
    "Checked",
    "CompilerParams",
    "CoreMesh",
    "Finding",
    "LaunchStatistics",
    "Party",
    "ProgramStatistics",
    "Report",
    "aot",
    "checked",
    "explore",
    "kernel",
    "last_launch",
    "last_report",
    "mpmd_map",
    "pallas",
    "private",
    "report_of",
    "reports",
    "set_checked",
    "set_target",
    "shared",
    "target",
]
