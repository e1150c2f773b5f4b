"""The cast tables as data, and their expansion to rules."""

import pytest
import torch

from ampkit.errors import ConfigurationError
from ampkit.policy import POLICIES, CastKind, CastRule, RuleGroup, expand, tables_for

# apex-facts: the rows that scripts written for Apex rely on, by owner.
APEX_LOWER = {
    torch.nn.functional: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear",
    torch: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr "
    "matmul mm mv addbmm baddbmm bmm",
    torch.Tensor: "__matmul__ prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm",
}
APEX_FP32 = {
    torch.nn.functional: "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm "
    "local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy "
    "hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss "
    "soft_margin_loss triplet_margin_loss ctc_loss",
    torch: "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod "
    "std sum var renorm",
    torch.Tensor: "__pow__ __rpow__ acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow "
    "cumprod cumsum dist norm prod std sum var renorm",
}


def kinds(policy: str) -> dict:
    rules, _ = expand(tables_for(policy))
    return {(rule.owner, rule.name): rule.kind for rule in rules}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("rows", "kind"), [(APEX_LOWER, CastKind.LOWER_PRECISION_FP), (APEX_FP32, CastKind.FP32)], ids=["lower", "fp32"]
)
def test_rows_of_apex_are_kept_under_every_policy(policy, rows, kind):
    found = kinds(policy)
    assert [
        (owner, name) for owner, names in rows.items() for name in names.split() if found.get((owner, name)) is not kind
    ] == []


@pytest.mark.parametrize("policy", POLICIES)
def test_tables_name_each_function_once(policy):
    seen = [(path, name) for group in tables_for(policy) for path in group.owners for name in group.names]
    assert sorted(seen) == sorted(set(seen))


@pytest.mark.parametrize("policy", POLICIES)
def test_tables_give_a_reason_for_each_group(policy):
    assert all(group.reason for group in tables_for(policy))


def test_cpu_is_cast_under_apex_only():
    assert (torch.Tensor, "cpu") in kinds("apex")
    assert (torch.Tensor, "cpu") not in kinds("default")


def test_expand_reports_names_that_this_torch_lacks():
    group = RuleGroup(CastKind.FP32, ("torch", "torch.Tensor"), ("exp", "no_such_function"), "for the test")
    rules, dropped = expand([group])
    assert [(rule.owner, rule.name) for rule in rules] == [(torch, "exp"), (torch.Tensor, "exp")]
    assert dropped == ["torch.no_such_function", "torch.Tensor.no_such_function"]


def test_expand_reports_owners_that_this_torch_lacks():
    rules, dropped = expand([RuleGroup(CastKind.FP32, "torch.no_such_module", ("f",), "for the test")])
    assert (rules, dropped) == ([], ["torch.no_such_module.f"])


def test_expand_lets_the_users_rule_win():
    extra = CastRule(CastKind.LOWER_PRECISION_FP, torch, "exp")
    rules, _ = expand(tables_for("default"), [extra])
    assert [rule for rule in rules if rule.owner is torch and rule.name == "exp"] == [extra]


@pytest.mark.parametrize("policy", ["o1", None, ["default"]])
def test_unknown_policy_names_the_accepted_ones(policy):
    with pytest.raises(ConfigurationError, match="'default', 'apex'"):
        tables_for(policy)
