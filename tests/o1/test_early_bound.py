"""Functions of torch bound before initialize: rebound while O1 is active, given back by close, pickled all along."""

import collections
import copy
import dataclasses
import functools
import gc
import io
import logging
import multiprocessing
import pickle
import subprocess
import sys
import threading
import types
import typing
import weakref

import pytest
import torch
from helpers import o1
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear, softmax, softplus
from torch.utils.data import DataLoader, Dataset

import ampkit
from ampkit import Policy
from ampkit.casting import early_bound

pytestmark = pytest.mark.switch

X = torch.linspace(-2.0, 2.0, 6).reshape(2, 3)
W = torch.linspace(-1.0, 1.0, 9).reshape(3, 3)

Table = collections.namedtuple("Table", "name function")


class ActivationTable(collections.OrderedDict):
    pass


@dataclasses.dataclass(frozen=True)
class Config:
    function: object


# name -> what a module holds, made from a function, and how the function is found in it again
HOLDERS = {
    "attribute": (lambda f: f, lambda held: held),
    "partial": (lambda f: functools.partial(f, X), lambda held: held.func),
    "argument of a partial": (lambda f: functools.partial(map, f), lambda held: held.args[0]),
    "keyword of a partial": (lambda f: functools.partial(sorted, key=f), lambda held: held.keywords["key"]),
    "list": (lambda f: [1, f], lambda held: held[1]),
    "tuple": (lambda f: (f, "x"), lambda held: held[0]),
    "named tuple": (lambda f: Table("x", f), lambda held: held.function),
    "dict": (lambda f: {"f": f}, lambda held: held["f"]),
    "key of a dict": (lambda f: {f: 1}, lambda held: list(held)[-1]),
    "subclass of dict": (lambda f: ActivationTable(f=f, g=None), lambda held: held["f"]),
    "partial in a dict": (lambda f: {"f": functools.partial(f)}, lambda held: held["f"].func),
    "partial in a tuple": (lambda f: (functools.partial(f),), lambda held: held[0].func),
    "frozen dataclass": (lambda f: Config(f), lambda held: held.function),
    "namespace": (lambda f: types.SimpleNamespace(function=f), lambda held: held.function),
}

FUNCTIONS = [(F, "linear"), (F, "softmax"), (torch, "mm"), (torch.Tensor, "matmul"), (torch.Tensor, "norm")]


@pytest.fixture
def module():
    """A loaded module called ``scripted`` to put early-bound names into."""
    sys.modules["scripted"] = types.ModuleType("scripted")
    yield sys.modules["scripted"]
    del sys.modules["scripted"]


@pytest.mark.parametrize("owner, name", FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("holder", HOLDERS)
def test_modules_attributes_follow_and_come_back(holder, owner, name, module):
    make, find = HOLDERS[holder]
    original = getattr(owner, name)
    held = module.held = make(original)
    with o1():
        assert getattr(owner, name) is not original
        assert find(module.held) is getattr(owner, name)
        assert holder == "attribute" or type(module.held) is type(held)
    assert find(module.held) is original
    assert module.held == held


@pytest.mark.parametrize("holder", HOLDERS)
def test_attributes_of_submodules_follow_and_come_back(holder):
    make, find = HOLDERS[holder]
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model[1][0].held = make(F.softplus)
    original = F.softplus
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    assert find(model[1][0].held) is F.softplus is not original
    ampkit.close()
    assert find(model[1][0].held) is F.softplus is original


def test_from_imports_are_cast():
    assert linear(X, W).dtype is torch.float32
    with o1():
        assert linear(X, W).dtype is torch.bfloat16
        assert softmax(X.bfloat16(), dim=-1).dtype is torch.float32
        assert softplus(X.bfloat16()).dtype is torch.float32
    assert linear is F.linear is torch._C._nn.linear
    assert softmax(X.bfloat16(), dim=-1).dtype is torch.bfloat16


def test_activation_of_a_transformer_layer_is_cast():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=F.softplus, dropout=0.0)
    ampkit.initialize(layer, opt_level="O1", verbosity=0)
    assert layer.activation is F.softplus
    assert layer.activation(torch.ones(2).bfloat16()).dtype is torch.float32
    ampkit.close()
    assert layer.activation(torch.ones(2).bfloat16()).dtype is torch.bfloat16


