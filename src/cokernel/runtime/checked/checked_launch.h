// A launch in checked mode, from its schedules to its report.
#pragma once

#include <cstdint>
#include <string>

#include "launch.h"

namespace cokernel::checked {

// Runs the launch once for each schedule that is asked for. Returns the text of the error, empty if
// there was none.
std::string run_checked(Executable& executable, Launch& launch, const Buffer* buffers,
                        int32_t count);

}  // namespace cokernel::checked
