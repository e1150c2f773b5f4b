"""initialize: the forms in which things come and return, enabled=False, bad input, and a failure halfway."""

import contextlib
import copy
import functools

import pytest
import torch
from helpers import LEVELS, iterate, sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit.patching import PatchSet
from ampkit.registry import live_sessions

NAMESPACES = (torch, nn.functional, torch.Tensor, torch.linalg, torch.special)


def make_model():
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 1))


def make_pair():
    model = make_model()
    return model, sgd(model.parameters(), momentum=0.9)


def initialized(model=None, **settings):
    model = make_model() if model is None else model
    return ampkit.initialize(model, sgd(model.parameters()), verbosity=0, **settings)


def snapshot(*things):
    """Everything about models and optimizers that an initialize could touch."""
    taken = []
    for thing in things:
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                hooks = [dict(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks")]
                taken.append((module, type(module), set(vars(module)), hooks))
            made = [p for p in thing.parameters() if not isinstance(p, nn.UninitializedParameter)]
            taken += [(p, p.dtype, p.data_ptr(), p.requires_grad) for p in made]
        elif hasattr(thing, "param_groups"):
            held = [list(map(id, group["params"])) for group in thing.param_groups]
            taken += [(thing, type(thing), set(vars(thing)), held), {id(key) for key in thing.state}]
    return taken


def process():
    """The state of the process that initialize changes, beside models and optimizers."""
    functions = [value for space in NAMESPACES for value in vars(space).values() if callable(value)]
    return [ampkit.current_session(), torch.export.export, torch.compiler.config.cache_key_tag, *map(id, functions)]


def same(before, after):
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(same(x, y) for x, y in zip(before, after))
    return before is after if isinstance(before, (torch.Tensor, nn.Module)) else before == after


@pytest.mark.parametrize("level", LEVELS)
def test_forms_return_as_they_came(level):
    model, optimizer = make_pair()
    assert ampkit.initialize(model, opt_level=level, verbosity=0) is model
    assert ampkit.initialize(model, optimizer, opt_level=level, verbosity=0) == (model, optimizer)
    assert ampkit.initialize(model, [], opt_level=level, verbosity=0) == (model, [])
    models, optimizers = [model], [optimizer]
    returned = ampkit.initialize(models, optimizers, opt_level=level, verbosity=0)
    assert returned[0] is models and returned[1] is optimizers
    assert models == [model] and optimizers == [optimizer]
    assert ampkit.initialize((model,), (optimizer,), opt_level=level, verbosity=0) == ((model,), (optimizer,))
    assert ampkit.initialize([model], optimizer, opt_level=level, verbosity=0) == ([model], optimizer)
    assert ampkit.current_session().models == [model]


def test_positional_arguments_are_in_the_order_of_apex():
    dtype = torch.float16
    settings = True, "O2", dtype, False, True, True, 128.0, torch.bfloat16, 3, 0, 0.5, 256.0
    _held = ampkit.initialize(*make_pair(), *settings)
    plan = ampkit.current_session().plan
    assert (plan.opt_level, plan.cast_model_type, plan.patch_torch_functions) == ("O2", dtype, False)
    assert (plan.keep_batchnorm_fp32, plan.master_weights, plan.loss_scale) == (True, True, 128.0)
    assert (plan.cast_model_outputs, plan.num_losses, plan.verbosity) == (torch.bfloat16, 3, 0)
    assert (plan.min_loss_scale, plan.max_loss_scale) == (0.5, 256.0)


def test_disabled_changes_nothing_anywhere():
    model, optimizer = make_pair()
    twin = copy.deepcopy(model)
    before = snapshot(model, optimizer)
    things = [model], (optimizer,)
    returned = ampkit.initialize(*things, enabled=False, opt_level="O2", loss_scale=0)
    assert returned[0] is things[0] and returned[1] is things[1]
    x = torch.randn(2, 4)
    loss = model(x).sum()
    with ampkit.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    assert same(before, snapshot(model, optimizer))
    twin(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters()))
    assert list(ampkit.master_params(optimizer)) == list(model.parameters())
    assert ampkit.state_dict() == {}
    ampkit.load_state_dict({})
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer) is False
    with ampkit.disable_casts():
        assert model(x).dtype is torch.float32