def test_torchs_own_modules_are_left():
    with o1():
        assert torch._C._nn.linear is not F.linear
        assert torch.functional.einsum is not torch.einsum


def test_what_was_bound_meanwhile_is_given_back(module):
    original = F.linear
    with o1():
        module.linear = F.linear
        module.table = {"linear": F.linear}
    assert module.linear is module.table["linear"] is original


def test_one_name_works_over_two_engines(module):
    module.linear = F.linear
    for dtype in (torch.bfloat16, torch.float16):
        with o1(dtype):
            assert module.linear(X, W).dtype is dtype
    assert module.linear(X, W).dtype is torch.float32


def test_second_session_rebinds_its_model_and_the_first_keeps_its_own():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    first.act = second.act = original = F.softplus
    ampkit.initialize(first, opt_level="O1", verbosity=0)
    one = ampkit.current_session()
    assert second.act is original
    ampkit.initialize(second, opt_level="O1", verbosity=0)
    assert first.act is second.act is F.softplus is not original
    one.close()
    assert first.act is original and second.act is F.softplus is not original
    ampkit.close()
    assert second.act is F.softplus is original


def test_model_at_another_level_is_left():
    model = nn.Linear(3, 3)
    model.act = original = F.softplus
    ampkit.initialize(model, opt_level="O2", verbosity=0)
    ampkit.initialize(nn.Linear(3, 3), opt_level="O1", verbosity=0)
    assert model.act is original


def test_copies_made_meanwhile_are_given_back_wherever_they_are():
    model = nn.Linear(3, 3)
    model.act, model.table = F.softplus, {"act": functools.partial(F.softmax, dim=-1)}
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert twin.act is loaded.act is F.softplus
    ampkit.close()
    for each in (model, twin, loaded):
        assert each.act is F.softplus and each.table["act"].func is F.softmax
        pickle.loads(pickle.dumps(each))


def test_registration_after_initialize_reaches_early_bound_names(module):
    module.relu, module.linear = F.relu, F.linear
    original = F.relu
    try:
        with o1() as casting:
            ampkit.register_float_function(F, "relu")
            assert module.relu is F.relu is not original
            assert module.relu(X.bfloat16()).dtype is torch.float32
            # Registered anew: who holds the wrapper of the first rule follows.
            ampkit.register_half_function(F, "relu")
            assert module.relu is F.relu and module.relu(X).dtype is torch.bfloat16
            assert module.linear is F.linear
            assert casting.is_on()
    finally:
        _forget_registrations()
    assert module.relu is F.relu is original


def test_registered_rule_wins_among_the_wrappers_of_one_function(module):
    assert F.conv2d is torch.conv2d
    module.conv2d = F.conv2d
    try:
        ampkit.register_float_function(F, "conv2d")
        with o1():
            assert module.conv2d is F.conv2d
            image = torch.ones(1, 1, 3, 3, dtype=torch.bfloat16)
            assert module.conv2d(image, image).dtype is torch.float32
    finally:
        _forget_registrations()


def test_rule_registered_while_patched_wins_among_the_wrappers_of_one_function(module):
    assert F.conv2d is torch.conv2d
    module.conv2d = F.conv2d
    try:
        with o1():
            ampkit.register_float_function(torch, "conv2d")
            assert module.conv2d is torch.conv2d and module.conv2d is not F.conv2d
            image = torch.ones(1, 1, 3, 3, dtype=torch.bfloat16)
            assert module.conv2d(image, image).dtype is torch.float32
    finally:
        _forget_registrations()


