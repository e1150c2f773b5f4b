"""The results of each instruction of PTX, one lane per element: NVIDIA's "PTX ISA" in numpy, as far as csrc/cuda needs it.

A form that is not in ``FORMS`` is an error where a kernel is translated: nothing is skipped, and nothing is taken for something
like it. So a sum without ``.rn``, which ptxas may contract into a fused multiply-add, is as unknown as an approximate quotient.
"""

import ctypes
import itertools
from typing import NamedTuple

import numpy as np

#: Types of PTX. For registers and conversions 16-bit floats are bits.
DTYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("uint16"),
    "bf16": np.dtype("uint16"),
    "f32": np.dtype("float32"),
    "f64": np.dtype("float64"),
}
NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
NAN16 = np.uint16(0x7FFF)


def canonical(x):
    """Results in float32, with a single bit pattern for NaN."""
    is_nan = np.isnan(x)
    return np.where(is_nan, NAN32, x) if is_nan.any() else x


_fma = ctypes.CDLL("libm.so.6").fma
_fma.argtypes, _fma.restype = [ctypes.c_double] * 3, ctypes.c_double
_fma_of_each = np.frompyfunc(_fma, 3, 1)


def fma(a, b, c):
    """a * b + c in float64, rounded once, by C's function."""
    return np.asarray(_fma_of_each(a, b, c), np.float64)[()]


def shift(b, bits: int):
    """An amount to shift by: from the width on numpy shifts everything out, or in, as PTX does."""
    return np.minimum(b, np.uint32(bits))


