// Options of checked mode from Python, and records of checked launches to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "checked/findings.h"
#include "checked/options.h"
#include "executable.h"

namespace cokernel::checked {

// Null for None. Raises for what makes no sense.
std::shared_ptr<const CheckedOptions> options_from(nanobind::handle object);
// As `_runtime.set_schedule`.
nanobind::object set_python_schedule(nanobind::object schedule);
// `failure` is that of the record, described, or None.
nanobind::dict describe_record(const Executable& executable, const CheckedRecord& record,
                               nanobind::object failure);

}  // namespace cokernel::checked
