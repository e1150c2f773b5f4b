"""torch.compile, torch.export and torch.jit on initialized models: one graph, eager's dtypes and losses, nothing stale."""

import collections
import contextlib
import copy
import functools
import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from everyday.networks import Transformer
from helpers import (
    STORED_BF16,
    ResNet,
    backward,
    initialize_quietly,
    iterate,
    o1,
    others_slow,
    outputs_after_close,
    sgd,
)
from torch import nn

import ampkit
from ampkit.errors import ConfigurationError
from ampkit.registry import live_sessions

LEVELS = ("O1", "O2", "O5")


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):  # dynamo leaves forwards of torch.nn's own classes uncompiled when they come first
        return super().forward(x)


def make_mlp():
    return MLP(), torch.randn(8, 16), torch.arange(8) % 4


def make_gpt():
    ids, model = torch.randint(32, (2, 9)), Transformer()
    model.head.weight = model.table.weight
    return model, ids[:, :-1], ids[:, 1:]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODELS = {
    "mlp": make_mlp,
    "resnet": lambda: (ResNet(), torch.randn(8, 3, 8, 8), torch.arange(8) % 4),
    "gpt": make_gpt,
    "lstm": lambda: (Recurrent(), torch.randn(4, 6, 8), torch.arange(4)),
}


class Graphs:
    def __init__(self, backend="aot_eager"):
        self.count = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.count += 1
        return self._compile(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def what_the_plain_model_needs(name):
    """Set what an LSTM needs to be trained in one graph on the CPU."""
    is_lstm = name == "lstm"
    with torch._dynamo.config.patch(allow_rnn=is_lstm), torch.backends.mkldnn.flags(enabled=not is_lstm):
        yield


def initialized(make, level, **settings):
    torch.manual_seed(0)
    model, inputs, targets = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if level is not None:
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    return model, optimizer, inputs, targets


def step_of_forward(forward, optimizer, inputs, targets):
    optimizer.zero_grad()
    outputs = forward(inputs)
    loss = F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
    if ampkit.api.session_of(optimizer) is None:
        loss.backward()
    else:
        backward(loss, optimizer)
    optimizer.step()
    return outputs, loss


def train_forward(forward, optimizer, inputs, targets, steps=3):
    outputs, losses = zip(*(step_of_forward(forward, optimizer, inputs, targets) for _ in range(steps)))
    return [o.dtype for o in outputs], [loss.item() for loss in losses]


def train_eagerly(make, level):
    model, *rest = initialized(make, level)
    try:
        return train_forward(model, *rest)
    finally:
        ampkit.close()


def gradient_of_a_step(forward, optimizer, inputs, targets):
    outputs, _ = step_of_forward(forward, optimizer, inputs, targets)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return outputs.dtype, torch.cat([p.grad.double().flatten() for p in params])


@pytest.mark.parametrize(
    ("name", "level"),
    [*((name, level) for name in MODELS for level in LEVELS), *(("mlp", level) for level in ("O0", "O3", "O4"))],
)
def test_model_trains_in_one_graph_as_it_does_uncompiled(name, level):
    graphs = Graphs()
    with what_the_plain_model_needs(name):
        model, *rest = initialized(MODELS[name], None)
        _, exact = gradient_of_a_step(model, *rest)
        model, *rest = initialized(MODELS[name], level)
        dtype, eager = gradient_of_a_step(model, *rest)
        ampkit.close()
        model, *rest = initialized(MODELS[name], level)
        forward = torch.compile(model, fullgraph=True, backend=graphs)
        compiled_dtype, compiled = gradient_of_a_step(forward, *rest)
        train_forward(forward, *rest, steps=2)
    assert graphs.count == 1
    assert compiled_dtype is dtype
    # Roundings may fall elsewhere, and no more of them: lower precision costs as much as it does uncompiled.
    assert (compiled - eager).norm() <= (eager - exact).norm() + 1e-6 * exact.norm()
    assert (dtype is torch.bfloat16) == (level in ("O1", "O4", "O5"))


@pytest.mark.parametrize("level", others_slow("O1", of=("O1", "O2", "O5")))
def test_inductor_trains_as_uncompiled(level):
    dtypes, losses = train_eagerly(make_mlp, level)
    model, *rest = initialized(make_mlp, level)
    compiled_dtypes, compiled_losses = train_forward(torch.compile(model, fullgraph=True), *rest)
    assert compiled_dtypes == dtypes
    assert compiled_losses == pytest.approx(losses, rel=1e-2)


@functools.cache
def graphs_of_an_ordinary_training(name, level):
    """The graphs of a training with the events that may happen between two calls in its loop."""
    model, optimizer, inputs, targets = initialized(MODELS[name], level)
    graphs = Graphs("eager")
    forward = torch.compile(model, fullgraph=True, backend=graphs)

    def validate():
        model.eval()
        with torch.no_grad():
            forward(inputs)
        model.train()

    def load_scale():
        state = ampkit.state_dict()
        state["loss_scaler0"]["loss_scale"] = 4.0
        ampkit.load_state_dict(state)

    def load():
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.01

    def write():
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)

    with what_the_plain_model_needs(name):
        for event in (None, None, None, validate, model.zero_grad, level and load_scale, load, write):
            if event is not None:
                event()
            step_of_forward(forward, optimizer, inputs, targets)
    ampkit.close()
    torch._dynamo.reset()
    return graphs.count


