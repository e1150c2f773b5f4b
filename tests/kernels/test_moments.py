"""Moments in 8 bits and random numbers for rounding: the format by arithmetic on paper, the kernels by the format."""

import copy
import itertools
import math

import pytest
import torch
from helpers import checksum

from ampkit import kernels
from ampkit.kernels import moments
from ampkit.kernels.split import join, split

F32, BF16 = torch.float32, torch.bfloat16
SIZES = (1, 3, 4, 8, 15, 255, 256, 257, 1023, 1025, 5000)
SIGNED = pytest.mark.parametrize("is_signed", [True, False], ids=["first", "second"])


def repacked(values, is_signed, **drawn):
    return moments.unpack(moments.pack(values, is_signed, **drawn), values.shape, is_signed)


def draws(numel, seed=1, position=2, step=3, stream=0, device="cpu"):
    return moments.draw(numel, seed=seed, position=position, step=step, stream=stream, device=device)


def spread(size, is_signed, octaves):
    """Values spread over so many octaves, with the largest in every block."""
    values = torch.rand(size).add(1.0) * 2.0 ** -(torch.rand(size) * octaves).floor()
    values[:: moments.BLOCK] = 2.0
    return values * torch.randn(size).sign() if is_signed else values


def test_bytes_of_a_packed_moment():
    # Codes, filled up to four; four bytes for every block of 256 that has begun.
    assert [moments.packed_size(n) for n in (0, 1, 4, 5, 256, 257, 1024)] == [0, 8, 8, 12, 260, 268, 1040]


@SIGNED
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-30, 1e30])
@pytest.mark.parametrize("size", SIZES)
def test_to_nearest_a_value_is_off_by_a_sixteenth_of_itself(is_signed, scale, size):
    # Below 2^-126 float32 has fewer digits itself.
    values = spread(size, is_signed, 15 if is_signed else 20 if scale == 1e-30 else 31) * scale
    found = repacked(values, is_signed)
    error = (found.double() - values.double()).abs()
    assert (error <= values.double().abs() * 2**-4).all() and (found.sign() == values.sign()).all()
    if size > 1000:
        assert (error > values.double().abs() * 2**-5).any(), "eight places to an octave are as far apart as that"


@SIGNED
def test_by_numbers_drawn_a_value_becomes_a_neighbour_and_the_mean_is_right(is_signed):
    # 1 + 2^-3 k are on the grid between 1 and 2; 1.05 lies two fifths of the way.
    size = 2**16
    values = torch.full((size,), 1.05)
    values[:: moments.BLOCK] = 2.0
    results = repacked(values, is_signed, drawn=draws(size))[values != 2.0]
    assert results.unique().tolist() == [1.0, 1.125]
    share = (results == 1.125).double().mean().item()
    # Five standard deviations of the mean of as many coins.
    assert abs(share - 0.4) < 5 * math.sqrt(0.4 * 0.6 / results.numel())


def test_bfloat16_by_numbers_drawn_is_right_in_the_mean():
    size = 2**18
    for value, lower, upper in ((1.001, 1.0, 1.0078125), (-3e-5, None, None), (1e-40, None, None), (3.0, 3.0, 3.0)):
        values = torch.full((size,), value)
        results = moments.to_bfloat16(values, draws(size)).double()
        neighbours = results.unique().tolist()
        assert len(neighbours) == (1 if lower == upper and lower is not None else 2)
        if lower is not None:
            assert neighbours == sorted({lower, upper})
        gap = neighbours[-1] - neighbours[0]
        assert neighbours[0] <= values[0].double() <= neighbours[-1]
        assert gap <= max(abs(values[0].item()) * 2**-7, 2.0**-133)
        assert (results.mean() - values[0].double()).abs() <= 5 * gap / 2 / math.sqrt(size)


def test_bfloat16_by_numbers_drawn_keeps_what_is_not_finite_and_makes_nothing_so():
    largest = torch.finfo(F32).max
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), largest, -largest, 0.0, -0.0])
    found = moments.to_bfloat16(values, torch.full((7,), 0xFFFFFFFF))
    finite = torch.finfo(BF16).max
    assert found[0].isnan() and found[1:].tolist() == [float("inf"), float("-inf"), finite, -finite, 0.0, 0.0]
    assert found.signbit().tolist()[1:] == values.signbit().tolist()[1:]


@SIGNED
@pytest.mark.parametrize("size", SIZES)
def test_packing_what_was_unpacked_gives_the_same_bits(is_signed, size):
    for scale in (1.0, 1e-6, 1e-30, 1e-42, 1e38):
        values = spread(size, is_signed, 40) * scale
        once = moments.pack(values, is_signed, draws(size))
        again = moments.pack(moments.unpack(once, values.shape, is_signed), is_signed)
        assert torch.equal(once, again)


