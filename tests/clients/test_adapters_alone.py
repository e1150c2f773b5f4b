"""Adapters where their framework is not installed."""

import importlib
import sys

import pytest
import torch
from helpers import backward

import ampkit
from ampkit.integrations.clipping import updated

FRAMEWORKS = ("lightning", "lightning.pytorch", "pytorch_lightning", "accelerate", "timm", "timm.utils", "transformers")


@pytest.fixture
def without_frameworks(monkeypatch):
    for name in FRAMEWORKS:
        monkeypatch.setitem(sys.modules, name, None)  # so that an import of it fails
    for name in [name for name in sys.modules if name.startswith("ampkit.integrations.")]:
        monkeypatch.delitem(sys.modules, name)


def test_what_to_install_is_said(without_frameworks):
    with pytest.raises(
        ImportError, match=r"for lightning\.pytorch, which is not installed here: pip install lightning"
    ):
        importlib.import_module("ampkit.integrations.lightning")
    integrations = importlib.import_module("ampkit.integrations")
    with pytest.raises(ImportError, match="pip install timm"):
        integrations.framework("timm.utils", install="timm")


def test_what_a_framework_lacks_itself_is_not_hidden(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import something_that_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_it_needs"):
        importlib.import_module("ampkit.integrations").framework("half_installed", install="half_installed")


@pytest.mark.parametrize("adapter", ("accelerate", "timm", "transformers"))
def test_an_adapter_that_is_given_the_frameworks_objects_imports_without_it(adapter, without_frameworks):
    assert importlib.import_module(f"ampkit.integrations.{adapter}").__doc__


def test_clipping_by_value_is_done_in_float32():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ampkit.initialize(model, optimizer, opt_level="O5", policy="apex", verbosity=0)
    backward(model(torch.ones(1, 2)).sum(), optimizer)
    torch.nn.utils.clip_grad_value_(updated([optimizer], model.parameters()), 0.1)
    optimizer.step()
    assert model.state_dict()["weight"].tolist() == [[pytest.approx(0.9, abs=1e-7)] * 2]  # 0.1 is 0.1001 in bfloat16
