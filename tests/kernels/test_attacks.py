"""Every multi-tensor operator with lists it was not made for: an error in words that leaves all as it was, or right numbers."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers import in_threads
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import backend

F32, F16, BF16, I16 = torch.float32, torch.float16, torch.bfloat16, torch.int16
RULE = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, step=3.0)


class Op(NamedTuple):
    lists: dict[str, torch.dtype]
    written: tuple[str, ...]
    numbers: dict
    flags: tuple[str, ...] = ("found_inf",)
    more: Callable = lambda count: {}


FOUR = dict(grads=F32, params=F32, exp_avgs=F32, exp_avg_sqs=F32)
#: Operators: `multi_tensor_...`.
OPS = {
    "scale": Op(dict(inputs=F32, outputs=F32), ("outputs",), dict(scale=0.5)),
    "axpby": Op(dict(xs=F32, ys=F32, outputs=F32), ("outputs",), dict(a=2.0, b=-3.0)),
    "join": Op(dict(weights=BF16, rests=I16, outputs=F32), ("outputs",), {}, ()),
    "split": Op(dict(values=F32, weights=BF16, rests=I16), ("weights", "rests"), {}, ()),
    "unscale_l2norm": Op(dict(inputs=F32, outputs=F32), ("outputs",), dict(inv_scale=0.5)),
    "l2norm": Op(dict(tensors=F32), (), {}, ()),
    "sgd": Op(dict(grads=F32, params=F32, momenta=F32), ("params", "momenta"), dict(lr=0.1, momentum=0.9)),
    "adam": Op(FOUR, ("params", "exp_avgs", "exp_avg_sqs"), dict(RULE, decoupled=True)),
    "adagrad": Op(dict(grads=F32, params=F32, sums=F32), ("params", "sums"), dict(lr=0.1, eps=1e-6)),
    "lamb": Op(FOUR, ("params", "exp_avgs", "exp_avg_sqs"), dict(RULE, weight_decay=0.1)),
    "novograd": Op(
        dict(grads=F32, params=F32, exp_avgs=F32),
        ("params", "exp_avgs"),
        RULE,
        more=lambda count: dict(norms=torch.ones(count)),
    ),
}
SHAPES = [(5,), (3, 4), (17,)]
LISTS = [(name, which) for name, op in OPS.items() for which in op.lists]
WRITTEN = [(name, which) for name, op in OPS.items() for which in op.written]
STEPS = ("sgd", "adam", "adagrad", "lamb", "novograd")
OF_ANY_KIND = ("scale", "a", "b", "lr", "inv_scale", "step")  # numbers on the host, or tensors on the device
NUMBERS = [(name, number) for name, op in OPS.items() for number in op.numbers if number in OF_ANY_KIND]
NUMBERS += [(name, number) for name in STEPS for number in ("inv_scale", "clip")]
FLAGS = [(name, flag) for name, op in OPS.items() for flag in op.flags]
FLAGS += [(name, "first_bad") for name in ("scale", "axpby", "unscale_l2norm")]
PLACES = [*LISTS, *NUMBERS, *FLAGS]
every_op = pytest.mark.parametrize("name", OPS)
every_list = pytest.mark.parametrize("name, which", LISTS, ids=map("-".join, LISTS))


def made(name, shapes=SHAPES, seed=0, device="cpu"):
    """The lists of this operator: positive numbers, and rests of both signs."""
    generator = torch.Generator().manual_seed(seed)
    lists = {}
    for which, dtype in OPS[name].lists.items():
        if dtype is I16:
            lists[which] = [torch.randint(-99, 99, shape, generator=generator).to(I16) for shape in shapes]
        else:
            lists[which] = [(torch.rand(shape, generator=generator) + 0.5).to(dtype) for shape in shapes]
    return {which: [x.to(device) for x in tensors] for which, tensors in lists.items()}


def on_device(name, device):
    """The vectors of this operator beside `made` lists."""
    return {key: vector.to(device) for key, vector in OPS[name].more(len(SHAPES)).items()}


def run(name, lists, **more):
    """Call the operator and return its results as a list of tensors; ``more`` overrides its numbers and flags."""
    op, count = OPS[name], len(next(iter(lists.values())))
    function = getattr(kernels, f"multi_tensor_{name}", None) or getattr(multi_tensor_steps, f"multi_tensor_{name}")
    returned = function(**lists, **{**op.more(count), **op.numbers, **more})
    return [] if returned is None else list(returned)


def copied(lists):
    return {
        which: [x.clone(memory_format=torch.contiguous_format) for x in tensors] for which, tensors in lists.items()
    }


def expected_of(name, lists, **more):
    """The lists after the call, and its results: by the definition in plain torch, over contiguous copies."""
    plain, devices = copied(lists), backend.kernel_devices
    backend.kernel_devices = frozenset()
    try:
        return plain, run(name, plain, **more)
    finally:
        backend.kernel_devices = devices


def assert_right(name, lists, expected, returned):
    wanted, wanted_return = expected
    for which, tensors in lists.items():
        for i, (tensor, reference) in enumerate(zip(tensors, wanted[which], strict=True)):
            torch.testing.assert_close(
                tensor.contiguous(), reference, rtol=2e-6, atol=1e-7, msg=lambda m, w=which, i=i: f"{w}[{i}]: {m}"
            )
    for tensor, reference in zip(returned, wanted_return, strict=True):
        torch.testing.assert_close(tensor, reference, rtol=2e-6, atol=0)


def assert_refused(name, lists, match, **more):
    """Check that an error names the fault, and that every value is as it was."""
    readable = {
        which: [x for x in tensors if x.device.type == "cpu" and x.untyped_storage().size()]
        for which, tensors in lists.items()
    }
    before = copied(readable)
    vectors = OPS[name].more(len(next(iter(lists.values()))))
    with pytest.raises(RuntimeError, match=match):
        run(name, lists, **vectors, **more)
    assert all(bool((vector == 1).all()) for vector in vectors.values())
    for which, tensors in readable.items():
        assert all(map(torch.equal, tensors, before[which])), which


def said(name, which):
    """The name of a list in an error: another operator computes the norms."""
    return "inputs|tensors" if name == "l2norm" or (name, which) == ("novograd", "grads") else which


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def spoiled(name, which, spoil):
    """The lists and settings of this operator, with one tensor spoiled."""
    lists = made(name)
    if which not in lists:
        return lists, {which: spoil(torch.ones(1, dtype=torch.int64 if which == "first_bad" else F32))}
    lists[which][1] = spoil(lists[which][1])
    return lists, {}


@pytest.mark.parametrize("name, which", PLACES, ids=map("-".join, PLACES))
def test_tensors_without_data_are_refused(name, which):
    lists, settings = spoiled(name, which, lambda x: x.to("meta"))
    assert_refused(name, lists, "meta", **settings)


# But for NovoGrad's numbers, which torch reads, and torch does not refuse freed memory.
FREED = [one for one in PLACES if one in LISTS or one[0] != "novograd"]


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("name, which", FREED, ids=map("-".join, FREED))
def test_freed_memory_is_refused(name, which):
    lists, settings = spoiled(name, which, freed)
    place = rf"({said(name, which)})\[1\].*no memory" if which in lists else "has no memory|storage"
    assert_refused(name, lists, place, **settings)


OVERLAPPING = {
    "a row repeated": lambda x: x[:1].expand(3, 4),
    "a number repeated": lambda x: x[:1, :1].expand(3, 4),
    "beside a hole": lambda x: torch.cat([x, x], 1)[:1, ::2].expand(3, 4),
}


@pytest.mark.parametrize("name, which", WRITTEN, ids=map("-".join, WRITTEN))
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_an_output_of_which_elements_share_a_place_is_refused(name, which, layout):
    lists = made(name)
    lists[which][1] = OVERLAPPING[layout](lists[which][1])
    place = rf"{which}\[1\] has several elements in one place in memory \(shape .*, strides \[0.*\]\)"
    assert_refused(name, lists, place)


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("through", ["directly", "the dispatcher"])
def test_an_allocation_that_fails_raises_what_torch_raises(through, monkeypatch):
    huge = torch.zeros(1).expand(2**50)  # a kernel wants its elements side by side, 4 PiB
    if through == "the dispatcher":
        monkeypatch.setattr(backend, "direct", {})
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**52, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as ours:
        kernels.multi_tensor_l2norm([huge])
    assert type(ours.value) is type(of_torch.value)
    assert str(ours.value) == str(of_torch.value) and str(2**52) in str(ours.value)


@every_op
def test_a_tensor_may_stand_in_a_list_twice(name):
    """The list is one that is only read; elements of its tensors may share a place, too."""
    lists = made(name)
    for which in set(lists) - set(OPS[name].written):
        lists[which][1] = lists[which][1][:1].expand(3, 4)
        lists[which][2] = lists[which][0]
    for which in OPS[name].written:
        lists[which][2] = lists[which][2][:5].clone()
    expected = expected_of(name, lists)
    assert_right(name, lists, expected, run(name, lists))


def every_second(x):
    whole = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    return whole[..., ::2].copy_(x)


def misaligned(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = {
    "channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "with gaps": every_second,
    "misaligned": misaligned,
}
ODD = [*LISTS, *((name, "lower") for name in STEPS), *((name, "all") for name in OPS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, which", ODD, ids=map("-".join, ODD))
def test_each_list_may_lie_as_it_likes(ops, device, name, which, layout):
    lists = made(name, [(2, 3, 5, 7), (1, 1, 1, 1), (4, 8, 9, 33)], device=device)
    lower = [torch.zeros_like(x, dtype=BF16) for x in lists.get("params", [])]
    settings = on_device(name, device)
    expected = expected_of(name, lists, **{key: vector.clone() for key, vector in settings.items()})
    for one in lists:
        if which in (one, "all"):
            lists[one] = [LAYOUTS[layout](x) for x in lists[one]]
    if name in STEPS:
        settings["lower"] = [LAYOUTS[layout](x) for x in lower] if which in ("lower", "all") else lower
    assert_right(name, lists, expected, run(name, lists, **settings))
    if name in STEPS:
        assert all(torch.equal(low, x.to(BF16)) for low, x in zip(settings["lower"], lists["params"]))


SEVERAL = [one for one in LISTS if len(OPS[one[0]].lists) > 1]


@pytest.mark.parametrize("name, which", SEVERAL, ids=map("-".join, SEVERAL))
def test_lists_of_different_lengths_are_refused(name, which):
    for change in (lambda x: x[:2], lambda x: [*x, torch.ones(5)], lambda x: []):
        lists = made(name)
        lists[which] = change(lists[which])
        if (name, which, lists[which]) != ("unscale_l2norm", "outputs", []):  # which writes none
            found = rf"\b{which} has {len(lists[which])}\b.*; pass lists of one length"
            assert_refused(name, lists, found)


@pytest.mark.parametrize("name, which", SEVERAL, ids=map("-".join, SEVERAL))
def test_tensors_of_different_shapes_are_refused(name, which):
    lists = made(name)
    lists[which][1] = lists[which][1].mT
    assert_refused(name, lists, rf"\b{which}\[1\] has shape \[4, 3\]")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
@every_list
def test_other_dtypes_are_refused(name, which, dtype):
    lists = made(name)
    lists[which][1] = lists[which][1].to(dtype)
    assert_refused(name, lists, rf"({said(name, which)})\[1\] .*({dtype}|shape)")


@pytest.mark.parametrize("name", STEPS)
def test_lower_weights_of_another_length_are_refused(ops, name):
    assert_refused(name, made(name), "lower has 1", lower=[torch.ones(5)])


@every_op
def test_versions_of_what_is_written_move_and_no_others(ops, device, name):
    lists = made(name, device=device)
    for which in set(OPS[name].written) - {"rests"}:
        lists[which] = [torch.nn.Parameter(x) for x in lists[which]]
    before = {which: [x._version for x in tensors] for which, tensors in lists.items()}
    run(name, lists, **on_device(name, device))
    for which, tensors in lists.items():
        moved = [x._version > version for x, version in zip(tensors, before[which])]
        assert moved == [which in OPS[name].written] * len(tensors), which
        assert all(x.is_leaf and x.requires_grad for x in tensors if isinstance(x, torch.nn.Parameter))


class Recorder(TorchDispatchMode):
    """The last operator of ampkit that is called, with its arguments."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ampkit":
            self.call = function, args
        return function(*args, **(kwargs or {}))


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("kind", ["floats", "tensors"])
@every_op
def test_opcheck(device, name, kind):
    """The operator of a call, with the arguments of that call."""
    if device.type == "cuda" and not kernels.implementation().cuda:
        pytest.skip("no CUDA kernels")
    lists, settings = made(name, device=device), on_device(name, device)
    if kind == "tensors":
        settings |= {number: torch.full((1,), 0.5, device=device) for of, number in NUMBERS if of == name}
        settings |= {flag: torch.zeros(1, device=device) for flag in OPS[name].flags}
        if (name, "first_bad") in FLAGS:
            settings["first_bad"] = torch.zeros(1, dtype=torch.int64, device=device)
        if name in STEPS:
            settings["lower"] = [torch.zeros_like(x, dtype=BF16) for x in lists["params"]]
    with Recorder() as recorder:
        run(name, lists, **settings)
    torch.library.opcheck(*recorder.call)


