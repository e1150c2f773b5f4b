"""amp_C, apex_C and multi_tensor_applier: argument lists of Apex, results of float64 arithmetic, the flag to the letter."""

import itertools

import pytest
import torch
from ampkit.apex.multi_tensor_apply import multi_tensor_applier
from ampkit.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply
from torch import nn

from ampkit.apex import amp_C, apex_C

pytestmark = pytest.mark.switch

HALF, FULL = torch.float16, torch.float32
SIZES = (555, 2048, 111, 33, 1)
POSITIONS = [(i, where) for i in range(2) for where in (0, -1)]


def zeros(device):
    return torch.zeros(1, dtype=torch.int, device=device)


def random(shapes, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def assert_close(found, wanted, rtol):
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double().cpu(), theirs.double().cpu(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("source, target", list(itertools.product((HALF, FULL, torch.bfloat16), repeat=2)))
def test_scale_writes_and_leaves_the_flag(source, target, device):
    inputs = random(SIZES, source, device)
    outputs = [torch.empty_like(x, dtype=target) for x in inputs]
    flag = zeros(device)
    assert multi_tensor_applier(amp_C.multi_tensor_scale, flag, [inputs, outputs], 0.25) is None
    assert flag.item() == 0
    for x, y in zip(inputs, outputs):
        assert torch.equal(y, (x.float() * 0.25).to(target))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("index, where", POSITIONS)
def test_scale_sets_the_flag_for_any_element_and_still_writes(value, index, where, device):
    inputs = [torch.full((size,), 2.0, device=device) for size in (2048, 33)]
    inputs[index][where] = value
    outputs = [torch.zeros_like(x) for x in inputs]
    flag = zeros(device)
    amp_C.multi_tensor_scale(65536, flag, [inputs, outputs], 0.5)
    assert flag.tolist() == [1] and flag.dtype is torch.int32
    assert outputs[1 - index].eq(1.0).all()
    finite = inputs[index].isfinite()
    assert outputs[index][finite].eq(1.0).all()


def test_scale_never_clears_the_flag_and_never_stops_for_it(device):
    flag = zeros(device).fill_(1)
    x, y = torch.ones(3, device=device), torch.zeros(3, device=device)
    amp_C.multi_tensor_scale(65536, flag, [[x], [y]], 2.0)
    assert flag.item() == 1 and y.eq(2.0).all()


@pytest.mark.parametrize("x_type, y_type, out_type", list(itertools.product((HALF, FULL), repeat=3)))
def test_axpby_is_a_x_plus_b_y(x_type, y_type, out_type, device):
    xs, ys = random((5, 7), x_type, device, 1), random((5, 7), y_type, device, 2)
    outputs = [torch.empty_like(x, dtype=out_type) for x in xs]
    flag = zeros(device)
    amp_C.multi_tensor_axpby(65536, flag, [xs, ys, outputs], 2.0, -3.0, -1)
    assert flag.item() == 0
    wanted = [2.0 * x.double() - 3.0 * y.double() for x, y in zip(xs, ys)]
    assert_close(outputs, wanted, 1e-2 if out_type is HALF else 1e-5)


@pytest.mark.parametrize("checked, bad, wanted", [(-1, 0, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_axpby_checks_the_argument_it_is_told_to(checked, bad, wanted, device):
    lists = [[torch.ones(4, device=device)] for _ in range(3)]
    lists[bad][0][2] = float("nan")
    flag = zeros(device)
    amp_C.multi_tensor_axpby(65536, flag, lists, 1.0, 1.0, checked)
    assert flag.item() == wanted


def norms_of(tensors, scale=1.0):
    return torch.stack([scale * t.double().cpu().norm() for t in tensors])


@pytest.mark.parametrize("dtype", [HALF, FULL, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_tensor", [False, True, None])
@pytest.mark.parametrize("op", ["multi_tensor_l2norm", "multi_tensor_l2norm_mp"])
def test_l2norm_of_all_and_of_each(op, dtype, per_tensor, device):
    tensors = random(((33, 5), (700,)), dtype, device)
    flag = zeros(device)
    norm, norms = multi_tensor_applier(getattr(amp_C, op), flag, [tensors], per_tensor)
    each = norms_of(tensors)
    assert norm.shape == (1,) and norm.dtype is FULL and flag.item() == 0
    assert_close([norm[0], norms], [each.norm(), each if per_tensor else torch.zeros(0)], 1e-5)


def test_l2norm_sets_the_flag_and_its_mp_form_heeds_it(device):
    flag = zeros(device)
    tensors = [torch.ones(3, device=device), torch.full((1,), float("inf"), device=device)]
    amp_C.multi_tensor_l2norm(65536, flag, [tensors])
    assert flag.item() == 1
    norm, norms = amp_C.multi_tensor_l2norm_mp(65536, flag, [tensors], True)
    assert norm.tolist() == [0.0] and norms.tolist() == [0.0, 0.0]


def test_l2norm_with_scaling(device):
    inputs = random((5, 8), HALF, device)
    outputs = [torch.empty_like(x, dtype=FULL) for x in inputs]
    flag = zeros(device)
    norm, norms = amp_C.multi_tensor_l2norm_scale(65536, flag, [inputs, outputs], 0.5, True)
    assert_close([*outputs, norms], [*(x.double() * 0.5 for x in inputs), norms_of(inputs, 0.5)], 1e-5)
    inverse = torch.full((1,), 0.25, device=device)
    before = [x.clone() for x in inputs]
    norm, norms = amp_C.multi_tensor_unscale_l2norm(65536, flag, [inputs], inverse, True)
    each = norms_of(inputs, 0.25)
    assert_close([norm[0], norms], [each.norm(), each], 1e-5)
    assert all(map(torch.equal, before, inputs))


@pytest.mark.parametrize("value, wanted", [(float("inf"), 1), (float("nan"), 1), (60000.0, 0)])
def test_l2norm_with_scaling_sets_the_flag(value, wanted, device):
    inputs = [torch.ones(3, device=device), torch.full((2,), value, device=device)]
    scaled, unscaled = zeros(device), zeros(device)
    amp_C.multi_tensor_l2norm_scale(65536, scaled, [inputs, [torch.empty_like(x) for x in inputs]], 0.5)
    amp_C.multi_tensor_unscale_l2norm(65536, unscaled, [inputs], torch.full((1,), 0.5, device=device))
    assert [scaled.item(), unscaled.item()] == [wanted, wanted]


def stepped(cls, params, gradients, **settings):
    """Parameters after steps of torch's optimizer in float64 with these gradients, a list for each step."""
    twins = [nn.Parameter(p.double().cpu()) for p in params]
    optimizer = cls(twins, **settings)
    for grads in gradients:
        for twin, gradient in zip(twins, grads):
            twin.grad = gradient.double().cpu()
        optimizer.step()
    return [twin.detach() for twin in twins]


@pytest.mark.parametrize(
    "g_type, p_type, copies", [(HALF, HALF, False), (FULL, FULL, False), (HALF, FULL, True), (FULL, FULL, True)]
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_over_its_lists(g_type, p_type, copies, nesterov, device):
    params = random((5, 7), p_type, device)
    momenta, lower = [torch.zeros_like(p) for p in params], [p.to(HALF) for p in params]
    gradients = [random((5, 7), g_type, device, seed=step) for step in (1, 2, 3)]
    settings = dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    wanted = stepped(torch.optim.SGD, params, [[g.double() * 0.5 for g in grads] for grads in gradients], **settings)
    for step, grads in enumerate(gradients):
        lists = [grads, params, momenta] + ([lower] if copies else [])
        rest = (0.1, 0.9, 0.0, 0.1, nesterov, step == 0, False, 0.5)
        multi_tensor_applier(amp_C.multi_tensor_sgd, zeros(device), lists, *rest)
    assert_close(params, wanted, 1e-2 if p_type is HALF else 1e-5)
    if copies:
        assert all(torch.equal(low, p.to(HALF)) for low, p in zip(lower, params))


def test_sgd_does_nothing_when_the_flag_is_set(device):
    lists = [[torch.ones(3, device=device)] for _ in range(3)]
    amp_C.multi_tensor_sgd(65536, zeros(device).fill_(1), lists, 0.1, 0.9, 0.0, 0.1, False, True, False, 1.0)
    assert all(one[0].eq(1.0).all() for one in lists)


ADAMS = (torch.optim.Adam, torch.optim.AdamW)
ADAM = dict(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_over_its_lists_ignores_the_flag(mode, device):
    params, grads = random((5, 7), FULL, device), random((5, 7), HALF, device, 1)
    wanted = stepped(ADAMS[mode], params, [grads] * 3, **ADAM)
    lists = [grads, params, *([torch.zeros_like(p) for p in params] for _ in range(2))]
    for step in range(1, 4):
        amp_C.multi_tensor_adam(65536, zeros(device).fill_(1), lists, 0.1, 0.8, 0.9, 1e-6, step, mode, 1, 0.1)
    assert_close(params, wanted, 1e-4)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
def test_capturable_adam_unscales_and_heeds_the_flag(masters, mode, device):
    full, grads = random((5, 7), FULL, device), random((5, 7), HALF, device, 1)
    wanted = stepped(ADAMS[mode], full, [grads], **ADAM)
    params = [p.half() for p in full] if masters else full
    m, v = ([torch.zeros_like(p) for p in full] for _ in range(2))
    scaled = [g * 8 for g in grads]
    lists = [scaled, params, m, v] + ([full] if masters else [])
    op = amp_C.multi_tensor_adam_capturable_master if masters else amp_C.multi_tensor_adam_capturable
    lr, step = torch.tensor(0.1, device=device), torch.tensor([1], dtype=torch.int, device=device)
    rest = (lr, 0.8, 0.9, 1e-6, step, mode, 1, 0.1, torch.tensor([1 / 8], device=device))
    before = [p.clone() for p in full]
    op(65536, zeros(device).fill_(1), lists, *rest)
    assert all(map(torch.equal, before, full))
    op(65536, zeros(device), lists, *rest)
    assert_close(full, wanted, 1e-4)
    assert all(map(torch.equal, grads, scaled))
    assert all(torch.equal(p, f.to(p.dtype)) for p, f in zip(params, full))


def test_adagrad_over_its_lists(device):
    params, grads = random((5, 7), FULL, device), random((5, 7), FULL, device, 1)
    wanted = stepped(torch.optim.Adagrad, params, [grads] * 2, lr=0.1, eps=1e-8, weight_decay=0.1)
    sums = [torch.zeros_like(p) for p in params]
    for _ in range(2):
        amp_C.multi_tensor_adagrad(65536, zeros(device), [grads, params, sums], 0.1, 1e-8, 0, 0.1)
    assert_close(params, wanted, 1e-5)


@pytest.mark.parametrize("mode", [0, 1])
def test_novograd_over_its_lists_updates_the_norms(mode, device):
    p, g, m = (torch.tensor(values, device=device) for values in ((1.0, 2.0), (3.0, 4.0), (0.0, 0.0)))
    norms = torch.tensor([5.0], device=device)
    rest = (norms, 0.5, 0.9, 0.5, 0.0, 1, 0, 0.1, 0, mode, 2)
    multi_tensor_applier(amp_C.multi_tensor_novograd, zeros(device), [[g], [p], [m]], *rest)
    # The norm stays 5, the gradient becomes (0.6, 0.8); plus the decay of 0.1 w.
    wanted = torch.tensor([1.0 - 0.5 * (0.6 + 0.1), 2.0 - 0.5 * (0.8 + 0.2)])
    assert_close([norms, p], [torch.tensor([5.0]), wanted], 1e-5)
    assert_close([m], [torch.tensor([0.7, 1.0] if mode == 0 else [3.0, 4.0])], 1e-5)


def lamb_on_paper(device):
    """Parameters, gradients, and of the first step of LAMB: the norm, clipped gradients, directions, and where it comes to."""
    params, grads = random((5, 7), FULL, device), random((5, 7), FULL, device, 1)
    w, g = ([t.double().cpu() for t in tensors] for tensors in (params, grads))
    norm = torch.stack([x.norm() for x in g]).norm()
    g = [x * min(1.0, 1.0 / norm) for x in g]
    r = [(x / (x.abs() + 1e-6)) + 0.1 * p for x, p in zip(g, w)]  # the first step: both corrections cancel
    wanted = [p - 0.05 * p.norm() / d.norm() * d for p, d in zip(w, r)]
    lists = [grads, params, *([torch.zeros_like(p) for p in params] for _ in range(2))]
    return lists, norm.float().reshape(1).to(device), g, r, wanted


def test_lamb_in_one_call(device):
    lists, norm, g, r, wanted = lamb_on_paper(device)
    amp_C.multi_tensor_lamb(65536, zeros(device), lists, 0.05, 0.9, 0.99, 1e-6, 1, 1, 0.1, 1, 1, norm, 1.0, False)
    assert_close(lists[1], wanted, 1e-4)
    assert_close(lists[0], r, 1e-3)  # gradients become the directions
    assert_close(lists[2], [0.1 * x for x in g], 1e-4)  # clipped, which directions of a first step do not show


@pytest.mark.parametrize("decays", [(0.1, 0.3), (0.1, 0.1)])  # one for each tensor
def test_lamb_in_two_halves(decays, device):
    lists, norm, _, r, wanted = lamb_on_paper(device)
    updates, before = [torch.empty_like(p) for p in lists[1]], [p.clone() for p in lists[1]]
    rest = (torch.tensor(decays, device=device), 1, 0.9, 0.99, 1e-6, norm, 1.0)
    amp_C.multi_tensor_lamb_stage1_cuda(65536, zeros(device), [*lists, updates], *rest)
    assert_close(updates, [d + (one - 0.1) * p.double().cpu() for d, one, p in zip(r, decays, before)], 1e-3)
    assert all(map(torch.equal, lists[1], before))
    if decays == (0.1, 0.1):
        norms = [torch.stack([t.norm() for t in ts]) for ts in (lists[1], updates)]
        amp_C.multi_tensor_lamb_stage2_cuda(65536, zeros(device), [lists[1], updates], *norms, 0.05, 0.1, False)
        assert_close(lists[1], wanted, 1e-4)


@pytest.mark.parametrize("found_inf", [1.0, 0.0])
def test_lamb_with_copies_unscales_and_skips(found_inf, device):
    lists, norm, g, _, wanted = lamb_on_paper(device)
    lower, before = [p.half() for p in lists[1]], [p.clone() for p in lists[1]]
    torch._foreach_mul_(lists[0], 4.0)
    lr, most, found, inverse = (torch.tensor([x], device=device) for x in (0.05, 1.0, found_inf, 0.25))
    step = torch.tensor([1], dtype=torch.int, device=device)
    rest = (lr, 0.9, 0.99, 1e-6, step, 1, 0.1, 1, 1, norm, most, False, found, inverse)
    amp_C.multi_tensor_lamb_mp(65536, zeros(device), [*lists, lower], *rest)
    assert_close(lists[1], before if found_inf else wanted, 1e-4)
    assert_close(lists[2], [0.0 * x if found_inf else 0.1 * x for x in g], 1e-4)  # of gradients clipped to a norm of 1
    assert all(torch.equal(low, p.half()) for low, p in zip(lower, lists[1]))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_lars_over_its_lists(is_skipped, device):
    p, g, m = (torch.tensor(values, device=device) for values in ((3.0, 4.0), (0.6, 0.8), (0.0, 0.0)))
    norms = torch.tensor([1.0], device=device), torch.tensor([5.0], device=device)
    args = (*norms, 0.5, 0.1, 0.0, 0.2, 0.9, 0.0, False, True, False, 1.0, is_skipped)
    amp_C.multi_tensor_lars(65536, zeros(device).fill_(1), [[g], [p], [m]], *args)
    assert p.tolist() == [3.0, 4.0]
    amp_C.multi_tensor_lars(65536, zeros(device), [[g], [p], [m]], *args)
    local = 1.0 if is_skipped else 0.1 * 5.0 / (1.0 + 0.2 * 5.0)
    wanted = torch.tensor([3.0, 4.0]) - 0.5 * local * (torch.tensor([0.6, 0.8]) + 0.2 * torch.tensor([3.0, 4.0]))
    assert_close([p], [wanted], 1e-5)


def test_update_scale_hysteresis_follows_its_counters(device):
    scale = torch.tensor([4.0], device=device)
    growth, hysteresis = (torch.tensor([n], dtype=torch.int, device=device) for n in (0, 2))

    def update(inf):
        found = torch.tensor([inf], device=device)
        returned = amp_C.update_scale_hysteresis(scale, growth, hysteresis, found, 2.0, 0.5, 3, 2)
        assert returned is scale
        return scale.item(), growth.item(), hysteresis.item()

    assert update(0.0) == (4.0, 1, 2)
    assert update(1.0) == (4.0, 0, 1)  # the first overflow is forgiven
    assert update(1.0) == (2.0, 0, 0)
    assert update(1.0) == (1.0, 0, -1)
    assert update(0.0) == (1.0, 1, 2)  # a clean iteration gives the chances back
    assert update(0.0) == (1.0, 2, 2)
    assert update(0.0) == (2.0, 0, 2)
    scale.fill_(3e38)
    growth.fill_(2)
    assert update(0.0)[0] == pytest.approx(3e38)  # growth never makes it infinite


@pytest.mark.parametrize(
    "before, found_inf, after",
    [
        (2.0**-125, 1.0, 2.0**-126),  # the smallest normal number of float32 stays
        (2.0**-126, 1.0, 0.0),
        (2.0**-127, 0.0, 0.0),  # zero does not grow into 2**-126
    ],
)
def test_update_scale_hysteresis_takes_subnormal_scales_for_zero(before, found_inf, after, device):
    scale = torch.tensor([before], device=device)
    growth, hysteresis = (torch.tensor([n], dtype=torch.int, device=device) for n in (0, 1))
    amp_C.update_scale_hysteresis(scale, growth, hysteresis, torch.tensor([found_inf], device=device), 2.0, 0.5, 1, 1)
    assert scale.item() == after


REFUSED = {
    "expected 2 lists": [[torch.ones(2)]],
    "first list of tensors is empty": [[], []],
    "list 1 has 0 tensors": [[torch.ones(2)], []],
    "has 3 elements": [[torch.ones(2)], [torch.ones(3)]],
    "neither contiguous nor channels-last": [[torch.ones(2, 3).t()], [torch.ones(3, 2)]],
    "floating point": [[torch.ones(2, dtype=torch.int)], [torch.ones(2)]],
    "int32": [[torch.ones(1)]] * 2,
}


@pytest.mark.parametrize("message", REFUSED)
def test_lists_that_do_not_fit_together_and_other_flags_are_runtime_errors(message):
    flag = torch.zeros(1) if message == "int32" else zeros("cpu")
    with pytest.raises(RuntimeError, match=message):
        amp_C.multi_tensor_scale(65536, flag, REFUSED[message], 1.0)


def test_channels_last_tensors_and_other_shapes_of_one_size_are_taken():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    amp_C.multi_tensor_scale(65536, zeros("cpu"), [[x], [y]], 2.0)
    assert torch.equal(y, x * 2)
    flat = torch.empty(6)
    amp_C.multi_tensor_scale(65536, zeros("cpu"), [[torch.arange(6.0).view(2, 3)], [flat]], 2.0)
    assert flat.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_unknown_functions_are_attribute_errors_that_list_the_known():
    assert not hasattr(amp_C, "multi_tensor_nothing")
    with pytest.raises(AttributeError, match="multi_tensor_scale"):
        amp_C.multi_tensor_nothing  # noqa: B018


def test_applier_passes_its_chunk_size_and_is_available():
    seen = []
    MultiTensorApply(7)(lambda *args: seen.append(args), "flag", "lists", 1, 2)
    assert seen == [(7, "flag", "lists", 1, 2)]
    assert multi_tensor_applier.chunk_size == 65536 and multi_tensor_applier.available
    assert multi_tensor_applier.import_err is None
    multi_tensor_applier.check_avail()


def test_apex_c_flattens_and_unflattens():
    tensors = [torch.randn(2, 3), torch.randn(4)]
    flat = apex_C.flatten(tensors)
    assert flat.shape == (10,)
    assert all(torch.equal(a, b) for a, b in zip(apex_C.unflatten(flat, tensors), tensors, strict=True))
