"""Models that change after initialize at O2: pruned, reparametrized, resized, wrapped, shared; and averages in them."""

import copy
import logging
import pickle

import pytest
import torch
from helpers import assert_same, iterate, iterate_in_torch, sgd, values_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_weight_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import ampkit

BF16 = torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(8, 4)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def o2(model, optimizer=None, **settings):
    return ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0, **settings)


def train(model, optimizer, times=3):
    if times:
        iterate(lambda: model(X).float().square().mean(), optimizer, times)


def train_in_float32(model, optimizer, times=3):
    if times:
        iterate_in_torch(lambda: model(X).square().mean(), optimizer, times)


def assert_close_to(model, twin):
    """Assert that values and outputs of a model at O2 are close to the same model in float32, after the same steps."""
    values, wanted = model.state_dict(), twin.state_dict()
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        made_since = name.endswith("_mask")  # of ones_like(weight), by torch.nn.utils.prune
        assert made_since or values[name].dtype is value.dtype, name
        torch.testing.assert_close(
            values[name].float(), value, atol=0.01, rtol=0.02, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(model(X).float(), twin(X), atol=0.02, rtol=0.02)


def assert_closes_to_float32(model):
    expected = values_of(model)
    ampkit.close()
    assert {tensor.dtype for name, tensor in expected.items() if not name.endswith("_mask")} == {torch.float32}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    model(X)


# Names move: pruning, weight norm, parametrizations


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


CHANGES = {
    "pruned": (None, lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5)),
    "pruning removed": (
        lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5),
        lambda m: prune.remove(m[0], "weight"),
    ),
    "weight norm put on": (None, lambda m: weight_norm(m[0])),
    "weight norm removed": (lambda m: weight_norm(m[0]), lambda m: remove_weight_norm(m[0])),
    "parametrized": (None, lambda m: parametrize.register_parametrization(m[0], "weight", Doubled())),
    "parametrization removed": (
        lambda m: parametrizations.spectral_norm(m[0].eval()),
        lambda m: parametrize.remove_parametrizations(m[0], "weight"),
    ),
    "two originals removed": (
        lambda m: parametrizations.weight_norm(m[0]),
        lambda m: parametrize.remove_parametrizations(m[0], "weight"),
    ),
    "one of two removed": (
        lambda m: [parametrize.register_parametrization(m[0], name, Doubled()) for name in ("weight", "bias")],
        lambda m: parametrize.remove_parametrizations(m[0], "weight"),
    ),
    "kept one removed": (
        lambda m: parametrizations.weight_norm(m[0]),
        lambda m: parametrize.remove_parametrizations(m[0], "weight"),
    ),
}


@pytest.mark.parametrize("steps", (0, 2))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_changed_layer_trains_as_in_float32(change, steps):
    before, after = CHANGES[change]
    pairs = []
    for _ in range(2):
        model = make_net()
        if before is not None:
            before(model)
        pairs.append((model, sgd(model.parameters())))
    (model, optimizer), (twin, twin_optimizer) = pairs
    keep = "0" if change == "kept one removed" else ()
    o2(model, optimizer, keep_fp32=keep)
    train(model, optimizer, steps)
    train_in_float32(twin, twin_optimizer, steps)
    after(model), after(twin)
    train(model, optimizer)
    train_in_float32(twin, twin_optimizer)
    assert_close_to(model, twin)
    with torch.no_grad():
        model(X)  # else a pruned layer's weight is part of a graph, which torch does not copy
    copied = copy.deepcopy(model)
    assert {param.dtype for param in copied.parameters()} == {torch.float32}
    assert copied.state_dict().keys() == twin.state_dict().keys()
    assert type(model[0]).__name__ == type(twin[0]).__name__ == type(copied[0]).__name__
    assert_closes_to_float32(model)
    assert [cls.__name__ for cls in type(model[0]).__mro__] == [cls.__name__ for cls in type(twin[0]).__mro__]


def tied_to_first(model):
    layer = nn.Linear(4, 6)
    layer.weight = model[0].weight
    return layer


#: Ways in which a new module takes the first layer's weight, and the name of the weight there.
TAKES = {
    "pruning": (lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5), "0.weight_orig"),
    "parametrization": (
        lambda m: parametrize.register_parametrization(m[0], "weight", nn.Identity()),
        "0.parametrizations.weight.original",
    ),
    "second parametrization": (
        lambda m: [parametrize.register_parametrization(m[0], "weight", nn.Identity()) for _ in range(2)],
        "0.parametrizations.weight.original",
    ),
    "layer that is appended": (lambda m: m.append(tied_to_first(m)), "3.weight"),
    "layer in a block": (
        lambda m: m.add_module("more", nn.Sequential(nn.ModuleList([tied_to_first(m)]))),
        "more.0.0.weight",
    ),
    "layer in the place of another": (lambda m: setattr(m, "2", tied_to_first(m)), "2.weight"),
}


