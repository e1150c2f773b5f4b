"""Every kernel of csrc/cuda, run from PTX by the project's own host code: bit for bit what the emulation computes.

Each launch compares the two by itself (launching.py); NaNs are equal. What the results ought to be is for the tests of kernels and
optimizers, which run on PTX too: ``make test-ptx``.
"""

import itertools

import pytest
import torch

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import moments
from ptx import launching

pytestmark = pytest.mark.ptx

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: A tail, whole threads, a block that is not full, one that is, and several of two chunks.
SIZES = (0, 1, 7, 8, 1023, 4096, 65_536 + 4_099)
FEW, MANY = (
    (0, 5, 1030, 3),
    (3,) * 110,
)  # of which one launch carries all, in the arguments that lists of that length get
REST, PACKED = "rest", "packed"
#: Gradients, parameters, states, lower.
MIXES = [
    (F32, F32, F32, None), (BF16, F32, F32, BF16), (F16, F32, F32, F16), (F32, BF16, BF16, None), (F16, F16, F16, None),
    (BF16, F32, F32, None),
]  # fmt: skip
# Of rules that take them: weights with rests, moments of 8 bits, and rounding by numbers drawn.
SPECIAL_MIXES = [
    (BF16, BF16, F32, REST), (F32, F16, F32, REST), (F16, F16, BF16, REST), (F16, F16, F32, REST),
    (BF16, BF16, PACKED, REST), (BF16, BF16, PACKED, BF16), (F32, F32, PACKED, None), (F16, F16, PACKED, REST),
]  # fmt: skip
ADAM = dict(betas=(0.9, 0.99), eps=1e-6, step=3)
RULES = {
    "sgd": (kernels.multi_tensor_sgd, 0, True, {}),
    "sgd with momentum": (kernels.multi_tensor_sgd, 1, True, dict(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "adam": (kernels.multi_tensor_adam, 2, True, dict(ADAM, decoupled=True, weight_decay=0.1)),
    "lamb": (multi_tensor_steps.multi_tensor_lamb, 2, False, dict(ADAM, decoupled=True, weight_decay=0.1)),
    "adagrad": (multi_tensor_steps.multi_tensor_adagrad, 1, False, dict(eps=1e-6)),
    "novograd": (multi_tensor_steps.multi_tensor_novograd, 1, False, ADAM),
}
STEPS = [
    (rule, mix)
    for rule, (_, _, takes_rests, _) in RULES.items()
    for mix in MIXES + SPECIAL_MIXES * takes_rests
    if not (rule == "lamb" and mix[2] is not F32)
]


def randoms(sizes, dtype, begin=0):
    """Numbers of many magnitudes, some of them 0, subnormal or huge; ``begin`` elements into their memory."""
    made = [torch.randn(size + begin) * 2.0 ** torch.randint(-30, 12, (size + begin,)) for size in sizes]
    for one in made:
        one[5::97] = torch.tensor([0.0, -0.0, 1e-42, 3e38])[torch.arange(one[5::97].numel()) % 4]
    return [one.to(dtype)[begin:] for one in made]


def take_step(rule, mix, sizes, begin=0, **changes):
    function, states, _, settings = RULES[rule]
    grad, param, state, low = mix
    grads, params = randoms(sizes, grad, begin), randoms(sizes, param, begin)
    if state is PACKED:  # in which the sign of a NaN is a separate bit, on which processors differ
        grads, params = ([t.clamp(-100, 100) for t in tensors] for tensors in (grads, params))
    columns = []
    for k in range(states):
        values = [t.abs() if k else t for t in randoms(sizes, F32)]
        if state is PACKED:
            columns.append([moments.pack(t, k == 0) for t in values])
        else:
            columns.append([t.to(state) for t in values])
    lower = None
    if low is REST:
        lower = [torch.randint(-(2**14), 2**14, t.shape).to(torch.int16) for t in params]
    elif low is not None:
        lower = [torch.empty_like(t, dtype=low) for t in params]
    if rule == "novograd":
        columns.append(torch.rand(len(sizes)))
    elif not columns:
        columns = [None]
    function(grads, params, *columns, lower, **{"lr": 0.1, **settings, **changes})
    return params


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(("rule", "mix"), STEPS, ids=str)
def test_a_step(rule, mix, sizes):
    drawn = {}
    if mix[3] not in (None, F16) and mix[2] in (PACKED, BF16) and RULES[rule][2]:
        drawn = dict(positions=torch.arange(len(sizes), dtype=F32), seed=1 << 40 | 5, round_params=True)
    before = launching.attached().launches()
    take_step(rule, mix, sizes, **drawn)
    assert launching.attached().launches() > before


@pytest.mark.parametrize("begin", [0, 1, 8])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], SPECIAL_MIXES[0], SPECIAL_MIXES[3]], ids=str)
def test_a_step_of_all_sizes_and_from_anywhere(mix, begin):
    take_step("adam", mix, SIZES, begin, inv_scale=torch.tensor([0.5]), clip=torch.tensor([0.25]))