def test_registered_class_is_left(module):
    module.Function, kept = Config, Config
    owner = types.SimpleNamespace(Config=Config)
    try:
        ampkit.register_float_function(owner, "Config")
        with o1():
            assert module.Function is kept
    finally:
        _forget_registrations()


def _forget_registrations():
    from ampkit.casting import engine

    engine._registered.clear()


# What the walk must not do


def test_lazy_and_odd_modules_are_survived_and_stay_unloaded(module):
    asked = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

        def __getattribute__(self, name):
            if not name.startswith("__"):
                asked.append(name)
            return super().__getattribute__(name)

        def __setattr__(self, name, value):
            raise AssertionError

    class NoDict:
        __slots__ = ()

        def __getattr__(self, name):
            asked.append(name)
            raise RuntimeError

    class Proxy:
        @property
        def __class__(self):
            asked.append("__class__")
            raise RuntimeError

        def __eq__(self, other):
            asked.append("__eq__")
            raise RuntimeError

        __hash__ = None

    lazy = Lazy("lazy")
    vars(lazy).update(linear=F.linear, proxy=Proxy(), proxies=[Proxy()], table={"proxy": Proxy()})
    odd = {"odd1": lazy, "odd2": NoDict(), "odd3": None, "odd4": 5, "odd5": Proxy(), "odd6": {"f": F.linear}}
    sys.modules.update(odd)
    try:
        with o1():
            assert vars(lazy)["linear"] is F.linear
        assert vars(lazy)["linear"] is F.linear
    finally:
        for name in odd:
            del sys.modules[name]
    assert asked == []


def test_main_is_searched():
    main = sys.modules["__main__"]
    main.early_bound_linear = F.linear
    try:
        with o1():
            assert main.early_bound_linear is F.linear
    finally:
        del main.early_bound_linear


def test_modules_that_change_in_another_thread_are_survived(module):
    done = threading.Event()

    def churn():
        count = 0
        while not done.is_set():
            count += 1
            vars(module)[f"name{count % 997}"] = F.linear
            vars(module).pop(f"name{(count * 7) % 997}", None)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(3):
            with o1():
                pass
    finally:
        done.set()
        thread.join()
    assert all(value is F.linear for name, value in vars(module).items() if name.startswith("name"))


def test_value_put_there_by_somebody_else_meanwhile_stays(module):
    module.linear = F.linear
    with o1():
        module.linear = mine = lambda *args: None
    assert module.linear is mine


def test_long_containers_are_not_searched(module):
    module.vocabulary = [F.linear] * 100_000
    original = F.linear
    with o1():
        assert module.vocabulary[0] is original


def test_walk_keeps_nothing_alive(module):
    class Held(nn.Linear):
        pass

    model = Held(3, 3)
    model.act = module.act = functools.partial(F.softplus)
    refs = weakref.ref(model), weakref.ref(module.act)
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    keep_active = nn.Linear(1, 1)
    ampkit.initialize(keep_active, opt_level="O1", verbosity=0)
    del model, module.act
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


WALKS = """
import torch
import torch.nn.functional as F
from ampkit.casting import early_bound
from ampkit.casting.engine import Casting

walks = []
early_bound.swap_in_holders = lambda swap: walks.append(len(swap))


def engine(hold):
    casting = Casting(torch.bfloat16, device_types=("cpu",))
    casting.install()
    held = F.linear if hold else None  # a local: in the module it would be given back
    casting.close()
    return held


engine(hold=False)
print(walks)
engine(hold=True)
print(walks)
"""


def test_heap_is_walked_only_for_wrappers_that_somebody_holds():
    # In a process of its own: once something was compiled, torch's tables hold some.
    run = subprocess.run([sys.executable, "-c", WALKS], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "[1]"]


# What is out of reach


