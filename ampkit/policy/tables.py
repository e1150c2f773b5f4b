"""The cast tables of O1: data only, each group with its reason.

`APEX` holds the rows that Apex's amp had, `TODAY` what torch has gained since and Apex's lists never reached. Where
Apex cast to make mixed dtypes meet and torch now promotes by itself, the row says NATIVE and nothing is patched. The O1
engine reads the tables through `tables_for`.
"""

from __future__ import annotations

from ..errors import ConfigurationError
from .rules import CastKind, RuleGroup

F = "torch.nn.functional"
TORCH = "torch"
TENSOR = "torch.Tensor"
LINALG = "torch.linalg"
SPECIAL = "torch.special"
VF = "torch._VF"

LOWER = CastKind.LOWER_PRECISION_FP
FP32 = CastKind.FP32
PROMOTE = CastKind.PROMOTE
MATCH_FIRST = CastKind.MATCH_FIRST
REJECT = CastKind.REJECT
BANNED = CastKind.BANNED
NATIVE = CastKind.NATIVE

# Many names to a line, as in a table.
# fmt: off
_CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
)
_OUT_OF_RANGE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
)
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")

APEX = (
    RuleGroup(LOWER, (F, TORCH), _CONVOLUTIONS, "convolutions run on matrix units"),
    RuleGroup(LOWER, F, ("linear",), "a matrix product"),
    RuleGroup(
        LOWER,
        (TORCH, TENSOR),
        ("addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm"),
        "matrix products run on matrix units, which accumulate in float32",
    ),
    RuleGroup(LOWER, TENSOR, ("__matmul__",), "the operator form of matmul"),
    RuleGroup(LOWER, (F, TORCH, TENSOR), ("prelu",), "takes one dtype only; follows the layer before it"),
    RuleGroup(LOWER, (VF, TORCH), ("rnn_relu", "rnn_tanh", "gru", "lstm"), "matrix products, fused over time"),
    RuleGroup(
        LOWER, (VF, TORCH), ("rnn_relu_cell", "rnn_tanh_cell", "gru_cell", "lstm_cell"), "matrix products and gates"
    ),
    RuleGroup(FP32, F, ("interpolate", "grid_sample"), "coordinates need more than 8 or 11 bits"),
    RuleGroup(FP32, F, ("softplus", "softmin", "log_softmax", "softmax", "gelu"), "built on exp"),
    RuleGroup(
        FP32,
        F,
        ("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
        "sums of squares overflow float16 and lose small terms in bfloat16",
    ),
    RuleGroup(
        FP32,
        F,
        (
            "poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss",
            "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
            "multi_margin_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss",
            "triplet_margin_loss", "ctc_loss",
        ),
        "a loss is a sum over the batch, and gradients start from it",
    ),
    RuleGroup(FP32, (TORCH, TENSOR), _OUT_OF_RANGE, "leaves the range of float16, or is steep"),
    RuleGroup(FP32, (TORCH, TENSOR), ("pow",), "leaves the range of float16"),
    RuleGroup(FP32, TENSOR, ("__pow__", "__rpow__"), "the operator forms of pow"),
    RuleGroup(
        FP32,
        (TORCH, TENSOR),
        ("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
        "reductions over many elements",
    ),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("cross", "dot"), "torch wants equal dtypes"),
    RuleGroup(PROMOTE, (F, TORCH), ("bilinear",), "torch wants equal dtypes"),
    RuleGroup(
        NATIVE,
        (TORCH, TENSOR),
        ("addcdiv", "addcmul", "atan2", "add", "div", "mul", *_COMPARISONS),
        "torch promotes elementwise functions by itself",
    ),
    RuleGroup(
        NATIVE,
        TENSOR,
        (
            "__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__", "__rdiv__",
            "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "__div__",
        ),
        "torch promotes elementwise operators by itself",
    ),
    RuleGroup(
        NATIVE,
        TENSOR,
        ("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__", "__ipow__"),
        "an in-place operator keeps its tensor, dtype and storage, as torch has it",
    ),
    RuleGroup(NATIVE, TORCH, ("cat", "stack"), "torch promotes sequences by itself"),
    RuleGroup(BANNED, F, ("binary_cross_entropy",), "log of a probability that lower precision rounds to 0 or 1"),
    RuleGroup(
        REJECT,
        (TORCH, TENSOR),
        tuple(f"{name}_" for name in _OUT_OF_RANGE),
        "the result has to fit into the float16 tensor it overwrites",
    ),
    RuleGroup(
        REJECT,
        TENSOR,
        ("pow_", "cumprod_", "cumsum_", "renorm_"),
        "the result has to fit into the float16 tensor it overwrites",
    ),
    RuleGroup(
        MATCH_FIRST,
        TENSOR,
        ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"),
        "the tensor written to fixes the dtype; torch wants the others to have it",
    ),
    RuleGroup(
        NATIVE,
        TENSOR,
        ("addcdiv_", "addcmul_", "atan2_", "add_", "div_", "mul_", *(f"{name}_" for name in _COMPARISONS)),
        "torch lets the tensor written to fix the dtype by itself",
    ),
)

TODAY = (
    # Matrix products under the names that came later.
    RuleGroup(LOWER, TORCH, ("einsum", "chain_matmul"), "contractions are matrix products"),
    RuleGroup(LOWER, LINALG, ("multi_dot", "matmul", "vecdot"), "matrix products"),
    RuleGroup(LOWER, TENSOR, ("__rmatmul__",), "the reflected operator form of matmul"),
    RuleGroup(LOWER, F, ("scaled_dot_product_attention",), "two matrix products; its softmax runs in float32 inside"),
    RuleGroup(
        LOWER,
        TORCH,
        ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        "the fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer in eval: they want equal dtypes",
    ),
    # Softmax, norms and losses in all their spellings.
    RuleGroup(
        FP32, (TORCH, TENSOR, SPECIAL), ("softmax", "log_softmax", "logsumexp", "log1p"), "built on exp and log"
    ),
    RuleGroup(FP32, SPECIAL, ("expm1", "exp2", "erfinv", "xlogy", "xlog1py", "logit", "entr"), "steep, or on log"),
    RuleGroup(FP32, (TORCH, TENSOR), ("xlogy", "logit", "logaddexp", "logaddexp2", "logcumsumexp"), "built on log"),
    RuleGroup(FP32, F, ("rms_norm", "instance_norm"), "sums of squares; float32 weights want a float32 input"),
    RuleGroup(
        FP32,
        TORCH,
        ("layer_norm", "group_norm", "rms_norm", "instance_norm", "native_layer_norm", "native_group_norm"),
        "sums of squares; the spellings below torch.nn.functional",
    ),
    RuleGroup(
        FP32,
        F,
        ("huber_loss", "gaussian_nll_loss", "triplet_margin_with_distance_loss"),
        "a loss is a sum over the batch, and gradients start from it",
    ),
    RuleGroup(
        FP32,
        TORCH,
        (
            "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "hinge_embedding_loss", "kl_div",
            "margin_ranking_loss", "poisson_nll_loss", "triplet_margin_loss",
        ),
        "losses under their names in torch",
    ),
    RuleGroup(FP32, (F, TORCH), ("pairwise_distance", "pdist", "cdist"), "sums of squares"),
    RuleGroup(FP32, TORCH, ("cosine_similarity",), "sums of squares"),
    RuleGroup(FP32, LINALG, ("norm", "vector_norm", "matrix_norm"), "sums of squares"),
    RuleGroup(
        FP32,
        TORCH,
        ("frobenius_norm", "nuclear_norm", "norm_except_dim", "std_mean", "var_mean", "cov", "corrcoef"),
        "sums of squares",
    ),
    RuleGroup(FP32, TENSOR, ("cov", "corrcoef"), "sums of squares"),
    RuleGroup(FP32, (TORCH, TENSOR), ("nansum", "trapezoid", "cumulative_trapezoid"), "reductions over many elements"),
    # Functions without lower-precision kernels: what ran in float32 before must still run.
    RuleGroup(
        FP32,
        (TORCH, TENSOR),
        (
            "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "logdet", "lu", "lu_solve",
            "matrix_exp", "matrix_power", "nanquantile", "ormqr", "orgqr", "pinverse", "qr", "quantile", "slogdet",
            "svd", "trace", "triangular_solve",
        ),
        "torch has no lower-precision kernel for it",
    ),
    RuleGroup(
        FP32,
        TORCH,
        ("complex", "polar", "lobpcg", "pca_lowrank", "svd_lowrank", "stft", "istft", "lstsq", "view_as_complex"),
        "torch has no lower-precision kernel for it",
    ),
    RuleGroup(FP32, TENSOR, ("stft", "istft"), "torch has no lower-precision kernel for it"),
    RuleGroup(
        FP32,
        LINALG,
        (
            "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "householder_product",
            "inv", "inv_ex", "ldl_factor", "ldl_factor_ex", "ldl_solve", "lstsq", "lu", "lu_factor", "lu_factor_ex",
            "lu_solve", "matrix_exp", "matrix_power", "matrix_rank", "pinv", "qr", "slogdet", "solve", "solve_ex",
            "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve",
        ),
        "torch has no lower-precision kernel for it",
    ),
    RuleGroup(
        FP32,
        "torch.fft",
        (
            "fft", "fft2", "fftn", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ihfft", "ihfft2", "ihfftn",
            "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftn",
        ),
        "no bfloat16 kernels, and float16 only for powers of two",
    ),
    # Mixed dtypes that torch refuses to promote: a lower-precision activation meets a float32 tensor of the script.
    RuleGroup(
        PROMOTE,
        (TORCH, TENSOR),
        ("vdot", "inner", "allclose", "isclose", "lerp", "heaviside"),
        "torch wants equal dtypes",
    ),
    RuleGroup(PROMOTE, TORCH, ("tensordot", "cartesian_prod", "meshgrid"), "torch wants equal dtypes"),
    RuleGroup(PROMOTE, LINALG, ("cross",), "torch wants equal dtypes"),
    RuleGroup(
        PROMOTE,
        (TORCH, TENSOR),
        ("index_add", "index_copy", "index_put", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"),
        "torch wants source and destination of equal dtype",
    ),
    RuleGroup(
        MATCH_FIRST,
        TENSOR,
        (
            "__setitem__", "index_add_", "index_copy_", "index_put_", "lerp_", "masked_scatter_", "scatter_",
            "scatter_add_", "scatter_reduce_",
        ),
        "the tensor written to fixes the dtype; torch wants the source to have it",
    ),
    RuleGroup(MATCH_FIRST, TORCH, ("index_put_",), "the tensor written to fixes the dtype"),
    RuleGroup(
        NATIVE,
        TORCH,
        ("concat", "concatenate", "hstack", "vstack", "dstack", "outer", "ger", "kron", "where", "maximum", "minimum"),
        "torch promotes by itself",
    ),
)

APEX_ONLY = (
    RuleGroup(FP32, TENSOR, ("cpu",), "Apex brought tensors to the host as float32; scripts then call numpy()"),
)

# fmt: on

POLICIES: dict[str, tuple[RuleGroup, ...]] = {
    "default": APEX + TODAY,
    "apex": TODAY + APEX + APEX_ONLY,
}


def tables_for(policy: str) -> tuple[RuleGroup, ...]:
    """The groups of a policy by name. A function that Apex's lists do not know keeps today's row under ``"apex"``."""
    try:
        return POLICIES[policy]
    except (KeyError, TypeError):
        accepted = ", ".join(repr(name) for name in POLICIES)
        raise ConfigurationError(f"policy={policy!r} is not known. Accepted: {accepted}.") from None
