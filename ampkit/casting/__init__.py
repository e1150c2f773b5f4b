"""The O1 engine: torch functions patched to cast their arguments."""

from .decorators import bfloat16_function as bfloat16_function
from .decorators import float_function as float_function
from .decorators import half_function as half_function
from .decorators import promote_function as promote_function
from .decorators import register_bfloat16_function as register_bfloat16_function
from .decorators import register_float_function as register_float_function
from .decorators import register_half_function as register_half_function
from .decorators import register_promote_function as register_promote_function
from .engine import Casting as Casting
from .engine import active_casting as active_casting
from .tensors import cast_floating as cast_floating
from .tensors import map_tensors as map_tensors