@pytest.mark.parametrize("level", ("O0", *LEVELS))
@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_training_recompiles_no_more_than_a_plain_model(name, level):
    plain = graphs_of_an_ordinary_training(name, None)
    assert 1 <= graphs_of_an_ordinary_training(name, level) <= plain


# -- before and after initialize


def compiled_module(model):
    return torch.compile(model, fullgraph=True, backend="eager")


def compiled_in_place(model):
    model.compile(fullgraph=True, backend="eager")
    return model


def compiled_submodule(model):
    model[0] = compiled_module(model[0])
    return model


def compiled_function(model):
    return compiled_module(lambda x: model(x))


# The backend that compiles fastest: how dynamo traces and guards is the same with all of them.
HOW = (compiled_module, compiled_in_place, compiled_submodule, compiled_function)


@pytest.mark.parametrize(
    ("compiled", "passed", "level"),
    [
        *((how, "the model", level) for how in HOW for level in ("O1", "O2")),
        *((compiled_module, "what is compiled", level) for level in LEVELS),
    ],
)
@pytest.mark.parametrize("called_before", others_slow(True, of=[False, True]))
def test_compiled_before_initialize_is_as_compiled_after(called_before, compiled, passed, level):
    want = train_eagerly(make_mlp, level)
    torch.manual_seed(0)
    model, inputs, targets = make_mlp()
    forward = compiled(model)
    if called_before:
        with torch.no_grad():
            assert forward(inputs).dtype is torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    initialized_one = model if passed == "the model" else forward
    returned, _ = ampkit.initialize(initialized_one, optimizer, opt_level=level, verbosity=0)
    assert returned is initialized_one
    dtypes, losses = train_forward(forward, optimizer, inputs, targets)
    assert dtypes == want[0] and losses == pytest.approx(want[1], rel=4e-3)


def test_float32_gradients_of_float16_weights_wait_while_dynamo_traces():
    """At a loss scale a block leaves float32 gradients: "dtype mismatch between tensor and its gradient"."""
    weights = []
    for wrap in (lambda model: model, compiled_module):
        model, optimizer, inputs, targets = initialized(
            make_mlp, "O2", cast_model_type=torch.float16, loss_scale=1024.0
        )
        forward = wrap(model)
        for part in (slice(4), slice(5, 8)):  # two blocks to a step, and a new shape, so that dynamo traces again
            backward(F.cross_entropy(forward(inputs[part]), targets[part]), optimizer)
            assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
        optimizer.step()
        weights.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
        ampkit.close()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


