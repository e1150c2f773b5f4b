"""Every operation of torch's autocast lists and of Apex's lists has a row, under every name that Python has for it."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ampkit.policy import CastKind, Policy

pytestmark = pytest.mark.switch

LOWER, FP32, PROMOTE = CastKind.LOWER_PRECISION_FP, CastKind.FP32, CastKind.PROMOTE
NATIVE, BANNED, MATCH_FIRST, REJECT = CastKind.NATIVE, CastKind.BANNED, CastKind.MATCH_FIRST, CastKind.REJECT
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"

OWNERS = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._VF": torch._VF,
}
PREFIXES = {"linalg_": "torch.linalg", "fft_": "torch.fft", "special_": "torch.special"}
# Operators that Python reaches under another name, or under more than their own.
SPELLINGS = {
    "cross_entropy_loss": ["cross_entropy"],
    "nll_loss2d": ["nll_loss"],
    "multilabel_margin_loss_forward": ["multilabel_margin_loss"],
    "_cudnn_rnn": ["lstm", "gru", "rnn_tanh", "rnn_relu"],
    "mkldnn_rnn_layer": ["lstm"],
    "_thnn_fused_lstm_cell": ["lstm_cell"],
    "_thnn_fused_gru_cell": ["gru_cell"],
    "_scaled_dot_product_flash_attention": ["scaled_dot_product_attention"],
    "matmul": ["__matmul__", "__rmatmul__"],
    "pow": ["__pow__", "__rpow__", "__ipow__"],
    "reciprocal": ["__rdiv__", "__rtruediv__"],
    "acos": ["arccos"],
    "asin": ["arcsin"],
    "atan2": ["arctan2"],
    "index_put": ["__setitem__"],
    "linalg_vector_norm": ["norm"],
    "linalg_matrix_norm": ["norm"],
    **{f"grid_sampler{end}": ["grid_sample"] for end in ("", "_2d", "_3d")},
    **{f"{pad}_pad{n}d": ["pad"] for pad in ("reflection", "replication") for n in (1, 2, 3)},
    **{
        name: ["interpolate", "upsample", "upsample_nearest", "upsample_bilinear"]
        for name in (
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
            "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
            "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        ).split()
    },
}
# apex-facts 2.1: the functions that Apex cast to lower precision and to float32, promoted, refused or matched.
APEX_LOWER = {
    F: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear",
    torch: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm matmul mm "
    "addbmm baddbmm bmm",
    torch.Tensor: "__matmul__ prelu addmm matmul mm addbmm baddbmm bmm",
}
APEX_FP32 = {
    F: "interpolate grid_sample softplus softmin log_softmax softmax layer_norm group_norm local_response_norm "
    "normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div "
    "l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss "
    "nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss",
    torch: "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod "
    "std sum var renorm",
    torch.Tensor: "__pow__ __rpow__ acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum "
    "dist norm prod std sum var renorm",
}
APEX_OTHERS = {
    F: "gelu binary_cross_entropy",
    torch: "addmv addr mv addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne cat stack acos_ "
    "asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_",
    torch.Tensor: "addmv addr mv __ipow__ cpu __add__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __isub__ "
    "__itruediv__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__ "
    "__truediv__ addcdiv addcmul atan2 cross dot add div mul eq equal ge gt le lt ne acos_ asin_ cosh_ erfinv_ "
    "exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_ pow_ cumprod_ cumsum_ renorm_ addmm_ addmv_ "
    "addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_",
    torch._VF: "rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell",
}


def rows(policy: str) -> dict[tuple[str, str], CastKind]:
    paths = {owner: path for path, owner in OWNERS.items()}
    rules = Policy(policy).rules()
    return {(paths[rule.owner], rule.name): rule.kind for rule in rules if rule.owner in paths}


def spellings(operator: str) -> list[tuple[str, str]]:
    """Every public name, in-place twins included, under which Python reaches an operator of ATen."""
    names = {path: {operator, *SPELLINGS.get(operator, ())} for path in OWNERS}
    for prefix, path in PREFIXES.items():
        if operator.startswith(prefix):
            names[path].add(operator.removeprefix(prefix))
    known = {
        (path, spelling)
        for path, owner in OWNERS.items()
        for name in names[path]
        for spelling in (name, f"{name}_")
        if hasattr(owner, spelling) and (path, spelling) not in NOT_THIS_ONE.get(operator, ())
    }
    # torch._VF forwards to torch._C._VariableFunctions, whose names torch has too; the recurrent layers look there.
    return sorted((path, name) for path, name in known if path != "torch._VF" or name in APEX_OTHERS[torch._VF].split())


# torch.linalg's norm is spelled linalg_norm; torch.norm is the operator norm. torch.linalg.polar is a decomposition.
NOT_THIS_ONE = {
    **{name: {("torch", "norm"), ("torch.Tensor", "norm")} for name in ("linalg_vector_norm", "linalg_matrix_norm")},
    "polar": {("torch.linalg", "polar")},
}


def registered(key: str) -> list[str]:
    """The operators for which this torch has an autocast kernel."""
    names = [name.partition("::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)]
    return sorted({name.partition(".")[0] for library, _, name in names if library == "aten"})


def macro(name: str) -> list[str]:
    """The operators of one of the lists in ATen/autocast_mode.h."""
    text = HEADER.read_text()
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)*.*)", text).group(1)
    return sorted(set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body)))


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": {LOWER},
    "AT_FORALL_FP32": {FP32},
    "AT_FORALL_FP32_SET_OPT_DTYPE": {FP32},
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": {FP32},
    "AT_FORALL_PROMOTE": {PROMOTE, NATIVE},
}
LISTED = sorted(
    {*registered("AutocastCPU"), *registered("AutocastCUDA"), *(name for key in MACROS for name in macro(key))}
)


def test_lists_were_found():
    assert len(LISTED) > 180
    assert {"mm", "linalg_multi_dot", "softmax", "fft_rfft", "scatter_add", "adaptive_max_pool3d"} <= set(LISTED)
    assert macro("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE") == ["norm"]
    assert len(macro("AT_FORALL_LOWER_PRECISION_FP")) > 25


@pytest.mark.parametrize("policy", ["default", "apex", "autocast-cpu", "autocast-cuda"])
def test_every_operation_of_torchs_lists_has_a_row_under_every_name(policy):
    found = rows(policy)
    assert [operator for operator in LISTED if not spellings(operator)] == []
    assert sorted({spelling for operator in LISTED for spelling in spellings(operator)} - found.keys()) == []


@pytest.mark.parametrize("policy", ["default", "apex", "autocast-cpu", "autocast-cuda"])
def test_every_operation_of_apexs_lists_has_a_row(policy):
    present = {(OWNERS[path], name) for path, name in rows(policy)}
    tables = (APEX_LOWER, APEX_FP32, APEX_OTHERS)
    names = [(owner, name) for table in tables for owner, row in table.items() for name in row.split()]
    wanted = {(owner, name) for owner, name in names if hasattr(owner, name)}
    if policy != "apex":
        wanted.remove((torch.Tensor, "cpu"))  # only there: ruling of ours, since it changes what a script saves
        assert (torch.Tensor, "cpu") not in present
    assert sorted(wanted - present, key=str) == []


@pytest.mark.parametrize("policy", ["default", "apex"])
@pytest.mark.parametrize(("table", "kind"), [(APEX_LOWER, LOWER), (APEX_FP32, FP32)], ids=["lower", "fp32"])
def test_rows_of_apex_are_kept_under_every_policy(policy, table, kind):
    found = {(OWNERS[path], name): row for (path, name), row in rows(policy).items()}
    pairs = [(owner, name) for owner, names in table.items() for name in names.split()]
    assert [pair for pair in pairs if found.get(pair) is not kind] == []


@pytest.mark.parametrize("key", MACROS)
def test_autocast_policy_agrees_with_torchs_header(key):
    table = rows("autocast-cuda")
    wrong = [
        (spelling, table[spelling].name)
        for operator in macro(key)
        for spelling in spellings(operator)
        if not spelling[1].endswith("_") and table[spelling] not in MACROS[key]
    ]
    assert wrong == []


def in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")


@pytest.mark.parametrize("policy", ["default", "apex", "autocast-cpu", "autocast-cuda"])
def test_in_place_functions_never_have_their_tensor_cast(policy):
    kinds = {kind for (_, name), kind in rows(policy).items() if in_place(name)}
    assert kinds == {NATIVE, MATCH_FIRST, REJECT}
