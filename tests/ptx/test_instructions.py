"""Each instruction against the manual: operands and results as bits, worked out by hand, or by arithmetic of another kind."""

import random
from fractions import Fraction

import numpy as np
import pytest

from ptx.instructions import DTYPES, FORMS
from ptx.interpreter import Memory, launch
from ptx.translation import Module, PtxError

LETTERS = {"f32": "f", "f64": "d", "pred": "p"}


def memory_of(*arrays):
    ranges = [(one.ctypes.data, one.nbytes) for one in arrays]
    return Memory(lambda at: next((one for one in ranges if one[0] <= at < sum(one)), None))


def kernel(body, parameters=1, registers="", shared=""):
    """An entry whose pointers are in %rd0 and so on, the thread's number in %r0."""
    takes = ",\n".join(f"\t.param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(
        f"\tld.param.u64 %rd{i}, [p{i}];\n\tcvta.to.global.u64 %rd{i}, %rd{i};" for i in range(parameters)
    )
    kinds = {"p": "pred", "rs": "b16", "r": "b32", "rd": "b64", "f": "f32", "d": "f64"}
    declared = "\n".join(f"\t.reg .{kind} %{name}<40>;" for name, kind in kinds.items())
    text = f"{shared}\n.visible .entry k(\n{takes}\n)\n{{\n{declared}\n{registers}\n{loads}"
    text += f'\n\tmov.u32 %r0, %tid.x;\n{body}\n\tret;\n\n}}\n\t.file 1 "/a/k.cu"\n'
    return Module(text).entry("k")


def run(body, *arrays, threads=32, grid=1, **how):
    addresses = np.array([one.ctypes.data for one in arrays], np.uint64)
    return launch(kernel(body, len(arrays), **how), addresses.tobytes(), grid, threads, memory_of(*arrays))


def compute(name, rows):
    """Results of an instruction, a thread for each row of operands, as bits."""
    form = FORMS[name]
    arrays, body, registers = [], [], []
    for i, kind in enumerate(form.operands):
        bits = 8 * DTYPES[kind].itemsize if kind != "pred" else 32
        arrays.append(np.array([row[i] for row in rows], f"u{bits // 8}"))
        register = f"%{LETTERS.get(kind, {16: 'rs', 32: 'r', 64: 'rd'}[bits])}{10 + i}"
        body.append(f"mul.wide.u32 %rd30, %r0, {bits // 8};\nadd.s64 %rd30, %rd30, %rd{i};")
        if kind == "pred":
            body.append(f"ld.global.u32 %r30, [%rd30];\nsetp.ne.u32 {register}, %r30, 0;")
        else:
            body.append(f"ld.global.{kind if kind in LETTERS else f'u{bits}'} {register}, [%rd30];")
        registers.append(register)
    bits = 8 * DTYPES[form.result].itemsize if form.result != "pred" else 32
    result = f"%{LETTERS.get(form.result, {16: 'rs', 32: 'r', 64: 'rd'}[bits])}20"
    body.append(f"{name} {result}, {', '.join(registers)};")
    if form.result == "pred":
        body.append("selp.b32 %r20, 1, 0, %p20;")
        result = "%r20"
    body.append(f"mul.wide.u32 %rd30, %r0, {bits // 8};\nadd.s64 %rd30, %rd30, %rd{len(arrays)};")
    body.append(f"st.global.{form.result if result[1] in 'fd' else f'u{bits}'} [%rd30], {result};")
    out = np.zeros(len(rows), f"u{bits // 8}")
    run("\n".join(body), *arrays, out, threads=len(rows))
    return out.tolist()


ONE, INF, NAN, MINUS = 0x3F800000, 0x7F800000, 0x7FFFFFFF, 0x80000000  # MINUS: -0
ODD_NAN, NEGATIVE_NAN = 0x7FA00001, 0xFFC12345
ONE64, INF64 = 0x3FF0000000000000, 0x7FF0000000000000
TOP, ALL = 1 << 31, 0xFFFFFFFF