@SIGNED
def test_a_large_element_costs_its_own_block_alone(is_signed):
    values = torch.full((512,), 1e-6)
    values[7] = 1e6
    found = repacked(values, is_signed)
    assert (found[256:] - 1e-6).abs().max() <= 1e-6 / 16 and (found[7] - 1e6).abs() <= 1e6 / 16
    beside = torch.cat([found[:7], found[8:256]])
    if is_signed:
        assert beside.eq(0).all()
    else:  # Never 0, and never lower than it was.
        assert (beside >= 1e-6).all() and (beside <= 1e6 * 2**-31).all()


def test_a_second_moment_that_is_not_zero_is_never_stored_as_zero():
    values = torch.logspace(-45, 38, 2560)[torch.randperm(2560)]
    values[::5] = 0
    found = repacked(values, False, drawn=draws(2560))
    assert torch.equal(found == 0, values == 0)


@SIGNED
def test_what_is_not_finite_stays_so_and_finite_values_stay_finite(is_signed):
    values = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    found = repacked(values, is_signed)
    assert found[1].isnan() and found[2] == float("inf") and found[0].isfinite() and found[3] == 0
    largest = torch.full((4,), torch.finfo(F32).max)
    assert repacked(largest, is_signed, drawn=torch.full((4,), 0xFFFFFFFF)).isfinite().all()


#: Counter, key and result, from the known answers that the authors' Random123 is tested with.
KNOWN = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = moments.philox([torch.tensor([word]) for word in counter], *key)
    assert [word.item() for word in words] == expected


def test_numbers_drawn_hang_on_seed_step_position_list_and_element():
    first = draws(64)
    assert first.min() >= 0 and 2**16 < first.max() < 2**32 and len(first.unique()) > 50
    assert torch.equal(first, draws(100)[:64])
    assert torch.equal(first, draws(64, step=torch.tensor([3.0]), position=torch.tensor(2.0)))
    for change in (dict(seed=2), dict(seed=1 + 2**32), dict(position=3), dict(step=4), dict(stream=1)):
        assert not torch.equal(first, draws(64, **change)), change


def test_four_numbers_of_one_word_are_as_good_as_four_words():
    """Each is as likely to be large as any, whatever the others are: judged by the 8 bits that decide in rounding."""
    size = 2**18
    deciding = (draws(size) >> 12 & 0xFF).view(-1, 4).double() / 255 - 0.5
    # The mean and the variance of whole numbers from 0 to 255, in units of 255; five standard deviations of their means.
    variance = (256**2 - 1) / 12 / 255**2
    assert (deciding.mean(0)).abs().max() < 5 * math.sqrt(variance / (size / 4))
    together = deciding.T @ deciding / (size / 4)
    assert (together - variance * torch.eye(4)).abs().max() < 5 * variance / math.sqrt(size / 4)


def test_a_second_moment_decays_at_its_rate_however_slow(ops, device):
    """A step is a hundredth of a place and less: drawn from too few bits it would be lost, or become a multiple."""
    start, count = 1.3, 2**16
    for beta in (0.999, 0.9999):
        packed = [[moments.pack(torch.full((count,), start, device=device), i == 0)] for i in range(2)]
        before = moments.unpack(packed[1][0], torch.Size((count,)), False).double().mean()
        positions, zeros = torch.zeros(1, device=device), [torch.zeros(count, device=device) for _ in range(2)]
        steps = 10
        for step in range(steps):
            settings = ADAM | dict(betas=(0.9, beta), step=step + 1.0, lr=0.0)
            kernels.multi_tensor_adam([zeros[0]], [zeros[1]], *packed, positions=positions, seed=3, **settings)
        after = moments.unpack(packed[1][0], torch.Size((count,)), False).double().mean()
        # A step moves an element by an eighth of itself at most; elements and steps are independent.
        lost, expected = 1 - (after / before).item(), 1 - beta**steps
        assert abs(lost - expected) < 5 * math.sqrt(expected / 8 / count) + 1e-7, (beta, lost, expected)


ADAM = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, step=3.0, decoupled=True, weight_decay=0.1)
SGD = dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, step=3.0)
LONG = (1, 3, 0, 17, 255, 256, 257, 1025, 65_536 + 700)


