"""Imports of the drop-in: how it is found, and for which packages it makes room."""

import importlib
import importlib.metadata
import importlib.util
import logging
import sys

import pytest

import ampkit.apex
from ampkit.apex import importing

MODULES = """
    apex apex.amp apex.amp._amp_state apex.amp.amp apex.amp.frontend apex.amp.handle apex.amp.scaler apex.amp._initialize
    apex.amp._process_optimizer apex.amp.opt apex.amp.utils apex.amp.wrap apex.amp.compat apex.amp.rnn_compat apex.amp.lists
    apex.amp.lists.functional_overrides apex.amp.lists.torch_overrides apex.amp.lists.tensor_overrides
""".split()


@pytest.fixture
def not_installed(apex_installed):
    ampkit.apex.uninstall()
    yield
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        del sys.modules[name]


@pytest.fixture
def another_apex(not_installed, tmp_path, monkeypatch):
    """Write a package called apex, with or without amp, where Python finds it."""

    def write(with_amp):
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex" / "__init__.py").write_text("origin = 'another'\n")
        if with_amp:
            (tmp_path / "apex" / "amp.py").write_text("origin = 'another'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    return write


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_importable(name):
    module = importlib.import_module(name)
    assert sys.modules[name] is module
    if name != "apex":
        assert module is importlib.import_module("ampkit." + name)


def test_libraries_that_look_for_apex_find_it():
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.amp") is not None
    assert importlib.util.find_spec("apex.transformer") is None  # asking is no error
    assert importlib.metadata.version("apex") == "0.1"
    assert "apex" in importlib.metadata.packages_distributions()


def test_the_state_is_an_object_and_its_module_a_module():
    import apex
    from apex import amp
    from apex.amp._amp_state import _amp_state as by_module

    assert apex.amp is amp and amp._amp_state is by_module
    assert "state_dict" in amp.__dict__


@pytest.mark.parametrize(
    "statement",
    [
        "import apex.transformer",
        "from apex import transformer",
        "from apex.transformer import parallel_state",
        "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss",
        "from apex.contrib import xentropy",
        "import apex.mlp",
    ],
)
def test_what_is_not_provided_says_so(statement):
    with pytest.raises(ImportError, match=r"no 'apex\.(transformer|contrib|mlp).*provides.*apex\.amp"):
        exec(statement)


@pytest.mark.parametrize(
    "statement, instead",
    [
        ("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss", r"torch\.nn\.functional\.cross_entropy"),
        ("from apex.contrib import xentropy", r"torch\.nn\.functional\.cross_entropy"),
        ("from apex.contrib.sparsity import ASP", r"semi_structured"),
        ("from apex.contrib.optimizers import DistributedFusedAdam", r"torch\.distributed\.fsdp"),
        ("import apex.contrib.optimizers.distributed_fused_adam", r"torch\.distributed\.fsdp"),
        ("from apex.transformer.tensor_parallel.layers import ColumnParallelLinear", r"megatron\.core"),
        ("from apex import pyprof", r"torch\.profiler"),
        ("from apex.RNN.models import stackedRNN", r"torch\.nn\.LSTM"),
    ],
)
def test_what_is_not_provided_names_what_torch_has_instead(statement, instead):
    with pytest.raises(ModuleNotFoundError, match=instead):
        exec(statement)


@pytest.mark.parametrize("name", importing.INSTEAD)
def test_what_has_a_replacement_is_not_there(name):
    """The advice would otherwise hide a module."""
    assert importing.our_name(name) is None


def test_attributes_that_are_not_there_are_attribute_errors():
    import apex
    import apex.contrib

    assert not hasattr(apex, "transformer") and not hasattr(apex.contrib, "xentropy")
    with pytest.raises(AttributeError, match=r"torch\.nn\.LSTM"):
        apex.RNN  # noqa: B018


def test_uninstall_takes_everything_away(not_installed):
    assert not [name for name in sys.modules if name.startswith("apex.") or name in ("amp_C", "apex_C")]
    with pytest.raises(ImportError):
        importlib.import_module("apex.amp")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")


def test_install_twice_is_install_once():
    assert ampkit.apex.install() and ampkit.apex.install()
    ampkit.apex.uninstall()
    assert not ampkit.apex.is_installed()


@pytest.mark.parametrize("imported", [False, True])
def test_an_apex_without_amp_is_replaced_and_comes_back(another_apex, imported, caplog):
    another_apex(with_amp=False)
    if imported:
        assert importlib.import_module("apex").origin == "another"
    with caplog.at_level(logging.INFO, "ampkit"):
        assert ampkit.apex.install()
    assert len(caplog.records) == 1 and "no amp" in caplog.text
    assert hasattr(importlib.import_module("apex").amp, "initialize")
    ampkit.apex.uninstall()
    assert importlib.import_module("apex").origin == "another"


def test_an_apex_with_amp_is_kept_unless_replaced(another_apex, caplog):
    another_apex(with_amp=True)
    assert not ampkit.apex.install()
    assert importlib.import_module("apex.amp").origin == "another"
    assert "stays in use" in caplog.text
    assert ampkit.apex.install(replace=True)
    assert hasattr(importlib.import_module("apex.amp"), "initialize")
    ampkit.apex.uninstall()
    assert importlib.import_module("apex.amp").origin == "another"
