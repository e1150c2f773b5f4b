"""The operations of torch's own autocast tests, with their sample arguments, under O1 on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from helpers import o1

from ampkit.casting.tensors import map_tensors, tensors_in
from ampkit.policy import CastKind, Policy

lists = pytest.importorskip("torch.testing._internal.autocast_test_lists", reason="needs expecttest")
# torch's test utilities forbid torch.backends.cudnn.deterministic = True and the like, for every test that follows.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

pytestmark = pytest.mark.switch

LOW = (torch.float16, torch.bfloat16)
OWNERS = {torch: "torch", F: "torch.nn.functional", torch.linalg: "torch.linalg", torch.Tensor: "torch.Tensor"}
# Without a kernel on the CPU, and refused (tests/o1/test_policy.py).
LEFT_OUT = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy"}
# Relative to the norm: a few roundings of the result, and of the inputs of a matrix product.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-5}
ROWS = {(OWNERS[rule.owner], rule.name): rule.kind for rule in Policy().rules() if rule.owner in OWNERS}


def cases():
    """(owner, name, args, kwargs) of every entry, under each name that the operation has."""
    torch.manual_seed(0)
    for source in (lists.AutocastTestLists("cpu"), lists.AutocastCPUTestLists("cpu")):
        for attribute, entries in vars(source).items():
            for index, (name, args, *rest) in enumerate(entries):
                kwargs = rest[-1] if rest and isinstance(rest[-1], dict) else {}
                if name == "einsum":  # the equation stands before the tensors
                    args = (args, *rest[0])
                    args = ("ij,jk->ik", *args[1:])
                if name in LEFT_OUT:
                    continue
                places = [F] if attribute.startswith("nn_") else [] if attribute.startswith("methods_") else [torch]
                name = {"nll_loss2d": "nll_loss"}.get(name, name)
                if name.startswith("linalg_"):
                    places, name = [torch.linalg], name.removeprefix("linalg_")
                if isinstance(args[0], torch.Tensor):
                    places.append(torch.Tensor)
                for owner in places:
                    if hasattr(owner, name):
                        label = f"{type(source).__name__[8:-9]}.{attribute}-{index}-{OWNERS[owner]}.{name}"
                        yield pytest.param(owner, name, args, kwargs, id=label)


CASES = list(cases())


def test_samples_were_found():
    assert len(CASES) > 200


def to(values, dtype, only=(torch.float32, *LOW)):
    return map_tensors(values, lambda x: x.to(dtype) if x.dtype in only else x)


def first(result):
    return next(tensors_in(result), result)


@pytest.fixture(scope="module", params=LOW, ids=str)
def casting(request):
    with o1(request.param) as casting:
        yield casting


@pytest.mark.parametrize(("owner", "name", "args", "kwargs"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_operation_has_the_dtype_of_its_row_and_the_values_of_float64(casting, owner, name, args, kwargs):
    low, function = casting.lower_precision, getattr(owner, name)
    args = to(args, low, only=LOW)
    with casting.disabled():
        try:
            exact = first(function(*to(args, torch.float64), **kwargs))
        except RuntimeError:  # no float64 kernel
            exact = first(function(*to(args, torch.float32), **kwargs))
    result = first(function(*args, **kwargs))
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        assert type(result) is type(exact)
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(exact))
        return
    kind = ROWS[OWNERS[owner], name]
    dtypes = [x.dtype for x in tensors_in(args, kwargs) if x.is_floating_point()]
    widest = torch.float32 if torch.float32 in dtypes else low
    lower = {CastKind.LOWER_PRECISION_FP: low, CastKind.CONTRACTION: low}  # torch's sample of einsum sums over an index
    expected = {**lower, CastKind.FP32: torch.float32}.get(kind, widest)
    assert result.dtype is expected
    finite = exact.isfinite()
    error = (result.double() - exact)[finite].norm() / exact[finite].double().norm().clamp_min(1e-30)
    assert error < TOLERANCE[expected]
    assert torch.equal(result.isfinite(), finite)
