#include "switch.h"

#include <structmember.h>

namespace ampkit {

int is_on_our_device(const Switch* control, const at::Tensor& tensor) {
  static PyObject* cpu = PyUnicode_InternFromString("cpu");
  static PyObject* cuda = PyUnicode_InternFromString("cuda");
  if (tensor.is_cpu()) return PySet_Contains(control->device_types, cpu);
  if (tensor.is_cuda()) return PySet_Contains(control->device_types, cuda);
  PyObject* name = PyUnicode_FromString(c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true).c_str());
  if (name == nullptr) return -1;
  const int contained = PySet_Contains(control->device_types, name);
  Py_DECREF(name);
  return contained;
}

namespace {

PyObject* switch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"suspended", "device_types", nullptr};
  PyObject *suspended, *device_types;
  if (!PyArg_ParseTupleAndKeywords(
          args, kwargs, "O!O!:Switch", const_cast<char**>(keywords), &PySet_Type, &suspended, &PySet_Type,
          &device_types)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Switch*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->suspended = Py_NewRef(suspended);
  self->device_types = Py_NewRef(device_types);
  return reinterpret_cast<PyObject*>(self);
}

void switch_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Switch*>(object);
  Py_CLEAR(self->suspended);
  Py_CLEAR(self->device_types);
  Py_TYPE(object)->tp_free(object);
}

PyMemberDef switch_members[] = {
    {"enabled", T_BOOL, offsetof(Switch, enabled), 0, nullptr}, {nullptr, 0, 0, 0, nullptr}};

PyTypeObject make_switch_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "ampkit._casting.Switch";
  type.tp_basicsize = sizeof(Switch);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "Switch(suspended, device_types): whether, and in which threads and on which devices, Calls cast.";
  type.tp_new = switch_new;
  type.tp_dealloc = switch_dealloc;
  type.tp_members = switch_members;
  return type;
}

}  // namespace

PyTypeObject SwitchType = make_switch_type();

}  // namespace ampkit