#: Instructions, and rows of operands and the result.
TABLE = {
    # Halves go to the even neighbour; denormals are numbers; every NaN becomes the one.
    "add.rn.f32": [
        (ONE, 0x33800000, ONE), (ONE + 1, 0x33800000, ONE + 2), (ONE, 0x33800001, ONE + 1), (1, 1, 2), (0x007FFFFF, 1, 0x00800000),
        (0x7F7FFFFF, 0x7F7FFFFF, INF), (INF, INF | TOP, NAN), (ODD_NAN, ONE, NAN), (ONE, NEGATIVE_NAN, NAN), (MINUS, 0, 0),
        (MINUS, MINUS, MINUS), (0xBF800000, ONE, 0),
    ],
    "sub.rn.f32": [(ONE, ONE, 0), (MINUS, 0, MINUS), (INF, INF, NAN), (0x00800000, 1, 0x007FFFFF), (ONE, 0x33000001, 0x3F7FFFFF)],
    "mul.rn.f32": [
        (ONE + 1, ONE + 1, ONE + 2), (0x00000001, 0x3F000000, 0), (0x00000003, 0x3F000000, 2), (0x7F000000, 0x40000000, INF),
        (0, INF, NAN), (MINUS, ONE, MINUS), (0xBF800000, MINUS, 0), (NEGATIVE_NAN, 0, NAN),
    ],
    "div.rn.f32": [
        (ONE, 0x40400000, 0x3EAAAAAB), (0, 0, NAN), (ONE, MINUS, INF | TOP), (INF, INF, NAN), (ONE, INF, 0), (1, 0x40000000, 0),
        (3, 0x40000000, 2), (0x40E00000, 0x41200000, 0x3F333333),
    ],
    "sqrt.rn.f32": [(0x40000000, 0x3FB504F3), (MINUS, MINUS), (0xBF800000, NAN), (INF, INF), (1, 0x1A3504F3), (ODD_NAN, NAN)],
    "add.rn.f64": [(ONE64, 0x3CA0000000000000, ONE64), (ONE64 + 1, 0x3CA0000000000000, ONE64 + 2), (1, 1, 2)],
    "sub.rn.f64": [(ONE64, ONE64, 0), (1 << 63, 0, 1 << 63)],
    "mul.rn.f64": [(ONE64 + 1, ONE64 + 1, ONE64 + 2), (1, 0x3FE0000000000000, 0)],
    "div.rn.f64": [(ONE64, 0x4008000000000000, 0x3FD5555555555555), (ONE64, 0, INF64)],
    "sqrt.rn.f64": [(0x4000000000000000, 0x3FF6A09E667F3BCD), (1 << 63, 1 << 63)],
    "rcp.rn.f64": [(0x4008000000000000, 0x3FD5555555555555), (1 << 63, INF64 | 1 << 63), (INF64, 0)],
    "fma.rn.f64": [  # (1 + 2^-52)^2 - (1 + 2^-51) is 2^-104, where two roundings leave 0
        (ONE64 + 1, ONE64 + 1, (ONE64 + 2) | 1 << 63, 0x3970000000000000), (INF64, ONE64, INF64, INF64),
        (1 << 63, ONE64, 1 << 63, 1 << 63),
    ],
    "abs.f64": [(ONE64 | 1 << 63, ONE64), (1 << 63, 0)],
    "neg.f64": [(ONE64, ONE64 | 1 << 63), (0, 1 << 63)],
    "neg.s32": [(1, ALL), (TOP, TOP)],
    "add.s32": [(ALL, 1, 0), (0x7FFFFFFF, 1, TOP)],
    "sub.s32": [(0, 1, ALL)],
    "add.s64": [((1 << 64) - 1, 1, 0)],
    "sub.s64": [(0, 1, (1 << 64) - 1)],
    "mul.lo.s32": [(0x10001, 0x10001, 0x20001), (ALL, 5, 0xFFFFFFFB)],
    "mul.lo.s64": [(1 << 63, 3, 1 << 63), ((1 << 64) - 1, 5, (1 << 64) - 5)],
    "mul.wide.s32": [(ALL, 4, (1 << 64) - 4), (0x7FFFFFFF, 0x7FFFFFFF, 0x3FFFFFFF00000001), (TOP, TOP, 1 << 62)],
    "mul.wide.u32": [(ALL, 4, 0x3FFFFFFFC), (ALL, ALL, 0xFFFFFFFE00000001)],
    "mul.wide.u16": [(0xFFFF, 0xFFFF, 0xFFFE0001)],
    "min.s32": [(ALL, 1, ALL), (TOP, 0x7FFFFFFF, TOP)],
    "min.u32": [(ALL, 1, 1)],
    "max.s32": [(ALL, 1, 1)],
    "max.u32": [(ALL, 1, ALL)],
    "min.s64": [((1 << 64) - 1, 1, (1 << 64) - 1)],
    "and.b32": [(0xF0F0, 0xFF00, 0xF000)],
    "or.b32": [(0xF0F0, 0x0F00, 0xFFF0)],
    "xor.b32": [(0xF0F0, 0xFF00, 0x0FF0)],
    "not.b32": [(0xF0F0F0F0, 0x0F0F0F0F)],
    "not.b64": [(0, (1 << 64) - 1)],
    "and.b64": [(1 << 63 | 1, 1 << 63, 1 << 63)],
    "and.pred": [(1, 1, 1), (1, 0, 0)],
    "or.pred": [(1, 0, 1), (0, 0, 0)],
    "not.pred": [(1, 0), (0, 1)],
    "shl.b32": [(1, 31, TOP), (1, 32, 0), (ALL, 33, 0), (ALL, ALL, 0), (ALL, 4, 0xFFFFFFF0)],
    "shl.b64": [(1, 63, 1 << 63), (1, 64, 0), (1, 1 << 16, 0)],
    "shr.u32": [(TOP, 31, 1), (TOP, 32, 0), (ALL, 100, 0)],
    "shr.s32": [(TOP, 31, ALL), (TOP, 32, ALL), (0x7FFFFFFF, 1000, 0), (TOP, 4, 0xF8000000)],
    "shr.u64": [(1 << 63, 63, 1), (1 << 63, 64, 0)],
    "shr.s64": [(1 << 63, 63, (1 << 64) - 1), (1 << 63, 64, (1 << 64) - 1)],
    "shf.l.wrap.b32": [  # the upper half of b:a, shifted to the left by the lower five bits
        (0x80000001, 0x12345678, 4, 0x23456788), (ALL, 0x12345678, 0, 0x12345678), 
        (ALL, 0x12345678, 32, 0x12345678), (0x80000000, 0, 33, 1),
    ],
    "prmt.b32": [  # bytes 7 to 4 are b's, 3 to 0 a's; the highest bit of a selector asks for the sign
        (0x33221100, 0x77665544, 0x7531, 0x77553311), (0x33221100, 0x77665544, 0x4180, 0x44110000 & 0xFFFF0000 | 0x0000),
        (0x00000080, 0x77665544, 0x4448, 0x444444FF), (0x0000ABCD, 0x00001234, 0x1054, 0xABCD1234), (0x0000007F, 0, 0x8888, 0),
    ],
    "selp.b32": [(1, 2, 1, 1), (1, 2, 0, 2)],
    "selp.f32": [(ODD_NAN, ONE, 1, ODD_NAN)],
    # Ordered comparisons fail where there is a NaN, the others hold.
    "setp.lt.f32": [(MINUS, 0, 0), (0xBF800000, ONE, 1), (NAN, ONE, 0), (ONE, NAN, 0)],
    "setp.gt.f32": [(ONE, 0xBF800000, 1), (NAN, ONE, 0)],
    "setp.eq.f64": [(1 << 63, 0, 1), (INF64 | 1, INF64 | 1, 0)],
    "setp.neu.f32": [(MINUS, 0, 0), (NAN, NAN, 1), (ONE, 0, 1)],
    "setp.neu.f64": [(1 << 63, 0, 0), (INF64 | 1, INF64 | 1, 1)],
    "setp.gtu.f64": [(INF64 | 1, ONE64, 1), (ONE64, ONE64, 0), (INF64, ONE64, 1)],
    "setp.leu.f64": [(INF64 | 1, ONE64, 1), (ONE64, ONE64, 1), (INF64, ONE64, 0)],
    "setp.lt.s32": [(ALL, 1, 1), (1, ALL, 0)],
    "setp.lt.u32": [(ALL, 1, 0), (1, ALL, 1)],
    "setp.ge.s32": [(ALL, 1, 0), (1, 1, 1)],
    "setp.le.s32": [(TOP, 0x7FFFFFFF, 1)],
    "setp.gt.u32": [(ALL, 1, 1)],
    "setp.eq.s16": [(0xFFFF, 0xFFFF, 1)],
    "setp.ne.s64": [(1 << 63, 0, 1)],
    "cvt.u32.u64": [(0x123456789, 0x23456789)],
    "cvt.s64.s32": [(ALL, (1 << 64) - 1)],
    "cvt.u64.u32": [(ALL, ALL)],
    "cvt.s32.s16": [(0x8000, 0xFFFF8000)],
    "cvt.u16.u32": [(0x12345678, 0x5678)],
    "cvt.f64.f32": [(ONE, ONE64), (1, 0x36A0000000000000), (MINUS, 1 << 63)],
    "cvt.rn.f32.f64": [
        (0x3FF0000010000000, ONE), (0x3FF0000030000000, ONE + 2), (0x3FF0000010000001, ONE + 1), (0x47EFFFFFF0000000, INF),
        (0x36A0000000000000, 1), (0x3690000000000000, 0), (0x7FF8000000000001, NAN),
    ],
    "cvt.rn.f32.s32": [(0x01000001, 0x4B800000), (0x01000003, 0x4B800002), (ALL, 0xBF800000), (TOP, 0xCF000000)],
    "cvt.rzi.s32.f32": [
        (0x3FFFFFFF, 1), (0xBFFFFFFF, ALL), (0x4F000000, 0x7FFFFFFF), (0xCF000001, TOP), (INF, 0x7FFFFFFF), (NAN, 0), (MINUS, 0),
    ],
    "cvt.rzi.u32.f32": [(0xBF800000, 0), (0x4F800000, ALL), (0x4F000000, TOP), (NAN, 0)],
    "cvt.rzi.u32.f64": [(0x41EFFFFFFFFFFFFF, ALL), (0xBFF0000000000000, 0), (0x7FF8000000000000, TOP)],
    "cvt.rn.f16.f32": [  # 1 + 2^-11 lies between two; 65520 is the first that is no number; 2^-25 goes to 0
        (0x3F801000, 0x3C00), (0x3F803000, 0x3C02), (0x477FF000, 0x7C00), (0x477FEFFF, 0x7BFF), (0x33000000, 0), (0x33000001, 1),
        (NEGATIVE_NAN, 0x7FFF), (MINUS, 0x8000),
    ],
    "cvt.f32.f16": [(0x3C00, ONE), (0x0001, 0x33800000), (0x8000, MINUS), (0x7C00, INF), (0xFE01, NAN)],
    "cvt.rn.bf16.f32": [
        (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x7F7FFFFF, 0x7F80), (0x00008000, 0), (0x00018000, 2),
        (ODD_NAN, 0x7FFF), (INF | TOP, 0xFF80),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_an_instruction_gives_what_the_manual_says(name):
    assert compute(name, [row[:-1] for row in TABLE[name]]) == [row[-1] for row in TABLE[name]]


def test_what_is_rounded_is_the_exact_result():
    """Rounding of fma, above all halfway cases: a product that ends in half of the last place, and a sum that decides."""
    draw = random.Random(0)
    rows = []
    for _ in range(500):
        a, b = (1 + draw.getrandbits(27) / 2**26 for _ in range(2))
        c = draw.choice((-1, 1)) * 2.0 ** draw.randint(-110, 2) * draw.choice((1, 1 + draw.getrandbits(52) / 2**52))
        rows.append((a, b, c))
    bits = [tuple(np.float64(one).view(np.uint64).item() for one in row) for row in rows]
    exact = [float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in rows]
    found = np.concatenate([np.array(compute("fma.rn.f64", bits[i : i + 100]), np.uint64) for i in range(0, 500, 100)])
    assert found.view(np.float64).tolist() == exact
    assert (np.array([a * b + c for a, b, c in rows]) != exact).sum() > 10  # two roundings are not enough


@pytest.mark.parametrize(
    "name", ["add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "cvt.rn.f32.f64", "cvt.rn.f32.s32"]
)
def test_float32_is_float64s_rounded(name):
    """For these, rounding the float64 result once more is exact: it has more than twice the digits."""
    draw = np.random.default_rng(0)
    wide = name.endswith(".f64")
    bits = draw.integers(0, 1 << (64 if wide else 32), (200, len(FORMS[name].operands)), np.uint64)
    kind = FORMS[name].operands[0]
    inputs = [
        bits[:, i].astype(f"u{DTYPES[kind].itemsize}").view(DTYPES[kind]).astype(np.float64)
        for i in range(bits.shape[1])
    ]
    operations = {"add": np.add, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}
    with np.errstate(all="ignore"):
        exact = operations.get(name.split(".")[0], lambda x: x)(*inputs).astype(np.float32)
    exact = np.where(np.isnan(exact), np.uint32(NAN), exact.view(np.uint32))
    assert compute(name, bits.tolist()) == exact.tolist()


def test_every_form_that_is_rare_has_a_row():
    """Forms that compute; forms that differ only by a type, or by the sense of a comparison, count as one."""
    common = (
        "setp.",
        "selp.",
        "mov.",
        "cvt.",
        "cvta.",
        "add.",
        "sub.",
        "mul.",
        "min.",
        "max.",
        "neg.",
        "shl.",
        "shr.",
        "and.",
        "or.",
        "xor.",
        "not.",
    )
    assert [name for name in FORMS if not name.startswith(common) and name not in TABLE] == []


# Threads

LANE = "mul.wide.u32 %rd9, %r0, 4;\nadd.s64 %rd9, %rd9, %rd0;\n"


@pytest.mark.parametrize(
    ("mode", "by", "control", "sources"),
    [
        ("down", 1, 31, [*range(1, 32), 31]),
        ("up", 2, 0, [0, 1, *range(30)]),
        ("bfly", 16, 31, [i ^ 16 for i in range(32)]),
        ("idx", 5, 31, [5] * 32),
        ("down", 4, 0x181F, [i + 4 if i % 8 < 4 else i for i in range(32)]),  # segments of 8 lanes
    ],
)
def test_a_shuffle_gives_another_lanes_value(mode, by, control, sources):
    out = np.zeros(32, np.uint32)
    run(f"{LANE}shfl.sync.{mode}.b32 %r5|%p1, %r0, {by}, {control}, -1;\nst.global.u32 [%rd9], %r5;", out)
    assert out.tolist() == sources


def test_threads_that_part_meet_again():
    """Odd threads take a loop, each as often as its number says, before all of them shuffle."""
    out = np.zeros(32, np.uint32)
    body = f"""{LANE}
        mov.u32 %r5, 0;
        and.b32 %r6, %r0, 1;
        setp.eq.s32 %p1, %r6, 0;
        @%p1 bra $meet;
        mov.u32 %r7, 0;
$again:
        add.s32 %r5, %r5, 3;
        add.s32 %r7, %r7, 1;
        setp.lt.u32 %p2, %r7, %r0;
        @%p2 bra $again;
$meet:
        shfl.sync.bfly.b32 %r5|%p3, %r5, 1, 31, -1;
        st.global.u32 [%rd9], %r5;"""
    run(body, out)
    assert out.tolist() == [3 * (i ^ 1) * ((i ^ 1) % 2) for i in range(32)]


@pytest.mark.parametrize("load", ["ld.shared", "ld.volatile.shared"])
def test_a_barrier_shows_what_other_threads_wrote_and_its_or(load):
    shared = ".shared .align 4 .b8 held[256];"
    body = f"""{LANE}
        mov.u64 %rd5, held;
        mul.wide.u32 %rd6, %r0, 4;
        add.s64 %rd5, %rd5, %rd6;
        st.shared.u32 [%rd5], %r0;
        setp.eq.s32 %p1, %r0, 40;
        bar.red.or.pred %p2, 0, %p1;
        mov.u32 %r7, 63;
        sub.s32 %r7, %r7, %r0;
        mul.wide.u32 %rd6, %r7, 4;
        mov.u64 %rd5, held;
        add.s64 %rd5, %rd5, %rd6;
        {load}.u32 %r8, [%rd5];
        selp.b32 %r8, %r8, 0, %p2;
        st.global.u32 [%rd9], %r8;"""
    out = np.zeros(64, np.uint32)
    run(body, out, threads=64, shared=shared)
    assert out.tolist() == list(range(63, -1, -1))


def test_an_atomic_minimum_takes_all_threads_of_all_blocks():
    out = np.array([5], np.int64)
    run("cvt.s64.s32 %rd5, %r0;\nsub.s64 %rd5, %rd5, 7;\natom.global.min.s64 %rd6, [%rd0], %rd5;", out, grid=3)
    assert out.tolist() == [-7]


def test_vectors_and_narrow_words_lie_in_memory_as_their_parts():
    x, out = np.arange(4, dtype=np.uint32) + 0xABCD0000, np.zeros(32, np.uint8)
    body = """ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0];
        st.global.v4.u32 [%rd1], {%r4, %r3, %r2, %r1};
        ld.global.u8 %rs1, [%rd0+3];
        st.global.u8 [%rd1+16], %rs1;
        ld.global.u16 %r5, [%rd0+2];
        st.global.u32 [%rd1+20], %r5;
        mov.b64 %rd5, {%r1, %r2};
        mov.b64 {%r6, %r7}, %rd5;
        st.global.u32 [%rd1+24], %r7;"""
    run(body, x, out, threads=1)
    assert out[:16].view(np.uint32).tolist() == x[::-1].tolist()
    assert out[16] == 0xAB and out[20:28].view(np.uint32).tolist() == [0xABCD, 0xABCD0001]


# What is not let through

STORE = "st.global.u32 [%rd9], %r0;"
SHARED = ".shared .align 4 .b8 held[128];"
OWN = "mov.u64 %rd5, held;\nmul.wide.u32 %rd6, %r0, 4;\nadd.s64 %rd5, %rd5, %rd6;\n"
BROKEN = {
    "an approximate instruction": ("\t.loc 1 7 3\nsqrt.approx.f32 %f1, %f2;", "k.cu:7: sqrt.approx.f32"),
    "a sum that may be contracted": ("add.f32 %f1, %f2, %f3;", "an unknown instruction"),
    "flushed denormals": ("add.rn.ftz.f32 %f1, %f2, %f3;", "an unknown instruction"),
    "a guarded instruction": ("setp.eq.s32 %p1, %r0, 0;\n@%p1 mov.u32 %r1, 0;", "only branches have guards"),
    "beyond the end": (f"{LANE}add.s64 %rd9, %rd9, 4;\n\t.loc 1 9 1\n{STORE}", "outside of all memory: k.cu:9: st.global"),
    "before the beginning": (f"{LANE}ld.global.u32 %r1, [%rd9+-4];", "outside of all memory"),
    "a misaligned access": ("ld.global.v2.u32 {%r1, %r2}, [%rd0+4];", "a misaligned access of 8 bytes"),
    "memory that nobody wrote": ("ld.global.u32 %r1, [%rd0+256];", "memory that nobody has written is read"),
    "one word for several threads": ("st.global.u32 [%rd0], %r0;", "a race: threads"),
    "a neighbour's word": (f"{LANE}{STORE}\nld.global.u32 %r1, [%rd0];", "a race: threads"),
    "a neighbour's word after a shuffle": (
        f"{LANE}{STORE}\nshfl.sync.down.b32 %r1|%p2, %r0, 1, 31, -1;\nld.global.u32 %r1, [%rd0];", "a race: threads",
    ),
    "a barrier that one thread misses": (
        "setp.eq.s32 %p1, %r0, 7;\n@%p1 bra $end;\nbar.sync 0;\n$end:", "not all threads of a block reach"),
    "a shuffle that one lane misses": (
        "setp.eq.s32 %p1, %r0, 7;\n@%p1 bra $end;\nshfl.sync.down.b32 %r1|%p2, %r0, 1, 31, -1;\n$end:", "not all lanes of its mask",
    ),
    "shared memory that nobody wrote": (f"{OWN}ld.shared.u32 %r1, [%rd5];", "shared memory that nobody has written"),
    "no barrier before a neighbour reads": (
        f"{OWN}st.shared.u32 [%rd5], %r0;\nld.shared.u32 %r1, [held+4];", "a race: shared memory is read",
    ),
    "no barrier before a neighbour writes": (
        f"{OWN}st.shared.u32 [%rd5], %r0;\nbar.sync 0;\nld.shared.u32 %r1, [held+4];\nst.shared.u32 [%rd5], %r0;",
        "a race: shared memory is written",
    ),
    "beyond shared memory": (f"{OWN}st.shared.u32 [%rd5+4], %r0;", "shared memory, or one beyond"),
    "beyond the parameters": ("ld.param.u64 %rd1, [p0+8];", "the parameters, or one beyond"),
    "a register that nothing wrote": ("add.s32 %r1, %r2, 1;", "a register is read that nothing has written"),
    "a loop without end": ("$again:\nadd.s32 %r0, %r0, 1;\nbra.uni $again;", "does not end"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_its_line(name):
    body, said = BROKEN[name]
    out = np.zeros(65, np.uint64)
    out[32:] = 0xD1B54A32D192ED03
    array = out[:34].view(np.uint32) if "wrote" in name else out[:16].view(np.uint32)
    with pytest.raises(PtxError, match=said.replace("[", r"\[")):
        run(body, array, shared=SHARED)


def test_what_all_lanes_have_read_before_a_shuffle_may_be_written_after_it():
    out = np.ones(1, np.uint64).view(np.uint32)
    shuffle = "shfl.sync.bfly.b32 %r2|%p1, %r1, 1, 31, -1;\n"
    one_writes = "setp.ne.s32 %p2, %r0, 0;\n@%p2 bra $end;\nst.global.u32 [%rd0], %r0;\n$end:"
    run(f"ld.global.u32 %r1, [%rd0];\n{shuffle}{one_writes}", out)
    assert out.tolist() == [0, 0]
    with pytest.raises(PtxError, match="a race"):
        run(f"ld.global.u32 %r1, [%rd0];\n{one_writes}", out)


def test_the_same_number_from_several_blocks_is_no_race():
    out = np.zeros(2, np.uint32)
    run("st.global.u32 [%rd0], 1;", out, grid=3, threads=1)
    assert out.tolist() == [1, 0]
