"""apex.normalization: values of float64 arithmetic, dtypes as Apex had them, and O1."""

import copy

import pytest
import torch
from helpers import iterate
from torch import nn

import ampkit
from ampkit.apex import normalization
from ampkit.apex.normalization import fused_layer_norm as functional

SHAPES = [(6,), (3, 6)]
LOW = (torch.float16, torch.bfloat16)
# Mixed norms have parameters always.
NAMES = [
    (name, dtype)
    for name in ("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
    for dtype in (torch.float32, *LOW, *(() if name.startswith("Mixed") else (None,)))
]


def by_hand(x, weight, bias, dims, eps, rms):
    x = x.double()
    if not rms:
        x = x - x.mean(dims, keepdim=True)
    x = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name, parameters", NAMES)
def test_norms_by_hand_in_every_mix_of_dtypes(name, shape, parameters, dtype, device):
    mixed, rms = name.startswith("Mixed"), "RMS" in name
    settings = {} if mixed else dict(elementwise_affine=parameters is not None)
    norm = getattr(normalization, name)(shape, **settings).to(device, parameters)
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(4, 3, 6, device=device).to(dtype).requires_grad_()
    output = norm(x)
    assert output.dtype is (parameters if mixed else dtype)
    twin = x.detach().double().requires_grad_()
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    wanted = by_hand(twin, weight, bias, tuple(range(-len(shape), 0)), norm.eps, rms)
    tolerance = max({torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(one, 1e-5) for one in (dtype, parameters))
    assert torch.allclose(output.double(), wanted, atol=tolerance * 4, rtol=tolerance)
    output.double().sin().sum().backward()
    wanted.sin().sum().backward()
    assert x.grad.dtype is dtype
    assert torch.allclose(x.grad.double(), twin.grad, atol=tolerance * 8, rtol=tolerance * 2)


#: Calls with the weight and the bias, and whether these are used, whether it is a layer norm, and the dtype that comes out.
FUNCTIONS = {
    "fused_layer_norm_affine": (lambda f, x, w, b: f(x, w, b, (4,)), True, True, torch.float16),
    "mixed_dtype_fused_layer_norm_affine": (lambda f, x, w, b: f(x, w, b, (4,)), True, True, torch.float32),
    "fused_layer_norm": (lambda f, x, w, b: f(x, 4), False, True, torch.float16),
    "fused_rms_norm_affine": (lambda f, x, w, b: f(x, w, (4,)), True, False, torch.float16),
    "mixed_dtype_fused_rms_norm_affine": (lambda f, x, w, b: f(x, w, 4), True, False, torch.float32),
    "fused_rms_norm": (lambda f, x, w, b: f(x, (4,)), False, False, torch.float16),
    "manual_rms_norm": (lambda f, x, w, b: f(x, (4,), w.half(), 1e-6), True, False, torch.float16),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_forms_are_the_modules_with_an_eps_of_1e_6(name):
    call, affine, centres, dtype = FUNCTIONS[name]
    x, weight, bias = torch.randn(2, 4).half(), torch.randn(4), torch.randn(4)
    output = call(getattr(functional, name), x, weight, bias)
    wanted = by_hand(x, weight if affine else None, bias if affine and centres else None, (-1,), 1e-6, not centres)
    assert output.dtype is dtype
    assert torch.allclose(output.double(), wanted, atol=1e-2)


@pytest.mark.parametrize("name", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_mixed_norms_need_parameters(name):
    with pytest.raises(RuntimeError, match="elementwise_affine=False"):
        getattr(normalization, name)(4, elementwise_affine=False)
    assert getattr(normalization, name)(4, elementwise_affine=True, memory_efficient=True).memory_efficient


def test_state_dict_has_torchs_names():
    assert list(normalization.FusedLayerNorm(4).state_dict()) == ["weight", "bias"]
    assert list(normalization.FusedRMSNorm(4).state_dict()) == ["weight"]
    assert "eps=1e-05" in repr(normalization.FusedLayerNorm(4))


def test_autocast_decides_the_output():
    norm, mixed, x = normalization.FusedLayerNorm(4), normalization.MixedFusedLayerNorm(4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x).dtype is torch.bfloat16
        assert mixed(x).dtype is torch.float32
    assert torch.allclose(norm(x), mixed(x))


@pytest.mark.parametrize("name, tolerance", [("fused_layer_norm", 1e-3), ("fused_rms_norm", 1e-6)])
def test_float32_activations_stay_float32_at_o1(amp, name, tolerance):
    """O1 is a state of torch's autocast; its lower precision is for matrix products, not for a norm's input."""
    model = amp.initialize(nn.Linear(4, 4), opt_level="O1", verbosity=0)
    x = torch.tensor([[1.0, 1.0003, 1.0006, 1.0012]])  # differences that float16 rounds
    found = getattr(functional, name)(x, (4,), 1e-12)
    wanted = by_hand(x, None, None, (1,), 1e-12, rms=name == "fused_rms_norm")
    assert found.dtype is torch.float32 and torch.allclose(found.double(), wanted, rtol=tolerance)
    low = model(x)
    assert getattr(functional, name)(low, (4,), 1e-5).dtype is low.dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm"])
@pytest.mark.parametrize("policy", ["default", "apex"])
def test_norms_train_at_every_level(level, name, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), getattr(normalization, name)(8), nn.Linear(8, 1))
    twin, before = copy.deepcopy(model).double(), copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    (twin(x.double()) - y).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, policy=policy, verbosity=0)
    iterate(lambda: (model(x).float() - y).square().mean(), optimizer)
    for start, p, exact in zip(before.parameters(), model.state_dict().values(), twin.parameters(), strict=True):
        wanted = -0.1 * exact.grad
        # O3's weights are bfloat16 themselves: half a unit in the last place at the start, and one at the step.
        rounding = 2 * 2**-9 * start.norm() if level == "O3" else 0.0
        error = (p.double() - start - wanted).norm()
        assert error <= (1e-5 if level == "O0" else 2e-2) * wanted.norm() + rounding, (error, wanted.norm())