def closure_over(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class HoldsInClass:
    act = staticmethod(F.softplus)
    table: typing.ClassVar = {"softplus": F.softplus}

    def method(self, act=F.softplus):
        return act

    def keyword(self, *, act=F.softplus):
        return act


def decorated_default(x, act=F.softplus):
    return act(x)


decorated = torch.no_grad()(decorated_default)
held_in_closure = closure_over(F.softplus)

OUT_OF_REACH = {
    f"{__name__}.HoldsInClass.act (in the class)",
    f"{__name__}.HoldsInClass.table (in the class)",
    f"{__name__}.HoldsInClass.method (as a default)",
    f"{__name__}.HoldsInClass.keyword (as a default)",
    f"{__name__}.decorated_default (as a default)",
    f"{__name__}.closure_over.<locals>.call (in its closure)",
}


@pytest.fixture
def nothing_logged_yet():
    for names in (early_bound._logged, early_bound._searched):
        names.clear()


def test_what_stays_is_logged_once_by_name(caplog, nothing_logged_yet):
    class Local(nn.Linear):
        act = staticmethod(F.softplus)

    local = f"{__name__}.{Local.__qualname__}.act (in the class)"
    with caplog.at_level(logging.INFO, logger="ampkit"):
        ampkit.initialize(Local(2, 2), opt_level="O1", verbosity=0)
        first = [record.getMessage() for record in caplog.records if "before initialize()" in record.getMessage()]
        ampkit.close()
        ampkit.initialize(Local(2, 2), opt_level="O1", verbosity=0)
        both = [record.getMessage() for record in caplog.records if "before initialize()" in record.getMessage()]
    assert len(first) == 1 and both == first
    named = {name for name in first[0].split(": ", 1)[1].split(", ") if name.startswith(__name__ + ".")}
    assert named == OUT_OF_REACH | {local}


def test_what_stands_in_the_place_of_torchvisions_functions_is_not_logged(caplog, nothing_logged_yet):
    pytest.importorskip("torchvision")
    with caplog.at_level(logging.INFO, logger="ampkit"):
        ampkit.initialize(nn.Linear(1, 1), opt_level="O1")
    assert "torchvision" not in caplog.text
    ampkit.close()


def test_what_is_cast_by_what_it_calls_is_not_logged(caplog, nothing_logged_yet):
    class Local(nn.Linear):
        loss = staticmethod(F.cross_entropy)
        norm = staticmethod(F.layer_norm)

    with caplog.at_level(logging.INFO, logger="ampkit"):
        ampkit.initialize(Local(2, 2), opt_level="O1", verbosity=0)
    assert "HoldsInClass.act" in caplog.text and "<locals>.Local" not in caplog.text


def test_what_is_not_cast_by_what_it_calls_any_more_is_logged(caplog, nothing_logged_yet):
    class Local(nn.Linear):
        softmax = staticmethod(F.softmax)

    with caplog.at_level(logging.INFO, logger="ampkit"):
        ampkit.initialize(Local(2, 2), opt_level="O1", verbosity=0, policy={"torch.nn.functional.softmax": "bfloat16"})
    assert "<locals>.Local.softmax (in the class)" in caplog.text


# Functions that are cast by what they call, wherever they are held

torch.manual_seed(0)
ROWS = torch.randn(16, 8).bfloat16()
CLASSES = torch.arange(16) % 8
IMAGE = torch.randn(2, 2, 6, 6).bfloat16()
VOLUME = torch.randn(2, 2, 8, 8, 8).bfloat16()
# name -> arguments; results in bfloat16 would be off by 1e-3 and more
CAST_BELOW = {
    "cross_entropy": (ROWS, CLASSES),
    "nll_loss": (ROWS, CLASSES),
    "mse_loss": (ROWS, ROWS.flip(0)),
    "l1_loss": (ROWS, ROWS.flip(0)),
    "smooth_l1_loss": (ROWS, ROWS.flip(0)),
    "huber_loss": (ROWS, ROWS.flip(0)),
    "soft_margin_loss": (ROWS, ROWS.flip(0).sign()),
    "multi_margin_loss": (ROWS, CLASSES),
    "multilabel_margin_loss": (ROWS, torch.stack([torch.randperm(8) for _ in range(16)])),
    "adaptive_avg_pool3d": (VOLUME, 2),
    "interpolate": (IMAGE, None, 1.7, "bicubic"),
    "grid_sample": (IMAGE, torch.rand(2, 4, 4, 2).bfloat16(), "bilinear", "zeros", False),
    "softmax": (ROWS, -1),
    "layer_norm": (ROWS, (8,)),
}


def in_a_local(function):
    held = function
    return lambda *args: held(*args)


def in_a_default(function):
    def call(*args, function=function):
        return function(*args)

    return call


@pytest.mark.parametrize("hold", [in_a_local, closure_over, in_a_default])
@pytest.mark.parametrize("name", CAST_BELOW)
def test_function_out_of_reach_is_cast_by_what_it_calls(name, hold):
    arguments = CAST_BELOW[name]
    held = hold(getattr(F, name))
    exact = held(*(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments))
    with o1():
        result = held(*arguments)
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(getattr(F, name)(*arguments), result)


def test_every_kind_of_interpolation_out_of_reach_is_cast():
    interpolate = closure_over(F.interpolate)
    shapes = {1: ("nearest", "nearest-exact", "linear"), 2: ("nearest", "nearest-exact", "bilinear", "bicubic")}
    with o1():
        for dims, modes in {**shapes, 3: ("nearest", "nearest-exact", "trilinear")}.items():
            for mode in modes:
                x = torch.randn(1, 1, *[6] * dims).bfloat16()
                assert interpolate(x, scale_factor=2.0, mode=mode).dtype is torch.float32
        for mode in ("bilinear", "bicubic"):
            assert interpolate(IMAGE, size=(3, 3), mode=mode, antialias=True).dtype is torch.float32


def test_banned_loss_is_refused_out_of_reach_too():
    held = closure_over(F.binary_cross_entropy)
    p, y = torch.rand(4).bfloat16(), torch.ones(4).bfloat16()
    with o1(), pytest.raises(ampkit.RefusedOperation, match="binary_cross_entropy_with_logits"):
        held(p, y)
    with o1(policy=Policy(banned="fp32")):
        assert held(p, y).dtype is torch.float32
    with o1(policy=Policy(banned="allow")):
        assert held(p, y).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "change, dtype", [("native", torch.bfloat16), ("fp32", torch.float32), ("bfloat16", torch.bfloat16)]
)
@pytest.mark.parametrize("name", ["mse_loss", "huber_loss"])
def test_changed_row_of_a_loss_holds_out_of_reach(name, change, dtype):
    held = closure_over(getattr(F, name))
    x = ROWS.float() if change == "bfloat16" else ROWS
    with o1(policy={f"torch.nn.functional.{name}": change}):
        assert held(x, x.flip(0)).dtype is dtype
        assert getattr(F, name)(x, x.flip(0)).dtype is dtype


