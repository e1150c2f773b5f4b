#include "switch.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <new>

namespace ampkit {

namespace {

constexpr Py_ssize_t kMaxDeviceTypes = 8;

PyObject* switch_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Switch*>(type->tp_alloc(type, 0));
  if (self != nullptr) new (&self->keys) c10::DispatchKeySet();
  return reinterpret_cast<PyObject*>(self);
}

// Appends device types to those of the switch. False with a Python exception.
bool add(Switch* control, PyObject* names, PyObject* choices) {
  const Py_ssize_t count = PyTuple_GET_SIZE(names);
  if (control->count + count > kMaxDeviceTypes || (choices != nullptr && PyList_GET_SIZE(choices) != count)) {
    PyErr_Format(PyExc_ValueError, "expected at most %zd device types, those torch.autocast knows with a dtype each", kMaxDeviceTypes);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (name == nullptr) return false;
    const c10::DeviceType type = c10::Device(name).type();
    const int place = control->count;
    control->device_types[place] = type;
    if (choices != nullptr) {
      PyObject* choice = PyList_GET_ITEM(choices, i);
      if (!THPDtype_Check(choice)) {
        PyErr_SetString(PyExc_TypeError, "expected a dtype for each device type");
        return false;
      }
      control->torchs_choice[place] = reinterpret_cast<THPDtype*>(choice)->scalar_type;
      control->keys = control->keys.add(at::autocast::get_autocast_dispatch_key_from_device_type(type));
      control->known = place + 1;
    }
    control->count = place + 1;
  }
  return true;
}

PyObject* switch_set(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<Switch*>(object);
  int installed, stores;
  PyObject *known, *choices, *followers, *lower_precision;
  if (!PyArg_ParseTuple(
          args, "ppO!O!O!O!:set", &installed, &stores, &PyTuple_Type, &known, &PyList_Type, &choices, &PyTuple_Type, &followers,
          &THPDtypeType, &lower_precision)) {
    return nullptr;
  }
  self->installed = false;
  self->count = self->known = 0;
  self->keys = c10::DispatchKeySet();
  if (!add(self, known, choices) || !add(self, followers, nullptr)) return nullptr;
  self->lower_precision = reinterpret_cast<THPDtype*>(lower_precision)->scalar_type;
  self->stores = static_cast<char>(stores);
  self->installed = static_cast<char>(installed);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef switch_methods[] = {
    {"set", switch_set, METH_VARARGS, "set(installed, whether weights are stored in lower precision, device types, torch's default dtypes there, others that follow, lower_precision)"},
    {nullptr, nullptr, 0, nullptr}};

PyTypeObject make_switch_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ampkit._casting.Switch";
  type.tp_basicsize = sizeof(Switch);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "Switch(): whether, and on which devices, Calls cast; nothing until `set`.";
  type.tp_new = switch_new;
  type.tp_methods = switch_methods;
  return type;
}

}  // namespace

PyTypeObject SwitchType = make_switch_type();

}  // namespace ampkit