class Step:
    """A step with packed moments, and its expected result: the step with float32 moments, packed."""

    def __init__(self, op, shapes, params=F32, lower=None, device="cpu"):
        self.op, self.states = op, 2 if op == "adam" else 1
        self.grads = [torch.randn(shape, device=device) for shape in shapes]
        self.params = [torch.randn(shape, device=device).to(params) for shape in shapes]
        self.lower = None if lower is None else [torch.zeros(shape, dtype=lower, device=device) for shape in shapes]
        self.packed = [
            [moments.pack(g * 0.1 if i == 0 else g * g * 0.01, i == 0) for g in self.grads] for i in range(self.states)
        ]
        self.positions = torch.arange(len(shapes), dtype=F32, device=device) * 7 + 5

    def run(self, **how):
        states, settings = (self.packed, ADAM) if self.op == "adam" else (self.packed, SGD)
        function = getattr(kernels, f"multi_tensor_{self.op}")
        function(self.grads, self.params, *states, self.lower, **settings, **how)

    def expected(self, drawn_from=None, round_params=False, **how):
        """The values that `run` has to write; ``drawn_from`` is the seed of the random numbers."""

        def number(stream, i, x):
            if drawn_from is not None:
                return draws(x.numel(), drawn_from, self.positions[i], 3.0, stream, device=x.device)

        wide = copy.copy(self)
        wide.params = [p.to(F32, copy=True) for p in self.params]
        wide.lower = None if self.lower is None else [low.clone() for low in self.lower]
        wide.packed = [
            [moments.unpack(x, g.shape, i == 0) for x, g in zip(column, self.grads)]
            for i, column in enumerate(self.packed)
        ]
        wide.run(**how)
        packed = [
            [moments.pack(x, i == 0, number(moments.MOMENTS, k, x)) for k, x in enumerate(column)]
            for i, column in enumerate(wide.packed)
        ]
        params = [
            moments.to_bfloat16(x, number(moments.PARAM, k, x)) if round_params and p.dtype is BF16 else x.to(p.dtype)
            for k, (x, p) in enumerate(zip(wide.params, self.params))
        ]
        return [*params, *itertools.chain(*packed), *(wide.lower or ())]

    def written(self):
        return [*self.params, *itertools.chain(*self.packed), *(self.lower or ())]


def assert_equal_bits(found, expected):
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype is other.dtype and torch.equal(one, other), i


@pytest.mark.parametrize("op", ["adam", "sgd"])
@pytest.mark.parametrize("drawn", [False, True], ids=["nearest", "drawn"])
@pytest.mark.parametrize("lower", [None, BF16], ids=["alone", "masters"])
def test_a_step_packs_what_it_would_write_in_float32(ops, device, op, drawn, lower):
    step = Step(op, [(n,) for n in LONG], lower=lower, device=device)
    expected = step.expected(drawn_from=2**40 + 9 if drawn else None)
    step.run(**(dict(positions=step.positions, seed=2**40 + 9) if drawn else {}))
    assert_equal_bits(step.written(), expected)


