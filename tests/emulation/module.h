// What the Python module ampkit_emulated tells and takes; module.cpp.
#pragma once

#include <cstdint>

namespace emulation {

int64_t launches();         // since the library was loaded
int64_t blocks();           // of all these
void seed(uint64_t value);  // of the order in which threads run
// Launches one of the kernels of broken.cu, which must end the process; false if there is none of this name.
bool run_broken(const char* name);

}  // namespace emulation
