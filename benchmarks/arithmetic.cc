// The arithmetic of the benchmark kernels, written by hand.

#include "limits.h"

extern "C" {}  // extern "C"