def test_level_in_the_place_of_enabled_is_refused():
    model, optimizer = make_pair()
    before = snapshot(model, optimizer)
    with pytest.raises(ampkit.ConfigurationError, match=r"enabled='O2' is not accepted.* opt_level='O2'"):
        ampkit.initialize(model, optimizer, "O2")
    with pytest.raises(ampkit.ConfigurationError, match="enabled='' is not accepted"):
        ampkit.initialize(model, optimizer, enabled="")
    assert same(before, snapshot(model, optimizer))


def test_disabled_takes_anything_without_a_word_and_does_not_pile_up(caplog):
    for _ in range(5):
        assert ampkit.initialize("no model", 3, enabled=False) == ("no model", 3)
        with ampkit.scale_loss("loss", 3) as scaled:
            assert scaled == "loss"
    model, optimizer = make_pair()
    for _ in range(5):
        ampkit.initialize(model, optimizer, enabled=False)
    assert len(live_sessions) == 1
    ampkit.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}})  # of an enabled run
    assert not caplog.records and ampkit.state_dict() == {}


def test_disabled_ends_the_earlier_session_of_the_model():
    model, optimizer = initialized(opt_level="O2")
    ampkit.initialize(model, optimizer, enabled=False)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "_ampkit" not in vars(optimizer)


def in_ddp():
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)  # no process group here
    nn.Module.__init__(wrapper)
    wrapper.module = make_model()
    return wrapper


WRONG_MODELS = {
    "in DataParallel": (lambda: nn.DataParallel(make_model()), ("DataParallel", "before wrapping")),
    "with a part in DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(make_model())),
        ("'0'", "DataParallel", "before wrapping"),
    ),
    "in DistributedDataParallel": (in_ddp, ("wrapped in DistributedDataParallel", "before wrapping")),
    "float64": (lambda: make_model().double(), ("float64", "model.float()", "O0")),
    "none": (lambda: None, ("a model or a list", "found none")),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
@pytest.mark.parametrize("case", WRONG_MODELS)
def test_model_is_refused(case, level):
    make, words = WRONG_MODELS[case]
    model = make()
    good, optimizer = make_pair()
    before, around = snapshot(model, good, optimizer), process()
    with pytest.raises((ampkit.ConfigurationError, TypeError)) as caught:
        ampkit.initialize([good, model], optimizer, opt_level=level, verbosity=0)
    if case != "none":
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises((ampkit.ConfigurationError, TypeError)) as caught:
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert all(word in str(caught.value) for word in words), caught.value
    assert same(before, snapshot(model, good, optimizer)) and around == process()


def halves(model):
    return torch.optim.SGD([nn.Parameter(torch.ones(size, dtype=torch.float16)) for size in range(7, 40)], lr=0.1)


#: Arguments of initialize, and what is said of them.
WRONG_ARGUMENTS = {
    "a model twice": (lambda m, o: dict(models=[m, m]), r"same model \(Sequential\) was passed twice.*Pass it once"),
    "an optimizer twice": (lambda m, o: dict(optimizers=[o, o]), r"optimizer \(SGD\) was passed twice.*Pass it once"),
    "half of a stranger, whose first is named": (
        lambda m, o: dict(optimizers=halves(m)),
        r"torch\.float16.*shape \(7,\).*none of the models.*parameters of the models",
    ),
    "keep_fp32 of nothing": (lambda m, o: dict(keep_fp32=["hed*"]), r"'hed\*' matches no module"),
}


@pytest.mark.parametrize("level", ("O0", "O1", "O5"))
@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_and_an_earlier_session_lives_on(case, level):
    wrong, words = WRONG_ARGUMENTS[case]
    model, optimizer = make_pair()
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    before, around = snapshot(model, optimizer), process()
    with pytest.raises(ampkit.ConfigurationError, match=words):
        settings = {"models": model, "optimizers": optimizer, "opt_level": level, **wrong(model, optimizer)}
        ampkit.initialize(**settings, verbosity=0)
    assert same(before, snapshot(model, optimizer)) and around == process()
    iterate(lambda: model(torch.ones(1, 4)).sum(), optimizer)


