// The library in one translation unit, which is what setup.py compiles: to read torch's headers takes 11 s, the files below take 8 s
// together.
#include "call.cpp"
#include "cast_store.cpp"
#include "module.cpp"
#include "narrow_gradients.cpp"
#include "reach.cpp"
#include "shared_cast.cpp"
#include "switch.cpp"
#include "tensor_access.cpp"
#include "weight_casts.cpp"
