"""Distributions whose parameters come out of a layer: torch draws from them in float32 only."""

import pytest
import torch
from helpers import o1
from torch import distributions

pytestmark = pytest.mark.switch

DISTRIBUTIONS = {
    "Gamma": lambda a: distributions.Gamma(a, 2 * a),
    "Beta": lambda a: distributions.Beta(a, a + 1),
    "Dirichlet": distributions.Dirichlet,
    "StudentT": distributions.StudentT,
    "Chi2": distributions.Chi2,
    "InverseGamma": lambda a: distributions.InverseGamma(a, a),
    "FisherSnedecor": lambda a: distributions.FisherSnedecor(a, a + 4),
}


def drawn(make, parameter):
    """A sample, and the gradient of the parameter through it."""
    torch.manual_seed(0)
    leaf = parameter.detach().requires_grad_()
    sample = make(leaf).rsample()
    weights = torch.linspace(1, 2, sample.numel()).reshape(sample.shape)  # the components of a Dirichlet add up to 1
    (sample * weights).sum().backward()
    return sample.detach(), leaf.grad


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sample_of_lower_precision_parameters_is_float32s(name, lower, in_python):
    parameter = torch.tensor([1.5, 2.0, 3.0, 5.0])  # exact in every precision
    expected = drawn(DISTRIBUTIONS[name], parameter)
    with o1(lower, in_python=in_python):
        sample, gradient = drawn(DISTRIBUTIONS[name], parameter.to(lower))
    tolerance = 2.0**-7 if lower is torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(sample.float(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient.float(), expected[1], rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_functions_that_draw_compute_in_float32(lower, in_python):
    a, x = torch.tensor([1.5, 2.0]), torch.tensor([0.25, 0.75])
    calls = {
        "_standard_gamma": (a,),
        "_standard_gamma_grad": (a, x),
        "_sample_dirichlet": (a,),
        "_dirichlet_grad": (x, a, a),
        "binomial": (torch.tensor([10.0, 20.0]), x),
    }
    for name, arguments in calls.items():
        torch.manual_seed(0)
        expected = getattr(torch, name)(*arguments)
        with o1(lower, in_python=in_python):
            torch.manual_seed(0)
            sample = getattr(torch, name)(*[t.to(lower) for t in arguments])
        assert sample.dtype is torch.float32 and torch.equal(sample, expected), name