ONE_PASS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("compiled", ["model", "iteration", "iteration of any size"])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O5"])
@pytest.mark.filterwarnings("error:Dynamo")
def test_one_pass_steps_beside_compiled_code_are_those_of_float64(level, compiled, name):
    """Gradients are exact in any precision: the loss is linear in the weights, and the batch small integers."""
    model = nn.Linear(7, 5)
    twin = copy.deepcopy(model).double()
    reference = ONE_PASS[name](twin.parameters())
    model, optimizer = initialize_quietly(model, ONE_PASS[name], level)
    forward = compiled_module(model) if compiled == "model" else model

    def iteration(x, factors):
        iterate(lambda: (forward(x) * factors).float().sum(), optimizer)

    if compiled != "model":  # blocks and steps are no part of its graphs
        iteration = torch.compile(iteration, backend="eager", dynamic=compiled != "iteration" or None)
    for _ in range(4):
        x, factors = torch.randint(-3, 4, (4, 7)).float(), torch.randint(-3, 4, (4, 5)).float()
        iteration(x, factors)
        reference.zero_grad()
        (twin(x.double()) * factors.double()).sum().backward()
        reference.step()
    for found, expected in zip(ampkit.master_params(optimizer), twin.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_classes_of_models_do_not_share_their_graphs(level):
    class Other(MLP):
        pass

    with torch._dynamo.config.patch(recompile_limit=1):  # graphs kept for one function
        for kind in (MLP, Other):
            model = ampkit.initialize(kind(), opt_level=level, verbosity=0)
            compiled_module(model)(torch.randn(2, 16))


# -- nothing stale


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compiled", HOW)
def test_after_close_compiled_code_computes_in_float32(compiled, level):
    model, optimizer, inputs, targets = initialized(make_mlp, level)
    forward = compiled(model)
    step_of_forward(forward, optimizer, inputs, targets)
    ampkit.close()
    plain = MLP()
    plain.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()})

    def recompile():
        model[0] = getattr(model[0], "_orig_mod", model[0])
        return compiled(model)

    torch.testing.assert_close(outputs_after_close(forward, recompile, inputs), plain(inputs))


@pytest.mark.parametrize("level", ["O1", "O2", None], ids=["O1", "O2", "casts without a model"])
def test_dynamo_is_as_it_was_after_close(level):
    before, model = torch._dynamo.eval_frame._callback_from_stance, nn.Linear(2, 2)
    if level is not None:
        compiled_module(ampkit.initialize(model, opt_level=level, verbosity=0))(torch.ones(2))
        ampkit.close()
    with o1() if level is None else contextlib.nullcontext():
        compiled_module(model)(torch.ones(2))
    assert torch._dynamo.eval_frame._callback_from_stance is before


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_session_that_dies_while_dynamo_compiles_ends_before_the_next_compiled_call(level, monkeypatch):
    before, model, dying, x = torch._dynamo.eval_frame._callback_from_stance, MLP(), MLP(), torch.randn(2, 16)
    ampkit.initialize(model, opt_level="O0", verbosity=0)
    dying.itself = [dying]  # a cycle: only the collector can free it
    ampkit.initialize(dying, opt_level=level, verbosity=0)
    graphs, failed, sessions = [], [], []

    def backend(graph, _):
        graphs.append(graph)
        gc.collect()
        sessions.append(len(live_sessions))
        return graph.forward

    forward = torch.compile(model, backend=backend)
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    del dying
    for most in (1, 2, 3, 3):  # torch 2.13 compiles once more: it reads dispatch keys before the session ends
        forward(x)
        assert min(most, 2) <= len(graphs) <= most
    assert sessions[:2] == [2, 1] and not failed
    assert torch.mm(x, x.T).dtype is torch.float32
    ampkit.close()
    assert torch._dynamo.eval_frame._callback_from_stance is before


def test_another_level_reaches_compiled_code():
    model, x = MLP(), torch.randn(2, 16)
    forward = compiled_module(model)
    for level, dtype in (("O1", torch.bfloat16), ("O2", torch.float32), ("O1", torch.bfloat16), ("O0", torch.float32)):
        ampkit.initialize(model, opt_level=level, verbosity=0)
        assert forward(x).dtype is dtype
        assert torch.equal(forward(x), model(x))


WRITES = {
    "in place": lambda model: [param.detach().mul_(1.5) for param in model.parameters()],
    "loaded": lambda model: model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}),
    "data replaced": lambda model: [setattr(param, "data", param.data * 1.5) for param in model.parameters()],
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("compiled", others_slow(compiled_module, of=HOW))
def test_weights_written_between_two_compiled_forwards_are_seen(compiled, write, level):
    model = MLP()
    for param in model.parameters():
        param.data = param.data.bfloat16().float()  # exact in bfloat16, and so is 1.5 times that, nearly always
    ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    forward, x = compiled(model), torch.randn(4, 16)
    before = forward(x).float()
    WRITES[write](model)
    after = forward(x)
    assert not torch.allclose(after.float(), before)
    assert torch.equal(after, model(x))


