"""Scripts as people write them, each in float32, under torch.autocast and at a level.

A row of the table is a function that trains a few iterations, and returns what it has found by name: losses, the way that weights
have gone, gradients. For each of them the level may be twice as far from float32 as torch.autocast is. Matrices of 64 x 96
are among the weights, so that at O5 gradients come narrow.
"""

import functools

import pytest
import torch
from everyday import SCRIPTS, Run, flat, gradients, loops, networks, regression  # noqa: F401

import ampkit
from ampkit.casting.narrow_gradients import stored_gradient


@pytest.fixture(autouse=True)
def closed():
    yield
    ampkit.close()
    left_on = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)  # not for the next row
    assert not left_on


@functools.cache
def found_by(name, level):
    results = SCRIPTS[name][0](Run(level))
    ampkit.close()
    return {what: flat(values) for what, values in results.items()}


def distances(name, level):
    exact, found = found_by(name, "fp32"), found_by.__wrapped__(name, level)
    assert found.keys() == exact.keys()
    return {what: ((found[what] - exact[what]).norm() / exact[what].norm()).item() for what in exact}


@functools.cache
def distances_of_autocast(name):
    return distances(name, "autocast")


ROWS = [(name, level) for name, (_, levels) in SCRIPTS.items() for level in levels]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "level"), ROWS, ids=lambda value: value.replace(" ", "-"))
def test_script_learns_what_it_learns_in_float32_at_most_twice_as_far_from_it_as_under_autocast(name, level):
    of_autocast, of_level = distances_of_autocast(name), distances(name, level)
    assert max(of_autocast.values()) < 0.2, "too far for a measure"
    too_far = {
        what: (of_level[what], of_autocast[what])
        for what in of_level
        if not of_level[what] <= 2 * of_autocast[what] + 0.005
    }
    assert not too_far


@pytest.mark.compiled("wrappers")
def test_large_matrices_of_the_scripts_have_narrow_gradients_at_o5():
    model, optimizer, x, y = regression()
    Run("O5").begin(model, optimizer)
    Run("O5").backward(Run("O5").error(model, x, y), optimizer)
    assert [stored_gradient(p).dtype for p in model.parameters()] == [torch.bfloat16, *3 * [torch.float32]]