@every_op
def test_tensors_without_elements_are_nothing(name):
    lists = made(name, [(0,), (3, 0), (), (0, 4), (2,), (0,)])
    expected = expected_of(name, lists)
    assert_right(name, lists, expected, run(name, lists))
    lists = made(name, [(0,), (3, 0)])
    assert all(bool((x == 0).all()) for x in run(name, lists))


@pytest.mark.cpu_kernels  # the emulation has one launch at a time
@every_op
def test_threads_may_call_at_once(name):
    """Eight threads, each with its own lists, of sizes that one call divides among threads too."""
    shapes = [(5,), (300, 301), (70_001,)] if name != "l2norm" else SHAPES
    cases = [made(name, shapes, seed) for seed in range(8)]
    expected, start = [expected_of(name, lists) for lists in cases], threading.Barrier(8)

    def work(lists, wanted):
        start.wait()
        assert_right(name, lists, wanted, run(name, lists))

    in_threads(*(lambda pair=pair: work(*pair) for pair in zip(cases, expected)))


SPOILED = {
    "freed": (freed, torch.clone),
    "freed flag": (torch.clone, freed),
    "flag without data": (torch.clone, lambda x: x.to("meta")),
    "64 bits": (torch.Tensor.long, torch.clone),
    "one word for all": (lambda x: x[:1].expand(7), torch.clone),
    "six words": (lambda x: x[:6], torch.clone),
}


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("case", SPOILED)
def test_a_loss_scale_of_another_kind_is_refused(case):
    spoil_state, spoil_flag = SPOILED[case]
    state = spoil_state(torch.tensor([0x41000000, 1, 1, 0, 0, 0, 9], dtype=torch.int32))
    before = None if case == "freed" else state.clone()
    with pytest.raises(RuntimeError):
        kernels.update_scale(state, spoil_flag(torch.ones(1)))
    assert before is None or torch.equal(state, before)
