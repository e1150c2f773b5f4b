"""The drop-in by its names: how modules are found, what they hold, what pickles load, and for which packages it makes room."""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import pickle
import sys

import pytest
from ampkit.apex.fp16_utils import DynamicLossScaler
from helpers import python

import ampkit.apex
from ampkit.apex import importing

NAMES = {
    "apex": "amp",
    "apex.amp": "initialize scale_loss master_params state_dict load_state_dict init",
    "apex.amp._amp_state": "_amp_state",
    "apex.amp.amp": "init",
    "apex.amp.frontend": "initialize O0 O1 O2 O3 Properties opt_levels",
    "apex.amp.handle": "scale_loss disable_casts AmpHandle",
    "apex.amp.scaler": "LossScaler",
    "apex.amp._initialize": "applier to_type",
    "apex.amp._process_optimizer": "",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp.utils": "maybe_half maybe_float type_string is_fp_tensor",
    "apex.amp.wrap": "cached_cast",
    "apex.amp.compat": "is_tensor_like",
    "apex.amp.rnn_compat": "RNN_NAMES",
    "apex.amp.lists": "",
    "apex.amp.lists.functional_overrides": "FP16_FUNCS FP32_FUNCS",
    "apex.amp.lists.torch_overrides": "CASTS",
    "apex.amp.lists.tensor_overrides": "CASTS",
    "apex.amp.__version__": "VERSION __version__",
    "apex.parallel": "DistributedDataParallel Reducer ReduceOp SyncBatchNorm convert_syncbn_model create_syncbn_process_group",
    "apex.parallel.distributed": "DistributedDataParallel Reducer flat_dist_call split_half_float_double",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.multiproc": "main",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.optimizers": "FusedAdam FusedSGD FusedLAMB FusedNovoGrad FusedAdagrad FusedMixedPrecisionLamb FusedLARS "
    "FP16_Optimizer",
    "apex.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_lars": "FusedLARS",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.contrib.optimizers": "FP16_Optimizer FusedAdam FusedSGD FusedLAMB",
    "apex.contrib.optimizers.fused_adam": "FusedAdam",
    "apex.contrib.optimizers.fused_sgd": "FusedSGD",
    "apex.contrib.optimizers.fused_lamb": "FusedLAMB",
    "apex.contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex.contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "apex.fp16_utils": "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads FP16Model tofp16 "
    "master_params_to_model_params to_python_float clip_grad_norm convert_module convert_network FP16_Optimizer LossScaler "
    "DynamicLossScaler",
    "apex.fp16_utils.fp16util": "BN_convert_float network_to_half tofp16 to_python_float clip_grad_norm",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": "FusedLayerNorm fused_layer_norm fused_layer_norm_affine fused_rms_norm "
    "fused_rms_norm_affine mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm "
    "FusedLayerNormAffineFunction FusedRMSNormAffineFunction",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "amp_C": "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp multi_tensor_l2norm_scale "
    "multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable "
    "multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd multi_tensor_lamb multi_tensor_lamb_mp "
    "multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda multi_tensor_lars update_scale_hysteresis",
    "apex_C": "flatten unflatten",
    "fused_adam_cuda": "adam",
}


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


@pytest.mark.parametrize("module", NAMES)
def test_names_are_found_where_scripts_import_them(module):
    imported = importlib.import_module(module)
    assert sys.modules[module] is imported
    if module != "apex":
        assert imported is importlib.import_module(f"ampkit.apex.{module.removeprefix('apex.')}")
    assert [name for name in NAMES[module].split() if not hasattr(imported, name)] == []


# In apex.contrib amp imported the optimizers; the rest has to be imported by its name.
ATTRIBUTES = [name for name in NAMES if name.startswith("apex.") and not name.endswith(("clip_grad", "_amp_state"))]


@pytest.mark.parametrize("module", ATTRIBUTES)
def test_modules_are_attributes_of_apex(module):
    found = functools.reduce(getattr, module.split(".")[1:], importlib.import_module("apex"))
    assert found is importlib.import_module(module)


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


PROVIDED = r"no 'apex\.(transformer|mlp).*provides.*apex\.amp"
NOT_THERE = {
    "import apex.transformer": PROVIDED,
    "from apex.transformer import parallel_state": PROVIDED,
    "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss": r"no 'apex\.contrib.*torch\.nn\.functional\.cross_entropy",
    "from apex.contrib.sparsity import ASP": r"semi_structured",
    "from apex.contrib.optimizers import DistributedFusedAdam": r"torch\.distributed\.fsdp",
    "from apex.transformer.tensor_parallel.layers import ColumnParallelLinear": r"megatron\.core",
    "from apex import pyprof": r"torch\.profiler",
    "from apex.RNN.models import stackedRNN": r"torch\.nn\.LSTM",
}


@pytest.mark.parametrize("statement", NOT_THERE)
def test_what_is_not_provided_says_so_and_names_what_torch_has_instead(statement):
    with pytest.raises(ModuleNotFoundError, match=NOT_THERE[statement]):
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


# Modules in ``apex/legacy`` keep their old names: imports and pickles of earlier versions load.

IN_PICKLES = {
    "amp_C": "multi_tensor_scale multi_tensor_lamb update_scale_hysteresis",
    "apex_C": "flatten",
    "fused_adam_cuda": "adam",
    "multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "fp16_utils.fp16util": "FP16Model tofp16 network_to_half",
    "fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "contrib.optimizers.fused_adam": "FusedAdam",
    "optimizers.fp16_optimizer": "FP16_Optimizer",
}


@pytest.mark.parametrize(
    "module, name", [(module, name) for module in IN_PICKLES for name in IN_PICKLES[module].split()]
)
def test_names_in_pickles_are_those_of_before(module, name):
    current = getattr(importlib.import_module(f"ampkit.apex.{module}"), name)
    assert pickle.dumps(current, 0).startswith(f"campkit.apex.{module}\n{name}\n".encode())
    theirs = module if module in ("amp_C", "apex_C", "fused_adam_cuda") else f"apex.{module}"
    for of_the_time in (f"ampkit.apex.{module}", theirs):
        assert pickle.loads(f"c{of_the_time}\n{name}\n.".encode()) is current


# Bytes that pickle.dumps wrote of a DynamicLossScaler(2.0**8, 2.0, 3) after an overflow, when its module lay in apex/fp16_utils.
PICKLED = (
    b"ccopy_reg\n_reconstructor\np0\n(campkit.apex.fp16_utils.loss_scaler\nDynamicLossScaler\np1\nc__builtin__\nobject\np2\nNtp3\nRp4\n"
    b"(dp5\nVcur_scale\np6\nF128.0\nsVcur_iter\np7\nI1\nsVlast_overflow_iter\np8\nI0\nsVscale_factor\np9\nF2.0\nsVscale_window\np10\nI3\nsb."
)


@pytest.mark.parametrize("module", ["ampkit.apex.fp16_utils.loss_scaler", "apex.fp16_utils.loss_scaler"])
def test_a_loss_scaler_that_was_pickled_before_goes_on(module):
    scaler = pickle.loads(PICKLED.replace(b"ampkit.apex.fp16_utils.loss_scaler", module.encode()))
    assert type(scaler) is DynamicLossScaler
    for _ in range(3):
        scaler.update_scale(False)
    assert (scaler.cur_scale, scaler.cur_iter) == (256.0, 4)  # three iterations without an overflow double it


def test_a_pickle_loads_in_a_process_that_has_imported_nothing_of_ours():
    done = python("-c", f"import pickle; print(pickle.loads({PICKLED!r}).cur_scale)")
    assert done.stdout == "128.0\n", done.stderr
