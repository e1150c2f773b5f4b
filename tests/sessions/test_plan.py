"""The table of opt levels, and what may be overridden where. Whole plans are written out by hand."""

import math
import operator

import pytest
import torch
from helpers import LEVELS

from ampkit import ConfigurationError, DynamicLossScale
from ampkit.plan import Plan, defaults_of, resolve
from ampkit.policy import Policy

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DYNAMIC = DynamicLossScale()

# cast_model_type, patch_torch_functions, ..._type, keep_batchnorm_fp32, master_weights, loss_scale
DEFAULTS_ON_CUDA = {
    "O0": (F32, False, None, None, False, 1.0),
    "O1": (None, True, F16, None, False, DYNAMIC),
    "O2": (F16, False, None, True, True, DYNAMIC),
    "O3": (F16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, False, 1.0),
    "O5": (None, False, BF16, None, False, 1.0),
}

row = operator.attrgetter(
    *("cast_model_type", "patch_torch_functions", "patch_torch_functions_type"),
    *("keep_batchnorm_fp32", "master_weights", "loss_scale"),
)


@pytest.mark.parametrize("level", LEVELS)
def test_defaults_on_an_accelerator(level, monkeypatch):
    monkeypatch.delenv("AMPKIT_LOWER_PRECISION", raising=False)
    assert row(defaults_of(level, "cuda")) == row(defaults_of(level, "xpu")) == DEFAULTS_ON_CUDA[level]
    on_the_cpu = tuple(BF16 if value is F16 else value for value in DEFAULTS_ON_CUDA[level])
    assert row(defaults_of(level, "cpu")) == on_the_cpu


def test_defaults_that_all_levels_share():
    for level in LEVELS:
        plan = defaults_of(level, "cpu")
        assert (plan.enabled, plan.num_losses, plan.verbosity, plan.cast_model_outputs) == (True, 1, 1, None)
        assert (plan.min_loss_scale, plan.max_loss_scale) == (2.0**-14, 2.0**24)
        assert (plan.keep_fp32, plan.on_floor) == ((), "raise")
        assert plan.policy == Policy("default")
    assert DYNAMIC == DynamicLossScale(2.0**16, 2.0, 0.5, 2000, 1)


@pytest.mark.parametrize("name, dtype", (("float16", F16), ("bfloat16", BF16)))
@pytest.mark.parametrize("device_type", ("cpu", "cuda"))
def test_lower_precision_comes_from_the_environment(monkeypatch, device_type, name, dtype):
    monkeypatch.setenv("AMPKIT_LOWER_PRECISION", name)
    found = [defaults_of(level, device_type).patch_torch_functions_type for level in ("O1", "O4", "O5")]
    assert found == [dtype, BF16, BF16]
    assert [defaults_of(level, device_type).cast_model_type for level in ("O2", "O3")] == [dtype, dtype]
    assert resolve("O2", device_type, {"cast_model_type": F16}).cast_model_type is F16


def test_environment_with_another_word_is_refused(monkeypatch):
    monkeypatch.setenv("AMPKIT_LOWER_PRECISION", "half")
    with pytest.raises(ConfigurationError, match=r"AMPKIT_LOWER_PRECISION='half' is none of float16, bfloat16"):
        resolve("O1", "cpu", {})
    assert resolve("O5", "cpu", {}).patch_torch_functions_type is BF16


ACCEPTED = (
    ("O0 O1 O4 O5", "cast_model_type", F32, None),
    ("O1 O4 O5", "cast_model_type", False, None),
    ("O2 O3", "cast_model_type", F16, F16),
    ("O2 O3", "cast_model_type", BF16, BF16),
    ("O2 O3", "cast_model_type", F32, F32),
    ("O0 O2 O3 O5", "patch_torch_functions", False, False),
    ("O1 O4", "patch_torch_functions", True, True),
    ("O1 O4", "patch_torch_functions", False, False),
    ("O1", "patch_torch_functions_type", F16, F16),
    ("O1 O4 O5", "patch_torch_functions_type", BF16, BF16),
    ("O2 O3", "keep_batchnorm_fp32", True, True),
    ("O2 O3", "keep_batchnorm_fp32", "False", False),
    ("O0 O2 O3", "master_weights", True, True),
    ("O0 O2 O3", "master_weights", False, False),
    ("O0 O1 O2 O3 O4 O5", "loss_scale", 128, 128.0),
    ("O0 O1 O2 O3 O4 O5", "loss_scale", "128.0", 128.0),
    ("O0 O1 O2 O3 O4 O5", "loss_scale", "dynamic", DYNAMIC),
    ("O1", "loss_scale", DynamicLossScale(8.0), DynamicLossScale(8.0)),
    ("O0 O1 O2 O3 O4 O5", "cast_model_outputs", BF16, BF16),
    ("O1", "num_losses", 3, 3),
    ("O1", "verbosity", 0, 0),
    ("O1", "min_loss_scale", 1e-6, 1e-6),
    ("O1", "max_loss_scale", 65536, 65536.0),
    ("O2 O1", "keep_fp32", "head", ("head",)),
    ("O2", "keep_fp32", torch.nn.Linear, (torch.nn.Linear,)),
    ("O2", "keep_fp32", ["head", torch.nn.Linear], ("head", torch.nn.Linear)),
    ("O1", "policy", "apex", Policy("apex")),
    ("O1", "on_floor", "warn", "warn"),
    ("O1 O4 O5", "scope", "forward", "forward"),
    ("O0 O1 O2 O3 O4 O5", "scope", "process", "process"),
)
ACCEPTED_ROWS = [(level, *rest) for levels, *rest in ACCEPTED for level in levels.split()]


