// What the Python module ampkit_emulated tells and takes; module.cpp.
#pragma once

#include <cstdint>
#include <utility>

struct _object;  // PyObject

namespace emulation {

int64_t launches();         // since the library was loaded
int64_t blocks();           // of all these
void seed(uint64_t value);  // of the order in which threads run
// Launches one of the kernels of broken.cu, which must end the process; false if there is none of this name.
bool run_broken(const char* name);

// Who is handed launches, see handover.cpp: nobody, or two functions of Python.
extern _object *begin, *end;
void watch_memory();
std::pair<size_t, size_t> allocation_of(size_t address);  // where it begins, and its bytes, or 0

}  // namespace emulation
