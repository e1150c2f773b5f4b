"""Modules in ``apex/legacy`` keep their old names: imports and pickles of earlier versions load."""

import importlib
import pickle
import subprocess
import sys

import pytest
from ampkit.apex.fp16_utils import DynamicLossScaler
from helpers import ROOT

import ampkit.apex

NAMES = {
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
ROWS = [(module, name) for module, names in NAMES.items() for name in names.split()]


@pytest.mark.parametrize("module, name", ROWS)
def test_names_in_pickles_are_those_of_before(module, name):
    current = getattr(importlib.import_module(f"ampkit.apex.{module}"), name)
    assert pickle.dumps(current, 0).startswith(f"campkit.apex.{module}\n{name}\n".encode())
    ampkit.apex.install()
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
    ampkit.apex.install()
    scaler = pickle.loads(PICKLED.replace(b"ampkit.apex.fp16_utils.loss_scaler", module.encode()))
    assert type(scaler) is DynamicLossScaler
    for _ in range(3):
        scaler.update_scale(False)
    assert (scaler.cur_scale, scaler.cur_iter) == (256.0, 4)  # three iterations without an overflow double it


def test_a_pickle_loads_in_a_process_that_has_imported_nothing_of_ours():
    code = f"import pickle; print(pickle.loads({PICKLED!r}).cur_scale)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "128.0\n", done.stderr
