"""Adapters where their framework is not installed."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import backward, net_with_norm, random_batch
from torch.optim.swa_utils import AveragedModel

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


def test_the_plugin_for_lightning_meets_sessions_as_they_are(without_frameworks, monkeypatch):
    """The plugin's uses of models and sessions, in the order of Lightning's calls, with a stand-in for its base class."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.norm = net_with_norm(), torch.nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.part(x))

    class Precision:
        def backward(self, tensor, *_):
            tensor.backward()

        def _wrap_closure(self, model, optimizer, closure):
            return closure()

    class WeightAveraging:
        """Lightning's callback: the float32 values behind the weights are not written to."""

        def _copy_average_to_current(self, module):
            for average, current in zip(self._average_model.module.parameters(), module.parameters()):
                current.data.copy_(average.data)

    stand_in = SimpleNamespace(
        plugins=SimpleNamespace(Precision=Precision), callbacks=SimpleNamespace(WeightAveraging=WeightAveraging)
    )
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stand_in)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=stand_in))
    precision = importlib.import_module("ampkit.integrations.lightning").AmpkitPrecision("O2", verbosity=0)
    net = Net()
    averaging = WeightAveraging()
    net.trainer = SimpleNamespace(callbacks=[object(), averaging])
    averaging._average_model = AveragedModel(Net())
    averaged = {name: value.clone().add_(1) for name, value in averaging._average_model.module.state_dict().items()}
    averaging._average_model.module.load_state_dict(averaged)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.connect(net, [optimizer], [])
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def closure():
        with precision.forward_context():
            loss = net.norm(net.part(random_batch()[0])).float().sum() * torch.inf  # parts of it, and not its forward
        optimizer.zero_grad()
        precision.backward(loss, net, optimizer)

    def assert_as_before():
        after, statistics = net.state_dict(), {name for name, _ in net.named_buffers()}
        assert all(torch.equal(value, before[name]) for name, value in after.items() if name not in statistics)
        assert all(value.isfinite().all() for value in after.values())

    precision.optimizer_step(optimizer, net, closure)
    assert ampkit.step_was_skipped(optimizer)
    assert_as_before()
    state = precision.state_dict()
    assert state["loss_scaler0"]["loss_scale"] == 2.0**15
    precision.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}})
    averaging._swap_models(net)  # for a validation
    averaging._swap_models(net)
    assert_as_before()
    averaging._copy_average_to_current(net)
    precision.teardown()
    assert all(torch.equal(value, averaged[name]) for name, value in net.state_dict().items())
    assert vars(averaging).keys() == {"_average_model"}
    assert precision.state_dict()["loss_scaler0"]["loss_scale"] == 64.0
    assert {param.dtype for param in net.parameters()} == {torch.float32}
    sys.modules.pop("ampkit.integrations.lightning")  # the next one is for the Lightning that is there