@pytest.mark.parametrize("mix", [MIXES[0], *SPECIAL_MIXES[:4]], ids=str)
def test_an_overflow_writes_nothing(mix):
    seen = {}
    launching.attached().heard = lambda name, log: seen.setdefault(name, [one.kind for one in log])
    try:
        for rule in ("sgd with momentum", "adam") if mix[3] is not None else RULES:
            take_step(rule, mix, FEW, found_inf=torch.ones(1))
    finally:
        launching.attached().heard = None
    kinds = {kind for name, kinds in seen.items() if "StepKernel" in name for kind in kinds}
    assert kinds == {"read"}  # (NovoGrad takes norms besides, of gradients that its step then ignores)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize(("source", "target"), [*itertools.product((F32, F16, BF16), repeat=2)], ids=str)
def test_sums_products_and_norms(source, target, begin):
    x, y = ([t.nan_to_num() for t in group] for group in (randoms(SIZES, source, begin), randoms(SIZES, target)))
    x[-1][[70, 66_000]] = torch.tensor([float("inf"), float("nan")], dtype=source)
    out = [torch.empty(t.numel() + 3 - begin, dtype=target)[3 - begin :] for t in y]  # aligned where x is not
    found_inf, bad = torch.zeros(1), torch.full((1,), kernels.NO_BAD)
    kernels.multi_tensor_scale(x, out, 0.3, found_inf=found_inf, first_bad=bad)
    assert found_inf.item() == 1 and bad.item() == len(SIZES) - 1
    torch.testing.assert_close(out[-2], (x[-2].float() * 0.3).to(target), rtol=0, atol=0)
    kernels.multi_tensor_axpby(x, y, out, 2.0, -0.5)
    kernels.multi_tensor_unscale_l2norm(x, out, inv_scale=0.25, per_tensor=True)
    norm, _ = kernels.multi_tensor_l2norm(y, per_tensor=True)
    wide = torch.cat([t.double() for t in y]).norm()  # which may be beyond float32
    torch.testing.assert_close(norm, wide.float()[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_weights_and_rests_of_all_bits(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16 | torch.randint(
        0, 2**16, (2**16,), dtype=torch.int32
    )
    values = values.view(F32)
    weights, rests, out = (
        torch.empty_like(values, dtype=dtype),
        torch.empty(2**16, dtype=torch.int16),
        torch.empty_like(values),
    )
    kernels.multi_tensor_split([values], [weights], [rests])
    kernels.multi_tensor_join([weights], [rests], [out])
    smallest, largest = (
        (2.0**-14, 65504.0)
        if dtype is F16
        else (2.0**-126, torch.tensor(0x7F7F7FFF, dtype=torch.int32).view(F32).item())
    )
    inside = (values.abs() >= smallest) & (values.abs() <= largest)
    assert torch.equal(values[inside], out[inside]) and torch.equal(values.isnan(), out.isnan())


def test_lists_that_take_two_launches():
    x = randoms((1, 2, 3) * 330, F32)
    before = launching.attached().launches()
    out = [torch.empty_like(t) for t in x]
    kernels.multi_tensor_scale(x, out, 0.5)
    assert launching.attached().launches() == before + 2
    for t, result in zip(x, out, strict=True):
        assert torch.equal(t * 0.5, result)


def test_lists_that_are_long_otherwise():
    x = randoms(MANY, F32)
    out = [torch.empty_like(t) for t in x]
    kernels.multi_tensor_axpby(x, x, out, 1.0, 1.0)
    weights, rests = (
        [torch.empty_like(t, dtype=BF16) for t in x],
        [torch.empty_like(t, dtype=torch.int16) for t in x],
    )
    kernels.multi_tensor_split(x, weights, rests)
    kernels.multi_tensor_join(weights, rests, out)
    assert all(map(torch.equal, x, out))
    for _ in range(2):  # the last of its kernels is in two files
        kernels.multi_tensor_l2norm((x * 3)[:300], per_tensor=True)
    kernels.multi_tensor_l2norm(x[:1], per_tensor=True)
    take_step("lamb", MIXES[0], (1,) * 270)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_loss_scale(found_inf):
    state = torch.zeros(7, dtype=torch.int32)
    state.view(F32)[0] = 1024.0
    kernels.update_scale(state, torch.tensor([found_inf]), growth_interval=1)
    assert state.view(F32)[0] == (512.0 if found_inf else 2048.0)


def test_the_architectures_differ_in_names_alone():
    for path in sorted(launching.FOLDER.glob("*.ptx")):
        other = launching.FOLDER.with_name("sm_90") / path.name
        lines = [one.read_text().splitlines() for one in (path, other)]
        assert len(lines[0]) == len(lines[1])
        different = [pair for pair in zip(*lines) if pair[0] != pair[1]]
        assert [one.replace("sm_80", "sm_90").replace("_SM_800_", "_SM_900_") for one, _ in different] == [
            b for _, b in different
        ]


def test_every_entry_was_launched():
    """The tests before this one, in the same process, launch all of them; so it is the last of this file."""
    assert launching.attached().never_launched() == []