@pytest.mark.parametrize("level, name, given, expected", ACCEPTED_ROWS)
def test_override_is_taken(level, name, given, expected):
    plan = resolve(level, "cpu", {name: given})
    if (level, name) != ("O0", "cast_model_type"):
        assert getattr(plan, name) == expected and type(getattr(plan, name)) is type(expected)
    others = {field: value for field, value in vars(plan).items() if field != name}
    assert others == {field: value for field, value in vars(defaults_of(level, "cpu")).items() if field != name}


AS_BEFORE = "opt_level='O2', cast_model_type=torch.bfloat16, loss_scale=1.0"
# ... and what the message must say: found, expected, what to do.
REFUSED = (
    ("O1 O4", "cast_model_type", F16, ("_type=torch.float16", "None or torch.float32", "choose O2 or O3")),
    ("O0", "cast_model_type", BF16, ("cast_model_type=torch.bfloat16", "torch.float32", "at O0")),
    ("O5", "cast_model_type", F16, ("cast_model_type=torch.float16", "None or torch.float32 at O5", AS_BEFORE)),
    ("O2", "cast_model_type", torch.float64, ("torch.float64", "torch.float16")),
    ("O2", "cast_model_type", "half", ("'half'", "torch.float16")),
    ("O0 O2 O3", "patch_torch_functions", True, ("=True", "False at", "opt_level='O1'")),
    ("O5", "patch_torch_functions", True, ("=True", "False at O5", "inside of the models alone", "opt_level='O4'")),
    ("O0 O2 O3", "patch_torch_functions_type", F16, ("torch.float16", "belongs to O1", "cast_model_type=")),
    ("O4 O5", "patch_torch_functions_type", F16, ("torch.float16", "torch.bfloat16", "at O")),
    ("O1", "patch_torch_functions_type", F32, ("torch.float32", "torch.float16", "at O1")),
    ("O1 O4 O5", "keep_batchnorm_fp32", True, ("keep_batchnorm_fp32=True", "None at", "tables decide")),
    ("O2", "keep_batchnorm_fp32", "yes", ("'yes'", "True or False")),
    ("O1 O4", "master_weights", True, ("master_weights=True", "None at", "their own masters")),
    ("O5", "master_weights", True, ("master_weights=True", "None at O5", "their own masters", AS_BEFORE)),
    ("O2", "master_weights", 1, ("master_weights=1", "True or False")),
    ("O0 O1 O2 O5", "loss_scale", 0, ("loss_scale=0", "'dynamic'", "positive number", "1.0 means no")),
    ("O1", "loss_scale", -2.0, ("loss_scale=-2.0", "positive")),
    ("O1", "loss_scale", math.inf, ("loss_scale=inf", "positive")),
    ("O1", "loss_scale", "static", ("'static'", "'dynamic'")),
    ("O1", "loss_scale", True, ("loss_scale=True", "positive")),
    ("O1", "cast_model_outputs", torch.int64, ("torch.int64", "floating-point torch.dtype")),
    ("O1", "cast_model_outputs", "float32", ("'float32'", "floating-point torch.dtype")),
    ("O1", "num_losses", 0, ("num_losses=0", "at least 1")),
    ("O1", "num_losses", 2.0, ("num_losses=2.0", "integer")),
    ("O1", "verbosity", -1, ("verbosity=-1", "at least 0")),
    ("O1", "min_loss_scale", 0, ("min_loss_scale=0", "positive", "0 is no scale")),
    ("O1", "max_loss_scale", math.inf, ("max_loss_scale=inf", "finite")),
    ("O1", "max_loss_scale", "big", ("'big'", "positive")),
    ("O2", "keep_fp32", 3, ("keep_fp32=3", "modules, module types or name patterns")),
    ("O2", "keep_fp32", [F32], ("torch.float32", "modules, module types or name patterns")),
    ("O1", "policy", "nvidia", ("'nvidia'", "apex", "default")),
    ("O1", "on_floor", "stop", ("'stop'", "'raise' or 'warn'")),
    ("O0 O2 O3", "scope", "forward", ("'forward'", "'process' at", "O1 or O4")),
    ("O1", "scope", "module", ("scope='module'", "'process'", "'forward'")),
    ("O1", "half", True, ("'half'", "known are", "loss_scale")),
)
REFUSED_ROWS = [(level, *rest) for levels, *rest in REFUSED for level in levels.split()]


@pytest.mark.parametrize("level, name, given, words", REFUSED_ROWS)
def test_override_is_refused(level, name, given, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve(level, "cpu", {name: given})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("level", ("01", "o1", "O6", "", None, 1, "O1 "))
def test_level_of_another_name_is_refused(level):
    with pytest.raises(ConfigurationError) as caught:
        resolve(level, "cpu", {})
    assert repr(level) in str(caught.value) and "'O0', 'O1', 'O2'" in str(caught.value)


def test_bounds_that_cross_are_refused_and_may_be_one_number():
    with pytest.raises(ConfigurationError, match=r"min_loss_scale=8 is above max_loss_scale=4\. Lower the one"):
        resolve("O1", "cpu", {"min_loss_scale": 8, "max_loss_scale": 4})
    plan = resolve("O1", "cpu", {"min_loss_scale": 8, "max_loss_scale": 8})
    assert (plan.min_loss_scale, plan.max_loss_scale) == (8.0, 8.0)


def test_override_of_none_is_the_default():
    nothing = dict.fromkeys(field for field in vars(Plan()) if field not in ("opt_level", "enabled"))
    assert all(resolve(level, "cpu", nothing) == defaults_of(level, "cpu") for level in LEVELS)


def test_plan_is_frozen():
    with pytest.raises(AttributeError):
        defaults_of("O1", "cpu").loss_scale = 2.0
