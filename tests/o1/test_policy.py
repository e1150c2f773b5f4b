"""The cast tables as data, and their expansion to rules."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import o1
from torch import nn

import ampkit
import ampkit.casting.engine as engine_module
from ampkit import Policy
from ampkit.errors import ConfigurationError, RefusedOperation
from ampkit.policy import CastKind, RuleGroup, expand, tables

pytestmark = pytest.mark.switch


@pytest.mark.parametrize("table", ["DEFAULT", "APEX_ONLY", "CPU_LIST", "CUDA_LIST"])
def test_tables_name_each_function_once_and_give_reasons(table):
    groups = getattr(tables, table)
    seen = [(path, name) for group in groups for path in group.owners for name in group.names]
    assert sorted(seen) == sorted(set(seen)) and all(group.reason for group in groups)


def test_expand_leaves_out_names_that_this_torch_lacks():
    owners = ("torch", "torch.no_such_module", "torch.Tensor")
    rules = expand([RuleGroup(CastKind.FP32, owners, ("exp", "no_such_function"), "for the test")])
    assert [(rule.owner, rule.name) for rule in rules] == [(torch, "exp"), (torch.Tensor, "exp")]


# -- what a caller may choose and change


def test_policy_is_a_value():
    policy = Policy("apex", {"torch.nn.functional.gelu": "lower", "torch.exp": "native"}, banned="fp32")
    assert repr(policy) == "Policy('apex', {'torch.exp': 'native', 'torch.nn.functional.gelu': 'lower'}, banned='fp32')"
    assert eval(repr(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert len({policy, Policy("apex", {"torch.exp": "native", "torch.nn.functional.gelu": "lower"}, "fp32")}) == 1
    assert (repr(Policy()), Policy.of("default"), Policy.of({})) == ("Policy('default')", Policy(), Policy())


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("o1", ("'o1'", "'default'", "'apex'", "'autocast'")),
        (["default"], ("['default']", "'default'")),
        ({"torch.nn.functional.gelo": "fp32"}, ("torch.nn.functional.gelo", "Did you mean 'torch.nn.functional.gelu'")),
        ({"gelu": "fp32"}, ("'gelu'", "Did you mean 'torch.nn.functional.gelu'")),
        ({"F.softmax": "fp32"}, ("'F.softmax'", "'torch.nn.functional.softmax'")),
        ({"no.such.module": "fp32"}, ("no.such.module", "no function of that name")),
        ({"torch.float32": "fp32"}, ("torch.float32", "no function of that name")),
        ({"torch.nn.Linear": "fp32"}, ("torch.nn.Linear", "names a class", "torch.nn.functional.linear")),
        ({None: "fp32"}, ("None", "a row is named by a string")),
        ({torch.exp: "fp32"}, ("built-in method exp", "a row is named by a string")),
        ({"torch.exp": "float32"}, ("torch.exp", "'float32'", "'fp32'", "'lower'")),
        ({"torch.exp": torch.float32}, ("torch.exp", "torch.float32", "'fp32'")),
        ({"torch.exp_": "fp32"}, ("torch.exp_", "'native'", "keeps its dtype")),
        ({"torch.Tensor.__iadd__": "lower"}, ("__iadd__", "keeps its dtype")),
    ],
)
def test_policy_that_makes_no_sense_is_refused(value, parts):
    with pytest.raises(ConfigurationError) as error:
        Policy.of(value)
    for part in parts:
        assert part in str(error.value)


def test_unknown_treatment_of_banned_functions_is_refused():
    with pytest.raises(ConfigurationError, match="'error', 'fp32', 'allow'"):
        Policy(banned="ignore")
    with pytest.raises(ConfigurationError, match="overrides=3"):
        Policy(overrides=3)


CHANGES = {  # and the dtypes of results for a float16 and for a float32 tensor
    "lower": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "native": (torch.float16, torch.float32),
}
# Casts are off inside of softmax, which torch.autocast has on its lists; those in instance_norm meet torch.instance_norm's row.
CHANGED = {
    "softmax": lambda x: F.softmax(x, -1),
    "relu": lambda x: F.relu(x),
    "gelu": lambda x: F.gelu(x),
    "instance_norm": lambda x: F.instance_norm(x[None]),
}


@pytest.mark.parametrize("change, dtypes", CHANGES.items())
@pytest.mark.parametrize("name", CHANGED)
def test_changed_row_decides(name, change, dtypes):
    with o1(torch.float16, policy={f"torch.nn.functional.{name}": change}):
        for given, dtype in zip((torch.float16, torch.float32), dtypes):
            assert CHANGED[name](torch.rand(4, 4).to(given)).dtype is dtype


def test_changed_row_is_not_overruled_by_what_it_calls_and_leaves_others_alone():
    low = torch.rand(3).bfloat16()
    with o1(policy={"torch.nn.functional.softmax": "native"}):
        assert F.softmax(low, -1).dtype is nn.Softmax(-1)(low).dtype is torch.bfloat16
    with o1(policy={"torch.softmax": "native"}):
        assert torch.softmax(low, -1).dtype is torch.bfloat16
        assert low.softmax(-1).dtype is F.softmax(low, -1).dtype is low.exp().dtype is torch.float32


def test_promote_row_casts_to_the_widest():
    low, high = torch.rand(3).bfloat16(), torch.rand(3)
    with o1(policy={"torch.nn.functional.mse_loss": "promote", "torch.Tensor.copy_": "promote"}):
        assert F.mse_loss(low, low).dtype is torch.bfloat16
        assert F.mse_loss(low, high).dtype is torch.float32
        assert low.copy_(high) is low
        assert low.dtype is torch.bfloat16


def test_changed_row_wins_over_a_registration(monkeypatch):
    monkeypatch.setattr(engine_module, "_registered", {})
    ampkit.register_half_function(F, "relu")
    with o1(policy={"torch.nn.functional.relu": "fp32"}):
        assert F.relu(torch.rand(2).bfloat16()).dtype is torch.float32
        ampkit.register_half_function(F, "relu")  # from now on
        assert F.relu(torch.rand(2)).dtype is torch.bfloat16


def test_banned_function_may_be_computed_in_float32_or_allowed():
    p, target = torch.rand(3).bfloat16(), torch.ones(3).bfloat16()
    for dtype in (torch.bfloat16, torch.float16):
        with o1(dtype) as casting:
            with pytest.raises(RefusedOperation, match="binary_cross_entropy_with_logits"):
                F.binary_cross_entropy(p.to(dtype), target.to(dtype))
            with casting.disabled():
                assert F.binary_cross_entropy(p.to(dtype), target.to(dtype)).dtype is dtype
    for policy in (Policy(banned="fp32"), {"torch.nn.functional.binary_cross_entropy": "fp32"}):
        with o1(policy=policy):
            loss = F.binary_cross_entropy(p, target)
            assert loss.dtype is torch.float32
            torch.testing.assert_close(loss.double(), -p.double().log().mean(), rtol=1e-6, atol=0)
    for policy in (Policy(banned="allow"), {"torch.nn.functional.binary_cross_entropy": "native"}):
        with o1(policy=policy):
            assert F.binary_cross_entropy(p, target).dtype is torch.bfloat16


def test_any_function_can_be_refused():
    with o1(policy={"torch.Tensor.exp": "error"}):
        torch.rand(2).exp()
        with pytest.raises(RefusedOperation, match=r"exp\(\) was called with a torch.bfloat16 tensor"):
            torch.rand(2).bfloat16().exp()


@pytest.mark.parametrize(
    ("base", "device_type", "settled"),
    [
        ("autocast", "cpu", "autocast-cpu"),
        ("autocast", "cuda", "autocast-cuda"),
        ("autocast", "mps", "autocast-cuda"),
        ("autocast-cuda", "cpu", "autocast-cuda"),
        ("apex", "cpu", "apex"),
    ],
)
def test_autocast_is_settled_to_the_list_of_a_device_type(base, device_type, settled):
    changes = {"torch.exp": "native"}
    assert Policy(base, changes).for_device(device_type) == Policy(settled, changes)


LOW = torch.bfloat16
# Functions that the lists treat differently: a call on a lower-precision image, and under which policies it is float32.
DIFFERENT = {
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), {"autocast-cpu"}),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), {"autocast-cpu"}),
    "gelu": (lambda x: F.gelu(x), {"apex"}),
    "tensordot": (lambda x: torch.tensordot(x.float(), x.float(), dims=5), {"autocast-cuda"}),
}


@pytest.mark.parametrize("policy", ["default", "autocast-cpu", "autocast-cuda", "apex"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_policy_selects_its_tables(name, policy):
    call, float32 = DIFFERENT[name]
    with o1(policy=policy):
        assert call(torch.rand(1, 2, 4, 4, 4).bfloat16()).dtype is (torch.float32 if policy in float32 else LOW)


def model_and_optimizer():
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_initialize_takes_a_name_a_dict_or_a_policy():
    low = torch.rand(3).bfloat16()
    for policy, plan in [
        ("autocast", Policy("autocast-cpu")),
        ({"torch.exp": "native"}, Policy(overrides={"torch.exp": "native"})),
        (Policy("apex", banned="allow"), Policy("apex", banned="allow")),
    ]:
        with ampkit.session(*model_and_optimizer(), "O1", policy=policy, verbosity=0):
            assert ampkit.current_session().plan.policy == plan
            assert torch.exp(low).dtype is (LOW if policy == {"torch.exp": "native"} else torch.float32)


def test_second_session_with_another_policy_is_refused():
    kept = ampkit.initialize(*model_and_optimizer(), policy={"torch.exp": "native"}, verbosity=0)
    with pytest.raises(ConfigurationError, match=r"Policy\('default', \{'torch.exp': 'native'\}\)"):
        ampkit.initialize(*model_and_optimizer(), verbosity=0)
    also_kept = ampkit.initialize(*model_and_optimizer(), policy={"torch.exp": "native"}, verbosity=0)
    assert len({id(model) for model, _ in (kept, also_kept)}) == 2