def test_row_of_a_kernels_own_wins_over_its_functions():
    held = closure_over(F.mse_loss)
    with o1(policy={"torch.nn.functional.mse_loss": "fp32", "torch._C._nn.mse_loss": "native"}):
        assert held(ROWS, ROWS).dtype is torch.bfloat16
        assert F.mse_loss(ROWS, ROWS).dtype is torch.float32
    assert held(ROWS, ROWS).dtype is torch.bfloat16


def test_changed_row_of_grid_sample_is_not_overruled_by_what_it_calls():
    image, grid = IMAGE.float(), torch.rand(2, 4, 4, 2)
    with o1(policy={"torch.nn.functional.grid_sample": "bfloat16"}):
        assert F.grid_sample(image, grid, align_corners=False).dtype is torch.bfloat16


def test_registered_loss_is_cast_out_of_reach_at_once():
    held = closure_over(F.mse_loss)
    try:
        with o1():
            assert held(ROWS, ROWS).dtype is torch.float32
            ampkit.register_half_function(F, "mse_loss")
            assert held(ROWS.float(), ROWS.float()).dtype is torch.bfloat16
    finally:
        _forget_registrations()
    assert torch._C._nn.mse_loss(ROWS, ROWS).dtype is torch.bfloat16


def test_gradients_of_a_loss_out_of_reach_come_in_the_activations_dtype():
    held = closure_over(F.cross_entropy)
    x = ROWS.clone().requires_grad_()
    exact = ROWS.double().requires_grad_()
    held(exact, CLASSES).backward()
    with o1():
        held(x, CLASSES).backward()
    assert x.grad.dtype is torch.bfloat16
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


