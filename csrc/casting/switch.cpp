#include "switch.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <memory>
#include <string>

namespace py = pybind11;

namespace ampkit {

namespace {

std::vector<c10::DeviceType> types_of(const std::vector<std::string>& names) {
  std::vector<c10::DeviceType> types;
  for (const std::string& name : names) types.push_back(c10::Device(name).type());
  return types;
}

void set(Switch& control, bool installed, bool stores, const std::vector<std::string>& known,
         const std::vector<at::ScalarType>& torchs_choice, const std::vector<std::string>& followers,
         at::ScalarType lower_precision) {
  control = {installed, stores, types_of(known), torchs_choice, types_of(followers), lower_precision, {}};
  for (c10::DeviceType type : control.known) {
    control.keys = control.keys.add(at::autocast::get_autocast_dispatch_key_from_device_type(type));
  }
}

}  // namespace

// The class Switch: it is off until `set`, which CastingState.tell_wrappers calls.
void add_switch(py::module_& module) {
  py::class_<Switch, std::shared_ptr<Switch>>(module, "Switch").def(py::init<>()).def("set", &set);
}

}  // namespace ampkit