@pytest.mark.parametrize("taken", TAKES)
@pytest.mark.parametrize(
    "save", [nn.Module.state_dict, lambda m: copy.deepcopy(m).state_dict()], ids=["saved", "copied"]
)
def test_weight_that_a_new_module_took_is_saved_in_float32_at_once(taken, save):
    model = make_net()
    o2(model, sgd(model.parameters()))
    expected = model.state_dict()["0.weight"].clone()
    assert not torch.equal(expected, expected.bfloat16().float())
    take, name = TAKES[taken]
    with torch.no_grad():  # else a pruned layer's weight is part of a graph, which torch does not copy
        take(model)
    saved = save(model)[name]
    assert saved.dtype is torch.float32
    assert torch.equal(saved, expected)


class SavedByItself(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()


@pytest.mark.parametrize("is_tied", (False, True), ids=("alone", "tied"))
def test_a_layer_that_writes_what_it_saves_by_itself_stays_and_is_saved_in_float32(is_tied):
    model = nn.Sequential(SavedByItself(4, 4, bias=False), nn.Linear(4, 4))
    if is_tied:
        model[1].weight = model[0].weight
    expected = model[0].weight.detach().clone()
    o2(model, sgd(model.parameters()))
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float32 if is_tied else torch.bfloat16]
    for saved in (model.state_dict()["0.weight"], model[0].state_dict(prefix="0.")["0.weight"]):
        assert saved.dtype is torch.float32 and torch.equal(saved, expected)


@pytest.mark.parametrize("since", (False, True), ids=("hook from before", "hook since"))
def test_values_under_keys_that_a_hook_renames_are_loaded_in_float32(since):
    model, values = make_net(), {"old": torch.full((6, 4), 1 + 2.0**-20)}
    for initialized in (False, True):
        if initialized:
            o2(model, sgd(model.parameters()))
        if initialized is since:
            model.register_load_state_dict_pre_hook(lambda _, state, *__: state.update({"0.weight": state.pop("old")}))
    model.load_state_dict(dict(values), strict=False)
    assert torch.equal(model.state_dict()["0.weight"], values["old"])


def test_model_that_is_parametrized_itself():
    models = [parametrizations.weight_norm(nn.Linear(4, 3)) for _ in range(2)]
    model, twin = models  # torch gives each a class of its own, which a copy would share
    twin.load_state_dict(model.state_dict())
    optimizer, twin_optimizer = (sgd(m.parameters()) for m in (model, twin))
    o2(model, optimizer)
    train(model, optimizer)
    train_in_float32(twin, twin_optimizer)
    assert_close_to(copy.deepcopy(model), twin)
    for one in (model, twin):
        parametrize.remove_parametrizations(one, "weight")
    assert_close_to(model, twin)
    ampkit.close()
    assert type(model) is nn.Linear


# A tensor of another shape


def resized(model, rows=5):
    """Resize as transformers' resize_token_embeddings does: the same parameter, with other data."""
    old = model[0]
    fresh = nn.Embedding(rows, old.embedding_dim, dtype=old.weight.dtype)
    with torch.no_grad():
        fresh.weight.zero_()
        fresh.weight[: min(rows, old.num_embeddings)] = old.weight[:rows]
    old.weight.data = fresh.weight.data
    old.num_embeddings = rows