def test_changed_dtype_is_refused_by_name_when_compiled():
    model = ampkit.initialize(MLP(), opt_level="O2", verbosity=0)
    forward, x = compiled_module(model), torch.randn(2, 16)
    forward(x)
    model[3].half()
    with pytest.raises(ConfigurationError, match=r"'3\.weight' is torch\.float16"):
        forward(x)


def test_code_on_disk_is_kept_apart_by_what_is_cast(monkeypatch):
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda *_: torch.compiler.config.cache_key_tag)

    def tag():
        return torch._TorchCompileInductorWrapper.__call__(None, None, ())

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            assert tag() == tags[0]  # where nothing is cast
            return super().step(closure)

    tags = [tag()]
    for settings in ({}, {"patch_torch_functions_type": torch.float16}, {"policy": "apex"}):
        model, optimizer = initialize_quietly(MLP(), Optimizer, "O1", loss_scale=1.0, **settings)
        tags.append(tag())
        with ampkit.disable_casts():
            assert tag() == tags[0]
        iterate(lambda: model(torch.randn(2, 16)).float().sum(), optimizer)  # noqa: B023
        assert tag() == tags[-1]
        ampkit.close()
        assert tag() == tags[0]
    assert len(set(tags)) == 4


# -- copies, containers


Pair = collections.namedtuple("Pair", "first second")
CONTAINERS = {
    "tuple": lambda y: (y, y),
    "list": lambda y: [y, 1],
    "dict": lambda y: {"y": y, "n": None},
    "named tuple": lambda y: Pair(y, y),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_pass_in_and_out_of_one_graph(name, level):
    class Contained(nn.Linear):
        def forward(self, x, extra=None):
            return CONTAINERS[name](super().forward(x) + extra["y"])

    model = ampkit.initialize(Contained(4, 4), opt_level=level, verbosity=0)
    x, extra = torch.randn(2, 4), {"y": torch.randn(2, 4)}
    want, got = model(x, extra=extra), compiled_module(model)(x, extra=extra)
    assert type(got) is type(want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- export, trace, script


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_exported_program_holds_the_casts_and_outlives_the_session(level, strict):
    model, _, inputs, _ = initialized(make_mlp, level)
    want = model(inputs)
    program = torch.export.export(model, (inputs,), strict=strict)
    assert torch.equal(program.module()(inputs), want)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    made = [node.meta.get("val") for graph in graphs for node in graph.nodes if "linear" in node.name]
    assert torch.bfloat16 in {value.dtype for value in made if isinstance(value, torch.Tensor)}
    ampkit.close()
    assert torch.equal(program.module()(inputs), want)
    assert model(inputs).dtype is torch.float32


def test_export_sees_masters_written_since_the_last_forward():
    model, optimizer = initialize_quietly(nn.Linear(4, 4, bias=False), sgd, "O2")
    nn.init.constant_(next(ampkit.master_params(optimizer)), 0.5)
    program = torch.export.export(model, (torch.ones(1, 4),))
    assert program.module()(torch.ones(1, 4)).tolist() == [[2.0] * 4]


@pytest.mark.parametrize("level", LEVELS)
def test_script_of_an_initialized_model_says_what_to_do(level):
    model = ampkit.initialize(nn.Linear(8, 8), opt_level=level, verbosity=0)
    with pytest.raises(ConfigurationError, match=r"torch\.export\.export"):
        torch.jit.script(nn.Sequential(model))
    ampkit.close()
    assert torch.jit.script(model)(torch.randn(2, 8)).dtype is torch.float32


def test_a_compiled_method_of_a_model_computes_as_the_eager_one_at_o5():
    class Coder(nn.Sequential):
        def forward(self, x):
            return self.decode(self.encode(x))

        def encode(self, x):
            return self[0](x)

        def decode(self, x):
            return self[1](x)

    model, x = Coder(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    ampkit.initialize(model, opt_level="O5", verbosity=0)
    for function in (model, model.encode, lambda x: model.decode(model.encode(x))):
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        assert found.dtype is torch.bfloat16 and torch.equal(found, function(x))