def test_loss_out_of_reach_compiles():
    held = closure_over(F.cross_entropy)
    exact = held(ROWS.double(), CLASSES)
    with o1():
        result = torch.compile(lambda x: held(x, CLASSES), fullgraph=True, backend="eager")(ROWS)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=0)


# Pickling, as long as torch is patched


class Holder:
    def __init__(self, function):
        self.function = function


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("owner, name", FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_originals_and_wrappers_are_pickled(owner, name, protocol):
    original = getattr(owner, name)
    held = [[[Holder(original)]]]
    with o1():
        wrapper = getattr(owner, name)
        written = pickle.dumps([held, wrapper, Holder(wrapper)], protocol)
        file = io.BytesIO()
        pickle.Pickler(file, protocol).dump([held, wrapper, Holder(wrapper)])
        pure = pickle._dumps([held, wrapper, Holder(wrapper)], protocol)
        inside = pickle.loads(written)
        assert inside[1] is inside[2].function is wrapper
    for stream in (written, file.getvalue(), pure):
        [[[outer]]], bare, last = pickle.loads(stream)
        x = X[:, :2] if name == "mm" else X
        arguments = {"linear": (X, W), "mm": (x, x), "matmul": (X, W), "softmax": (X, -1), "norm": (X,)}[name]
        for function in (outer.function, bare, last.function):
            assert torch.equal(function(*arguments), original(*arguments))
        assert bare is last.function is original


def test_streams_name_nothing_of_ampkit():
    original = F.softmax
    with o1():
        written = pickle.dumps([Holder(original), F.softmax, torch.Tensor.norm])
    assert b"ampkit" not in written


def test_model_is_saved_and_loaded_while_patched():
    model = nn.Linear(3, 3)
    model.act, unreachable = F.softplus, Holder([Holder(F.softmax)])
    softplus_before, softmax_before = F.softplus, F.softmax
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    file = io.BytesIO()
    torch.save([model, unreachable], file)
    ampkit.close()
    file.seek(0)
    loaded, holder = torch.load(file, weights_only=False)
    assert loaded.act is softplus_before and holder.function[0].function is softmax_before
    assert torch.equal(loaded.weight, model.weight)


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.transform(X + index)


@pytest.mark.slow
def test_spawned_workers_take_originals_and_wrappers():
    functions = [functools.partial(F.softmax, dim=-1)]
    expected = torch.stack([functions[0](X + index) for index in range(4)])
    hidden = Transformed(Holder(functools.partial(F.softmax, dim=-1)).function)
    with o1():
        shown = Transformed(functools.partial(F.softmax, dim=-1))
        for dataset in (hidden, shown):
            loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
            [batch] = list(loader)
            assert torch.equal(batch, expected)


def test_picklers_are_given_back():
    before = pickle.Pickler, pickle.dump, pickle.dumps
    with o1():
        assert pickle.Pickler is not before[0]

        class Custom(pickle.Pickler):
            pass

    assert (pickle.Pickler, pickle.dump, pickle.dumps) == before
    assert not hasattr(pickle._Pickler, "reducer_override")
    assert "reducer_override" not in vars(multiprocessing.reduction.ForkingPickler)
    file = io.BytesIO()
    Custom(file).dump([F.softmax])
    assert pickle.loads(file.getvalue()) == [F.softmax]


def test_function_that_cannot_be_pickled_is_refused_as_ever():
    with o1():
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"local object|Can't pickle"):
            pickle.dumps(lambda: None)