@pytest.mark.parametrize("rows", (2, 5))
@pytest.mark.parametrize("trained", (True, False), ids=("trained", "frozen"))
def test_parameter_of_another_shape_works_and_does_not_break_the_undo(trained, rows):
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(trained)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (sgd([p for p in m.parameters() if p.requires_grad]) for m in (model, twin))
    o2(model, optimizer)
    resized(model, rows), resized(twin, rows)
    tokens = torch.arange(rows)
    iterate(lambda: model(tokens).square().mean(), optimizer, times=3)
    iterate_in_torch(lambda: twin(tokens).square().mean(), twin_optimizer, times=3)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=0.01, rtol=0.02)
    resized(model, rows + 1)
    ampkit.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32} and len(model[0].weight) == rows + 1
    model[0].weight.grad = None
    o2(model, optimizer)
    torch.testing.assert_close(model(tokens), twin(tokens), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("steps", (0, 1))
def test_a_gradient_of_the_shape_before_does_not_break_the_undo(steps):
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    with ampkit.scale_loss(model(torch.arange(3)).sum(), optimizer) as loss:
        loss.backward()
    for _ in range(steps):
        optimizer.step()
    resized(model)
    ampkit.close()
    assert model[0].weight.shape == (5, 4) and model[0].weight.grad is None
    assert torch.equal(model[1].bias.grad, torch.full((2,), 3.0))


def test_one_tensor_of_another_dtype_does_not_break_the_undo():
    model = make_net()
    optimizer = sgd(model.parameters())
    o2(model, optimizer)
    model[0].half()
    expected = [*(p.detach().float() for p in model[0].parameters()), *make_net()[2].parameters()]
    with pytest.raises(ampkit.ConfigurationError, match=r"'0\.weight' is torch\.float16"):
        model(X)
    ampkit.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same(list(model.parameters()), expected)


# Modules of two calls


def test_wrapper_around_an_initialized_module_has_one_master_for_a_weight():
    encoder, twin = make_net(), nn.Sequential(make_net(), nn.Linear(3, 2))
    wrapper = nn.Sequential(encoder, copy.deepcopy(twin[1]))
    first, twin_optimizer = sgd(encoder.parameters()), sgd(twin.parameters())
    o2(encoder, first)
    second = sgd(wrapper.parameters())
    o2(wrapper, second)
    assert ampkit.current_session().models == [wrapper] and {p.dtype for p in encoder.parameters()} == {BF16}
    train(wrapper, second)
    train_in_float32(twin, twin_optimizer)
    assert_close_to(wrapper, twin)
    o2(wrapper, [first, second])  # and both optimizers update the same masters
    masters = [list(ampkit.master_params(optimizer)) for optimizer in (first, second)]
    assert all(a is b for a, b in zip(*masters)) and len(masters[1]) == len(masters[0]) + 2
    assert_closes_to_float32(wrapper)


def test_encoder_of_two_calls_belongs_to_the_second(caplog):
    encoder = make_net()
    models = [nn.Sequential(encoder, nn.Linear(3, 2)) for _ in range(2)]
    optimizers = [sgd(model.parameters()) for model in models]
    twin = copy.deepcopy(models[1])
    twin_optimizer = sgd(twin.parameters())
    o2(models[0], optimizers[0])
    with caplog.at_level(logging.WARNING, "ampkit"):
        o2(models[1], optimizers[1])
    assert "Sequential shares modules" in caplog.text and "in one call" in caplog.text
    train(models[1], optimizers[1])
    train_in_float32(twin, twin_optimizer)
    assert_close_to(models[1], twin)
    assert models[0][1].weight.dtype is torch.float32
    with pytest.raises(ampkit.NotInitializedError), ampkit.scale_loss(models[1](X).sum(), optimizers[0]):
        pass


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_forwards_that_are_no_plain_functions_are_called_as_python_does(level):
    class Static(nn.Linear):
        forward = staticmethod(lambda x: x @ x.t())

    class Property(nn.Linear):
        @property
        def forward(self):
            return lambda x: nn.functional.linear(x, self.weight)

    x = torch.eye(4)
    for kind, shape in ((Static, (4, 4)), (Property, (4, 3))):
        stored = vars(kind)["forward"]
        for model in (kind(4, 3), nn.Sequential(kind(4, 3))):
            ampkit.initialize(model, opt_level=level, verbosity=0)
            assert model(x).shape == shape
            ampkit.close()
        assert vars(kind)["forward"] is stored


def test_what_an_optimizer_trains_is_stored_in_lower_precision():
    """Parameters that it holds and does not move are not: MoCo's optimizer gets all, and the key encoder is an average."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].requires_grad_(False)
    o2(model, sgd(model[1:].parameters()))
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.float32, BF16]


# Averages


@pytest.mark.parametrize(
    "settings",
    ({}, {"use_buffers": True}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": get_ema_avg_fn(0.9)}),
    ids=("defaults", "use_buffers", "multi_avg_fn", "avg_fn"),
)
def test_averaged_models_defaults_average_the_float32_values(settings):
    model = nn.Sequential(make_net(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    o2(model, optimizer)
    average = AveragedModel(model, **settings)
    exact = None
    for times in range(5):
        train(model, optimizer, 1)
        average.update_parameters(model)
        values = {name: value.double() for name, value in model.state_dict().items()}
        share = 0.1 if settings.keys() & {"multi_avg_fn", "avg_fn"} else 1 / (times + 1)
        exact = {n: v if exact is None else exact[n] * (1 - share) + v * share for n, v in values.items()}
    for name, param in average.module.named_parameters():
        places = 2**-8 if "avg_fn" in settings else 1e-6  # torch multiplies one tensor at a time in its own dtype
        torch.testing.assert_close(param.detach().double(), exact[name], atol=1e-6, rtol=places)
    if not settings:
        assert torch.equal(average.module[1].running_mean, model[1].running_mean)
    plain = AveragedModel.update_parameters
    ampkit.close()
    assert AveragedModel.update_parameters is not plain


@pytest.mark.parametrize("dtype, places", [(torch.float32, 1e-7), (torch.bfloat16, 2.0**-8)], ids=str)
def test_an_average_kept_by_hand_takes_float32_values(dtype, places):
    """Float32 averages are exact; torch rounds bfloat16 ones, as in bfloat16."""
    model = make_net()
    average = model[0].weight.detach().to(dtype, copy=True)
    model, optimizer = o2(model, sgd(model.parameters()))
    expected = 0.75 * average.double() + 0.25 * next(ampkit.master_params(optimizer)).detach().double()
    get_ema_multi_avg_fn(0.75)([average], [model[0].weight], 1)
    assert (average.double() - expected).abs().max() < places
    assert model[0].weight.dtype is torch.bfloat16


#: Ways to write to a weight whose float32 value was written to as well.
WRITES = {
    "in place": lambda p: p.detach().neg_(),
    "through data": lambda p: p.data.neg_(),
    "to another element": lambda p: p.data[1, 1].fill_(3.0),
    "put in place": lambda p: setattr(p, "data", -p.data),
}


def linear_at_o2():
    net = nn.Linear(2, 2, bias=False)
    return o2(net, sgd(net.parameters()))


@pytest.mark.parametrize("then", ["forward", "step"])
@pytest.mark.parametrize("write", WRITES)
def test_a_weight_and_its_float32_value_that_were_both_written_to_are_refused(write, then):
    model, optimizer = linear_at_o2()
    next(ampkit.master_params(optimizer)).data[0] = 2.0
    WRITES[write](model.weight)
    act = {"forward": lambda: model(torch.ones(1, 2)), "step": optimizer.step}[then]
    with pytest.raises(ampkit.ConfigurationError, match="both written to since the last forward or step"):
        act()
    model.load_state_dict({"weight": torch.ones(2, 2)})
    act()


def test_where_one_weight_is_refused_what_was_written_to_the_others_is_not_taken_either():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model, optimizer = o2(net, sgd(net.parameters()))
    before = model[0].weight.detach().clone()
    for one, value in zip([*ampkit.master_params(optimizer), model[1].weight], (2.0, 2.0, 3.0), strict=True):
        nn.init.constant_(one, value)
    with pytest.raises(ampkit.ConfigurationError, match="both written to"):
        model(torch.ones(1, 2))
    assert torch.equal(model[0].weight, before) and torch.all(model[1].weight == 3.0)


def test_attributes_of_a_weight_are_pickled_and_not_copied_as_in_torch():
    for model in (make_net(), o2(net := make_net(), sgd(net.parameters()))[0]):
        model[0].weight.tag = ["mine"]
        assert not hasattr(copy.deepcopy(model)[0].weight, "tag")
        assert pickle.loads(pickle.dumps(model[0].weight)).tag == ["mine"]


def test_close_ends_a_session_whose_weights_were_written_to_on_both_sides():
    model, optimizer = linear_at_o2()
    for one, value in ((next(ampkit.master_params(optimizer)), 2.0), (model.weight, 3.0)):
        nn.init.constant_(one, value)
    ampkit.close()
    assert type(model) is nn.Linear
    assert model.weight.dtype is torch.float32


def test_a_weight_and_its_master_that_were_given_the_same_values_are_not_refused():
    model, optimizer = linear_at_o2()
    with torch.no_grad():
        for one in (next(ampkit.master_params(optimizer)), model.weight):
            one.fill_(2.0)
    assert model(torch.tensor([[1.0, 1.0]])).tolist() == [[4.0, 4.0]]


def test_a_weight_given_float32_values_before_an_evaluation_in_inference_mode_trains_on():
    net = nn.Linear(2, 2, bias=False)
    model, optimizer = o2(net, torch.optim.SGD(net.parameters(), lr=1.0))
    model.weight.data = torch.full((2, 2), 2.0)
    with torch.inference_mode():
        model(torch.ones(1, 2))
    iterate(lambda: model(torch.ones(1, 2)).sum(), optimizer)
    # 2 - 1 within half of the last place of 2, which is 2^-6.
    assert (model.state_dict()["weight"] - 1.0).abs().max() <= 2.0**-7


class Decoder(nn.Sequential):
    """A decoder that multiplies by the weight of an encoder, which it does not call."""

    def forward(self, x):
        return nn.functional.linear(x, self[0].weight.t())


def test_float32_values_of_a_part_that_is_a_model_itself_are_taken_by_the_whole():
    encoder = nn.Linear(2, 3)
    decoder = Decoder(encoder)
    o2([encoder, decoder], sgd(decoder.parameters()))
    encoder.weight.data = torch.full((3, 2), 1.0 + 2.0**-12)
    decoder(torch.ones(1, 3))
    assert encoder.weight.dtype is torch.bfloat16
    assert torch.equal(decoder.state_dict()["0.weight"], torch.full((3, 2), 1.0 + 2.0**-12))
