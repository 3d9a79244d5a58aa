// Copies past the caches.
#pragma once

#include <cstddef>

namespace cokernel::checked {

// As std::memmove, for memory that nobody looks at before the caches have forgotten it: what is
// written does not push out what the caches hold, and what was there before is not read.
void stream(char* target, const char* source, std::size_t bytes);

}  // namespace cokernel::checked
