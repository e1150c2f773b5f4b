"""Two parameters over the same memory: one weight in float32, and refused where another dtype would split it in two."""

import logging
from contextlib import nullcontext

import pytest
import torch
from helpers import STORED_BF16, at, backward
from torch import nn
from torch.nn import functional as F

import ampkit

X = torch.randn(32, 24, generator=torch.Generator().manual_seed(2))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(24, 16), nn.Linear(16, 24)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def transposed_data(model):
    model.decoder.weight.data = model.encoder.weight.data.t()


def parameter_over_a_transpose(model):
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())


def rows_of_another(model):
    model.head = nn.Linear(24, 8)
    model.head.weight = nn.Parameter(model.encoder.weight.data[4:12])


def columns_of_one_tensor(model):
    whole = torch.randn(40, 24) * 0.1
    model.encoder.weight = nn.Parameter(whole[:16])
    model.decoder.weight = nn.Parameter(torch.cat([whole[16:].clone(), whole[16:]], 1)[:, 24:40])


def two_parts_of_a_frozen_one(model):
    whole = torch.randn(40, 24) * 0.1
    model.whole = nn.Parameter(whole, requires_grad=False)
    model.encoder.weight = nn.Parameter(whole[:16], requires_grad=False)
    model.decoder.weight = nn.Parameter(whole[16:].flatten()[: 24 * 16].view(24, 16))


def interleaved_columns(model):
    both = torch.randn(24, 40, dtype=model.encoder.weight.dtype) * 0.1
    model.encoder.weight = nn.Parameter(both.t()[:16])
    model.decoder.weight = nn.Parameter(both[:, 16:32])


def flat_buffer(model):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    begin = 0
    for p in model.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


SHARED = [transposed_data, parameter_over_a_transpose, rows_of_another]
APART = [columns_of_one_tensor, interleaved_columns, flat_buffer]


def named(function):
    return function.__name__.replace("_", " ")


def built(tie, dtype=torch.float32):
    model = Autoencoder().to(dtype)
    tie(model)
    model.to(dtype)  # parameters that are in this dtype stay where they are
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def losses(level, tie):
    model, optimizer = built(tie)
    ampkit.initialize(model, optimizer, **at("O0" if level in ("float32", "autocast") else level, verbosity=0))
    values = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16) if level == "autocast" else nullcontext():
            output = model(X)
        values.append(F.mse_loss(output.float(), X))
        optimizer.zero_grad()
        backward(values[-1], optimizer)
        optimizer.step()
    ampkit.close()
    return torch.stack(values).detach().double()


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
@pytest.mark.parametrize("tie", SHARED, ids=named)
def test_over_float32_weights_they_stay_one(tie, level):
    exact, cast, found = (losses(way, tie) for way in ("float32", "autocast", level))
    assert (found - exact).norm() <= 2 * (cast - exact).norm() + 0.002 * exact.norm()


def where_they_lie(model):
    return [(p.dtype, p.data_ptr()) for p in model.parameters()]


@pytest.mark.parametrize(
    "level, dtype, alone",
    [(STORED_BF16, torch.float32, False), ("O3", torch.float32, True)]
    + [("O0", torch.bfloat16, False), ("O2", torch.bfloat16, True), ("O5", torch.bfloat16, False)],
)
@pytest.mark.parametrize("tie", SHARED, ids=named)
def test_where_their_dtype_would_change_they_are_refused_and_stay_where_they_were(tie, level, dtype, alone):
    model, optimizer = built(tie, dtype)
    before = where_they_lie(model)
    with pytest.raises(ampkit.ConfigurationError, match=r"two parameters over the same memory.*one parameter"):
        ampkit.initialize(model, *([] if alone else [optimizer]), **at(level, verbosity=0))
    assert where_they_lie(model) == before


@pytest.mark.parametrize("level, dtype", [(STORED_BF16, torch.float32), ("O5", torch.bfloat16)])
@pytest.mark.parametrize("tie", APART, ids=named)
def test_parameters_that_share_no_element_are_taken(tie, level, dtype):
    model, optimizer = built(tie, dtype)
    ampkit.initialize(model, optimizer, **at(level, verbosity=0))


def test_one_in_the_midst_of_another_is_found_behind_a_third():
    model = Autoencoder()
    two_parts_of_a_frozen_one(model)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with pytest.raises(ampkit.ConfigurationError, match=r"'whole' and 'decoder.weight' are two parameters"):
        ampkit.initialize(model, optimizer, **at(STORED_BF16, verbosity=0))


def test_models_are_told_apart():
    first, second = Autoencoder(), Autoencoder()
    second.decoder.weight.data = first.decoder.weight.data
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ampkit.ConfigurationError, match=r"'model 0: decoder.weight' and 'model 1: decoder.weight'"):
        ampkit.initialize([first, second], optimizer, **at(STORED_BF16, verbosity=0))


def test_those_that_stay_float32_are_taken():
    model, optimizer = built(transposed_data)
    ampkit.initialize(model, optimizer, **at(STORED_BF16, verbosity=0, keep_fp32=["encoder", "decoder"]))
    assert model.encoder.weight.data_ptr() == model.decoder.weight.data_ptr()


def test_a_script_of_apexs_is_warned(caplog):
    model, optimizer = built(transposed_data)
    with caplog.at_level(logging.WARNING, "ampkit"):
        ampkit.initialize(model, optimizer, **at(STORED_BF16, verbosity=0, policy="apex"))
    assert caplog.text.count("'encoder.weight' and 'decoder.weight' are two parameters over the same memory") == 1