def funnel_left(low, high, by):
    both = high.astype(np.uint64) << np.uint64(32) | low
    return (both << (by & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def permute(a, b, selector):
    """Bytes of b:a, each chosen by four bits of the selector; the highest of these asks for the byte's sign instead."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.uint32(0)
    for k in range(4):
        chosen = selector >> np.uint32(4 * k) & np.uint32(15)
        byte = both >> (chosen & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(chosen & np.uint32(8), sign, byte).astype(np.uint32)
        result = result | byte << np.uint32(8 * k)
    return result


def half_of(x):
    return np.where(np.isnan(x), NAN16, x.astype(np.float16).view(np.uint16))


def of_half(bits):
    return canonical(bits.view(np.float16).astype(np.float32))


def bfloat16_of(x):
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(x), NAN16, rounded.astype(np.uint16))


def integer_of(x, dtype):
    """Towards zero, and to the closest integer there is; of a NaN, 0, or for float64 the highest bit."""
    range_of = np.iinfo(dtype)
    of_nan = range_of.min if range_of.min else 1 << range_of.bits - 1
    whole = np.clip(np.trunc(x.astype(np.float64)), range_of.min, range_of.max)
    return np.where(np.isnan(x), of_nan if x.dtype == np.float64 else 0, whole).astype(dtype)


class Form(NamedTuple):
    """An instruction's types, and the text of a Python expression of its operands."""

    result: str
    operands: tuple[str, ...]
    text: str


FORMS: dict[str, Form] = {}


def define(name: str, types: str, result: str, operands: str, text: str) -> None:
    """Add a form for each of the types, which replace T."""
    for one in types.split():
        named = [one if word == "T" else word for word in (result, *operands.split())]
        FORMS[name.replace("T", one)] = Form(named[0], tuple(named[1:]), text.replace("BITS", one[1:]))


INTEGERS, WORDS, FLOATS = "s16 u16 s32 u32 s64 u64", "b16 b32 b64", "f32 f64"
for sign, operator in ("add", "+"), ("sub", "-"), ("mul", "*"):
    define(f"{sign}.rn.T", "f32", "T", "T T", f"canonical({{0}} {operator} {{1}})")
    define(f"{sign}.rn.T", "f64", "T", "T T", f"({{0}} {operator} {{1}})")
    define(f"{sign}.lo.T" if sign == "mul" else f"{sign}.T", INTEGERS, "T", "T T", f"({{0}} {operator} {{1}})")
for kind, (bits, wide) in itertools.product("su", ((16, 32), (32, 64))):
    astype = f".astype('{DTYPES[f'{kind}{wide}'].name}')"
    define("mul.wide.T", f"{kind}{bits}", f"{kind}{wide}", "T T", f"({{0}}{astype} * {{1}}{astype})")
define("div.rn.f32", "f32", "T", "T T", "canonical({0} / {1})")
define("div.rn.f64", "f64", "T", "T T", "({0} / {1})")
define("sqrt.rn.f32", "f32", "T", "T", "canonical(np.sqrt({0}))")
define("sqrt.rn.f64", "f64", "T", "T", "np.sqrt({0})")
define("rcp.rn.f64", "f64", "T", "T", "(1.0 / {0})")
define("fma.rn.f64", "f64", "T", "T T T", "fma({0}, {1}, {2})")
define("abs.f64", "f64", "T", "T", "np.abs({0})")
define("neg.T", "f64 s32 s64", "T", "T", "(-{0})")
define("min.T", INTEGERS, "T", "T T", "np.minimum({0}, {1})")
define("max.T", INTEGERS, "T", "T T", "np.maximum({0}, {1})")
for word, operator in ("and", "&"), ("or", "|"), ("xor", "^"):
    define(f"{word}.T", f"{WORDS} pred", "T", "T T", f"({{0}} {operator} {{1}})")
define("not.T", f"{WORDS} pred", "T", "T", "(~{0})")
define("shl.T", WORDS, "T", "T u32", "({0} << shift({1}, BITS).astype({0}.dtype))")
define("shr.T", f"{WORDS} {INTEGERS}", "T", "T u32", "({0} >> shift({1}, BITS).astype({0}.dtype))")
define("shf.l.wrap.b32", "b32", "T", "T T u32", "funnel_left({0}, {1}, {2})")
define("prmt.b32", "b32", "T", "T T T", "permute({0}, {1}, {2})")
define("selp.T", f"{WORDS} {INTEGERS} {FLOATS}", "T", "T T pred", "np.where({2}, {0}, {1})")
for word, operator in ("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="):
    define(
        f"setp.{word}.T",
        INTEGERS if word[0] in "lg" else f"{INTEGERS} {WORDS}",
        "pred",
        "T T",
        f"({{0}} {operator} {{1}})",
    )
    if word != "ne":
        define(f"setp.{word}.T", FLOATS, "pred", "T T", f"({{0}} {operator} {{1}})")
# Unordered comparisons hold for NaNs: each is the contrary of an ordered one.
for word, contrary in ("neu", "=="), ("ltu", ">="), ("leu", ">"), ("gtu", "<="), ("geu", "<"):
    define(f"setp.{word}.T", FLOATS, "pred", "T T", f"(~({{0}} {contrary} {{1}}))")
for to, source in itertools.permutations(INTEGERS.split(), 2):
    define(f"cvt.{to}.T", source, to, "T", f"{{0}}.astype('{DTYPES[to].name}')")
define("cvt.f64.f32", "f32", "f64", "T", "{0}.astype('float64')")
define("cvt.rn.f32.f64", "f64", "f32", "T", "canonical({0}.astype('float32'))")
define("cvt.rn.f32.T", "s32 u32", "f32", "T", "{0}.astype('float32')")
define("cvt.rzi.s32.T", FLOATS, "s32", "T", "integer_of({0}, 'int32')")
define("cvt.rzi.u32.T", FLOATS, "u32", "T", "integer_of({0}, 'uint32')")
define("cvt.rn.f16.f32", "f32", "f16", "T", "half_of({0})")
define("cvt.f32.f16", "f16", "f32", "T", "of_half({0})")
define("cvt.rn.bf16.f32", "f32", "bf16", "T", "bfloat16_of({0})")
define("mov.T", f"{WORDS} {INTEGERS} {FLOATS} pred", "T", "T", "{0}")
define("cvta.to.global.u64", "u64", "T", "T", "{0}")
