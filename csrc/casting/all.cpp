// The library in one translation unit, which setup.py compiles: torch's headers take 11 s to compile, the files below 8 s
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