@pytest.mark.parametrize("op", ["adam", "sgd"])
@pytest.mark.parametrize("drawn", [False, True], ids=["nearest", "drawn"])
def test_a_step_over_values_of_all_classes_packs_what_it_would_write_in_float32(ops, device, op, drawn):
    """NaN, infinities, the largest float32, subnormal numbers and zeros in some blocks; and a factor that is infinite."""
    classes = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-39, -1e-42, 1e-45, 0.0, -0.0]
    )
    for factor in (1.0, float("inf")):
        step = Step(op, [(n,) for n in (300, 2048 + 9)], device=device)
        for gradient in step.grads:
            places = torch.arange(0, min(len(gradient), 1500), 37)
            gradient[places] = classes.to(device)[places % len(classes)]
        # A block of tiny second moments beside zeros, and one of zeros alone.
        for i, column in enumerate(step.packed):
            values = torch.zeros(2048 + 9, device=device)
            values[256:512:3], values[512:] = (1e-40, -1e-41)[i == 0], (step.grads[1][512:] * 0.1).square()
            column[1] = moments.pack(values, i == 0)
        step.grads[1][:512] = 0
        inv_scale = torch.full((1,), factor, device=device)
        expected = step.expected(drawn_from=5 if drawn else None, inv_scale=inv_scale)
        step.run(inv_scale=inv_scale, **(dict(positions=step.positions, seed=5) if drawn else {}))
        for i, (a, b) in enumerate(zip(step.written(), expected, strict=True)):
            if a.dtype is torch.uint8:  # bit for bit, but for the sign of a NaN, which means nothing
                size = step.params[i % 2].shape
                assert torch.equal(a[-4:], b[-4:])  # the last block's scale, though lanes lie beyond its end
                a, b = (moments.unpack(x, size, i < 4) for x in (a, b))
            assert a.isnan().any() or factor == 1.0
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_parameters_in_bfloat16_are_rounded_by_numbers_drawn(ops, device, op):
    step = Step(op, [(n,) for n in LONG], params=BF16, device=device)
    expected = step.expected(drawn_from=4, round_params=True)
    step.run(positions=step.positions, seed=4, round_params=True)
    assert_equal_bits(step.written(), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_weights_with_rests_and_packed_moments_in_one_step(ops, device, op, dtype):
    """Equal to float32 parameters with packed moments, split afterwards; a rest is never rounded at random."""
    step = Step(op, [(n,) for n in LONG], device=device)
    halves = [split(p, dtype) for p in step.params]
    step.params = [join(weight, rest) for weight, rest in halves]
    params, *packed = (
        step.expected(drawn_from=4)[i : i + len(LONG)] for i in range(0, len(LONG) * (1 + step.states), len(LONG))
    )
    step.params, step.lower = ([half[i] for half in halves] for i in range(2))
    step.run(positions=step.positions, seed=4, round_params=True)
    expected = [split(p, dtype) for p in params]
    assert_equal_bits(step.params, [weight for weight, _ in expected])
    assert_equal_bits(step.lower, [rest for _, rest in expected])
    assert_equal_bits(itertools.chain(*step.packed), itertools.chain(*packed))


def test_moments_in_bfloat16_are_rounded_by_numbers_drawn(ops, device):
    step = Step("adam", [(n,) for n in LONG], device=device)
    wide = [[moments.unpack(x, g.shape, i == 0) for x, g in zip(c, step.grads)] for i, c in enumerate(step.packed)]
    narrow = [[x.to(BF16) for x in column] for column in wide]
    wide, params = [[x.float() for x in column] for column in narrow], [p.clone() for p in step.params]
    kernels.multi_tensor_adam(step.grads, step.params, *narrow, positions=step.positions, seed=6, **ADAM)
    kernels.multi_tensor_adam(step.grads, params, *wide, **ADAM)
    assert_equal_bits(step.params, params)
    for i, column in enumerate(wide):
        numbers = [draws(x.numel(), 6, step.positions[k], 3.0, device=device) for k, x in enumerate(column)]
        assert_equal_bits(narrow[i], [moments.to_bfloat16(x, drawn) for x, drawn in zip(column, numbers)])


def test_sgd_without_momentum_rounds_parameters_by_numbers_drawn(ops, device):
    params, grads = [torch.ones(4096, dtype=BF16, device=device)], [torch.ones(4096, device=device)]
    positions = torch.zeros(1, device=device)
    kernels.multi_tensor_sgd(grads, params, None, lr=2**-10, positions=positions, seed=0, step=1, round_params=True)
    # The neighbour of 1 is 2^-8 below it: a quarter of the elements get there.
    assert params[0].unique().tolist() == [1 - 2**-8, 1.0]
    share = (params[0] < 1).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4096)


@pytest.mark.parametrize("op", ["adam", "sgd"])
@pytest.mark.parametrize("value", [1.0, -1.0, 1e-45, math.nan])
def test_a_skipped_step_leaves_every_bit(ops, device, value, op):
    step = Step(op, [(300,), (5,)], lower=BF16, device=device)
    step.grads[0][7] = float("nan")
    before = [t.clone() for t in step.written()]
    step.run(found_inf=torch.tensor([value], device=device), positions=step.positions, seed=1)
    assert_equal_bits(step.written(), before)


def test_tensors_that_are_not_contiguous_have_moments_in_the_order_of_their_elements(ops, device):
    step = Step("adam", [(2, 3, 5, 7), (4, 40, 3, 3), (6, 50)], lower=BF16, device=device)
    plain, last = copy.deepcopy(step), torch.channels_last
    for column in (step.grads, step.params, step.lower):
        column[0] = column[0].clone(memory_format=last)
    step.params[1] = step.params[1].clone(memory_format=last)
    step.grads[2] = step.grads[2].mT.contiguous().mT
    for one in (step, plain):
        one.run(positions=one.positions, seed=3)
    assert_equal_bits(step.written(), plain.written())


def test_moments_of_another_size_are_refused_with_the_right_one(ops, device):
    step = Step("adam", [(300,)], device=device)
    step.packed[1][0] = step.packed[1][0][:-4]
    with pytest.raises(RuntimeError, match=r"exp_avg_sqs\[0\].*shape \[304\].*300 elements.*shape \[308\]"):
        step.run()
    step.packed[1] = [torch.zeros(300, dtype=torch.uint8, device=device)]
    with pytest.raises(RuntimeError, match=r"shape \[300\].*shape \[308\]"):
        step.run()


def fingerprint():
    """A number that depends on every bit that steps with packed moments write; see test_step_kernels.py."""
    torch.manual_seed(0)
    written = []
    for op in ("adam", "sgd"):
        step = Step(op, [(n,) for n in SIZES], params=BF16)
        step.run(positions=step.positions, seed=8, round_params=True)
        step.run()
        written += step.written()
    return checksum(written)