def test_fused_sgd_is_refused_where_it_does_not_step():
    """torch's fused SGD over lower-precision weights on the CPU steps only a few of them."""
    model, words = make_model(), r"fused=True.*leaves most .* as they are. Use fused=False"
    for level, fused in (("O3", True), ("O3", False), ("O2", True), ("O1", True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        refuses = (level, fused) == ("O3", True)
        with pytest.raises(ampkit.ConfigurationError, match=words) if refuses else contextlib.nullcontext():
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)


NOT_INITIALIZED = ampkit.NotInitializedError
IN_ITS_PLACE = r"where it expects the optimizer.*scale_loss\(loss, optimizer\)"
#: Arguments of scale_loss, and what is said of them.
WRONG_CALLS = {
    "never passed": (
        lambda loss, model, optimizer: (loss, [optimizer, torch.optim.Adam(model.parameters())]),
        *(NOT_INITIALIZED, r"This Adam was not passed to initialize.*Pass every"),
    ),
    "an empty list": (lambda loss, *_: (loss, []), NOT_INITIALIZED, "was given no optimizer"),
    "no optimizer": (lambda loss, *_: (loss,), NOT_INITIALIZED, r"no optimizer.*scale_loss\(loss, optimizer\)"),
    "a number": (lambda loss, _, optimizer: (1.0, optimizer), TypeError, r"found float\. Pass the tensor itself"),
    "the wrong order": (lambda loss, _, optimizer: (optimizer, loss), NOT_INITIALIZED, IN_ITS_PLACE),
    "a model": (lambda loss, model, _: (loss, model), NOT_INITIALIZED, IN_ITS_PLACE),
    "parameters": (lambda loss, model, _: (loss, model.parameters()), NOT_INITIALIZED, IN_ITS_PLACE),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_scale_loss_says_what_it_expects(name):
    wrong, error, words = WRONG_CALLS[name]
    model, optimizer = initialized()
    with pytest.raises(error, match=words):
        ampkit.scale_loss(*wrong(model(torch.ones(1, 4)).sum(), model, optimizer)).__enter__()


def test_scale_loss_is_refused_before_initialize():
    with pytest.raises(ampkit.NotInitializedError, match=r"before initialize.*Call model, optimizer"):
        ampkit.scale_loss(torch.ones(()), make_pair()[1]).__enter__()


class FailingOperations(TorchDispatchMode):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.step()
        return function(*args, **(kwargs or {}))


# The ways in which ampkit changes foreign objects: attributes of torch and of optimizers, attributes and classes of modules, hooks
# of any kind, and torch's settings. What it makes of tensors is a matter of operations.
WAYS_OUT = (
    (PatchSet, "set"),
    (nn.Module, "__setattr__"),
    (torch.utils.hooks.RemovableHandle, "__init__"),
    (type(torch.compiler.config), "__setattr__"),
)


@contextlib.contextmanager
def failing_at(number):
    """Count all calls that lead out of ampkit, and fail at the ``number``-th. Yields the count."""
    count = [0]

    def step():
        count[0] += 1
        if count[0] == number:
            raise MemoryError("made to fail")

    def counted(function):
        @functools.wraps(function)
        def stand_in(*args, **kwargs):
            step()
            return function(*args, **kwargs)

        return stand_in

    with pytest.MonkeyPatch.context() as patch, FailingOperations(step):
        for owner, name in WAYS_OUT:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield count


def trained_pairs():
    torch.manual_seed(0)
    second = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    pairs = [make_pair(), (second, torch.optim.AdamW(second.parameters(), lr=0.1))]
    for model, optimizer in pairs:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    models, optimizers = zip(*pairs)
    return list(models), list(optimizers)


def tensors_of(models, optimizers):
    tensors = [tensor for model in models for tensor in model.state_dict().values()]
    tensors += [param.grad for model in models for param in model.parameters()]
    states = [optimizer.state[p] for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]
    return [tensor.clone() for tensor in (*tensors, *(value for state in states for value in state.values()))]


def ways_out_taken(level, **settings):
    models, optimizers = trained_pairs()
    with failing_at(None) as count:
        ampkit.initialize(models, optimizers, opt_level=level, verbosity=0, **settings)
    ampkit.close()
    return count[0]


@pytest.mark.parametrize(
    "level, share, settings",
    [("O0", "all", {})]
    + [(level, "some", {}) for level in ("O1", "O2", "O3", "O5")]  # all of them take a quarter to half a minute
    + [pytest.param(level, "all", {}, marks=pytest.mark.slow) for level in LEVELS if level != "O0"]
    + [("O1", "first", {"keep_fp32": nn.Linear}), ("O3", "some", {"keep_fp32": "2"})],
)
def test_failure_halfway_undoes_everything(level, share, settings):
    times = ways_out_taken(level, **settings)
    numbers = range(1, times + 1)
    chosen = {"all": numbers, "first": numbers[:16], "some": sorted({*numbers[:: times // 8], *numbers[-6:]})}
    for number in chosen[share]:
        models, optimizers = trained_pairs()
        before, around = snapshot(*models, *optimizers), process()
        tensors = tensors_of(models, optimizers)
        with pytest.raises(MemoryError, match="made to fail"), failing_at(number):
            ampkit.initialize(models, optimizers, opt_level=level, verbosity=0, **settings)
        where = f"after a failure at {number} of {times}"
        assert same(before, snapshot(*models, *optimizers)) and around == process(), where
        after = tensors_of(models, optimizers)
        assert all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(tensors, after, strict=True)), where


def test_optimizer_without_weak_references_leaves_no_session():
    class Rigid:
        __slots__ = ("param_groups", "state")
        step = zero_grad = lambda self: None

    optimizer = Rigid()
    optimizer.param_groups, optimizer.state = [{"params": []}], {}
    with pytest.raises(TypeError):
        ampkit.initialize(make_model(), optimizer, verbosity=0)
    assert live_sessions == []


class Slotted:
    __slots__ = ("__weakref__",)
    param_groups, state = (), {}
    step = zero_grad = None


@pytest.mark.parametrize(
    "wrong, found",
    [
        (lambda model, optimizer: (optimizer, model), "found a Adam"),
        (lambda model, optimizer: (model.parameters(), optimizer), "found a generator"),
        (lambda model, optimizer: ("resnet", optimizer), "found 'resnet'"),
        (lambda model, optimizer: ({"net": model}, optimizer), "found a dict"),
        (lambda model, optimizer: (model, model), "a Sequential has no .*step"),
        (lambda model, optimizer: (model, model.parameters()), "a generator has no "),
        (lambda model, optimizer: (model, [optimizer, "adam"]), "'adam' has no param_groups"),
        (lambda model, optimizer: (model, Slotted()), "a Slotted has no __dict__"),
    ],
)
def test_what_is_no_model_or_no_optimizer_is_answered_with_what_to_write(wrong, found):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=rf"{found}.*Write initialize\(model, optimizer, opt_level="):
        ampkit.initialize(*wrong(model, optimizer), verbosity=0)
    assert type(model) is nn.Sequential and ampkit.current_session() is None


@pytest.mark.parametrize("item", ["hed", "Linear", nn.Linear(1, 1), nn.Conv2d], ids=str)
def test_what_keep_fp32_does_not_find_is_refused(item):
    words = r"matches no module and no parameter\. Give modules of the model"
    with pytest.raises(ampkit.ConfigurationError, match=words):
        ampkit.initialize(nn.Sequential(nn.Linear(2, 2)), opt_level="O2", keep_fp32=item, verbosity=0)


def test_weights_on_the_meta_device_are_refused_where_masters_are_made_of_them():
    model, words = nn.Linear(2, 2, device="meta"), r"'weight' is on the meta device .* O2 makes masters.*to_empty"
    with pytest.raises(ampkit.ConfigurationError, match=words):
        ampkit.initialize(model, opt_level="O2", verbosity=0)
    ampkit.initialize(model, opt_level="O1", verbosity=0)  # calls are cast, and no weight


@pytest.mark.parametrize("function", [ampkit.clip_grad_norm_, ampkit.step_was_skipped, ampkit.master_params])
@pytest.mark.parametrize("argument", ["parameters", "model", "list", "none"])
def test_functions_of_an_optimizer_say_so_where_they_are_given_something_else(function, argument):
    model, optimizer = initialized(nn.Linear(2, 2), opt_level="O2")
    thing = {"parameters": model.parameters(), "model": model, "list": [optimizer], "none": None}[argument]
    more = [1.0] if function is ampkit.clip_grad_norm_ else []
    name = function.__name__
    words = rf"{name} expects the optimizer .*, found .*Write {name}\(optimizer, ...\), once"
    with pytest.raises(TypeError, match=words):
        list(function(thing, *more))


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), None, "1"], ids=str)
def test_a_norm_that_no_gradients_can_have_is_refused(max_norm):
    _model, optimizer = initialized(nn.Linear(2, 2))
    with pytest.raises(ampkit.ConfigurationError, match=f"max_norm={max_norm!r} is not accepted"):
        ampkit.clip_grad_norm_(optimizer, max_norm)


def test_scale_loss_without_with_says_how_it_is_written():
    model, optimizer = initialized(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"entered by 'with'.*as scaled_loss: scaled_loss.backward"):
        ampkit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer).backward()
    assert model.weight.grad is None


