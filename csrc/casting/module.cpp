// ampkit._casting: O1's wrappers in C++. They read torch's own structures through its C++ headers. So unlike the kernels
// this library serves only the torch that it was built with, and raises an error when it is imported under another.
#include <torch/csrc/utils/pybind.h>

#include <string>

#ifndef AMPKIT_BUILT_WITH_TORCH
#error "setup.py defines AMPKIT_BUILT_WITH_TORCH: torch.__version__, local part included"
#endif

namespace ampkit {
void add_call(pybind11::module_& module);
void add_cast_store(pybind11::module_& module);
void add_narrow_gradients(pybind11::module_& module);
void add_reach(pybind11::module_& module);
void add_switch(pybind11::module_& module);
void add_tensor_access(pybind11::module_& module);
}  // namespace ampkit

PYBIND11_MODULE(_casting, module) {
  const auto version = pybind11::module_::import("torch").attr("__version__").cast<std::string>();
  if (version != AMPKIT_BUILT_WITH_TORCH) {
    throw pybind11::import_error("it was built with torch " AMPKIT_BUILT_WITH_TORCH ", and this is torch " + version);
  }
  module.attr("torch_version") = AMPKIT_BUILT_WITH_TORCH;
  ampkit::add_call(module);
  ampkit::add_cast_store(module);
  ampkit::add_narrow_gradients(module);
  ampkit::add_reach(module);
  ampkit::add_switch(module);
  ampkit::add_tensor_access(module);
}