@pytest.mark.parametrize("late, told", [(True, 1), (False, 0)], ids=("head replaced after", "head replaced before"))
def test_an_optimizer_that_holds_the_frozen_part_of_a_model_alone_is_warned_of(late, told, caplog):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 100))
    model[0].requires_grad_(False)
    made = sgd(model.parameters())
    model[1] = nn.Linear(8, 3)
    ampkit.initialize(model, made if late else sgd(model.parameters()), opt_level="O1", verbosity=0)
    assert caplog.text.count("updates none of the trainable parameters") == told


def test_an_optimizer_of_another_model_is_warned_of(caplog):
    model, other = nn.Linear(2, 2), nn.Linear(2, 3)
    ampkit.initialize(model, torch.optim.SGD(other.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert caplog.text.count("updates none of the trainable parameters of the model, which will not learn") == 1
    caplog.clear()
    image = torch.zeros(1, 2, requires_grad=True)  # optimizes the input of a frozen model
    ampkit.initialize(model.requires_grad_(False), torch.optim.SGD([image], lr=0.1), opt_level="O2", verbosity=0)
    assert "none of the parameters" not in caplog.text


def test_a_level_may_be_written_small():
    model, _optimizer = initialized(opt_level="o2")
    assert ampkit.current_session().plan.opt_level == "O2" and model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("level, is_told", [("O1", False), ("O2", True), ("O3", True), ("O4", False), ("O5", False)])
def test_weights_in_shared_memory_stay_there_or_a_line_tells(level, is_told, caplog):
    model, _optimizer = initialized(make_model().share_memory(), opt_level=level)
    assert all(param.is_shared() for param in model.parameters()) is not is_told
    assert caplog.text.count(f"those that {level} stores are not: call model.share_memory()") == is_told
    model.share_memory()
    assert all(param.is_shared() for param in model.parameters())


@pytest.mark.parametrize(
    "level, dtype, make, is_told",
    [
        ("O3", torch.float16, torch.optim.Adam, True),
        ("O3", torch.float16, lambda params: torch.optim.Adam(params, eps=2.0**-25), True),
        ("O3", torch.float16, lambda params: torch.optim.Adam(params, eps=2.0**-24), False),
        ("O3", torch.float16, ampkit.optimizers.FusedAdam, False),
        ("O3", torch.bfloat16, torch.optim.Adam, False),
        ("O2", torch.float16, torch.optim.Adam, False),
    ],
)
def test_an_eps_that_float16_has_not_is_told_and_what_is_advised_keeps_weights_finite(
    level, dtype, make, is_told, caplog
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = make(model.parameters())
    ampkit.initialize(model, optimizer, opt_level=level, cast_model_type=dtype, loss_scale=128.0, verbosity=0)
    iterate(lambda: model(torch.randn(16, 8)).float().pow(2).mean(), optimizer, times=3)
    assert ("weights become NaN" in caplog.text) == is_told
    assert all(param.isfinite().all() for param in model.parameters()) != is_told
