"""The cast tables of every level that casts: data only, each group with its reason.

`APEX` holds the rows that Apex's amp had, `TODAY` functions that torch has gained since and Apex's lists never reached.
If Apex cast to combine mixed dtypes and torch now promotes by itself, the row says NATIVE and nothing is patched.
`CUDA_LIST` and `CPU_LIST` are torch.autocast's own (ATen/autocast_mode.h and autocast_mode.cpp), under Python's names for their
operators; the tests compare them with what the installed torch has registered. `TABLES` says which tables make up a policy; a
`Policy` (policy.py) reads it.
"""

from __future__ import annotations

from .cast_rules import (
    BANNED,
    CONTRACTION,
    FP32,
    FP32_WEIGHTS,
    LINALG,
    LOWER,
    MATCH_FIRST,
    NATIVE,
    PROMOTE,
    REJECT,
    SPECIAL,
    TENSOR,
    TORCH,
    VF,
    VISION,
    F,
    RuleGroup,
)

# Many names to a line, as in a table.
# fmt: off
CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
)
_LOSS = "a loss is a sum over the batch, and gradients start from it"
_OUT_OF_RANGE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
)
_COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")

APEX = (
    RuleGroup(LOWER, (F, TORCH), CONVOLUTIONS, "convolutions run on matrix units"),
    RuleGroup(LOWER, F, ("linear",), "a matrix product"),
    RuleGroup(LOWER, (TORCH, TENSOR), ("addmm", "matmul", "__matmul__", "mm", "addbmm", "baddbmm", "bmm"),
        "matrix products run on matrix units, which accumulate in float32"),
    RuleGroup(LOWER, (F, TORCH, TENSOR), ("prelu",), "takes one dtype only; follows the layer before it"),
    RuleGroup(LOWER, (VF, TORCH), ("rnn_relu", "rnn_tanh", "gru", "lstm"), "matrix products, fused over time"),
    RuleGroup(LOWER, (VF, TORCH), ("rnn_relu_cell", "rnn_tanh_cell", "gru_cell", "lstm_cell"), "matrix products and gates"),
    RuleGroup(FP32, F, ("interpolate", "grid_sample"), "coordinates need more than 8 or 11 bits"),
    RuleGroup(FP32, F, ("softplus", "log_softmax"), "built on exp"),
    RuleGroup(FP32, F, ("softmin", "softmax"), "built on exp", narrow=True),
    RuleGroup(FP32, F, ("layer_norm", "group_norm", "local_response_norm", "normalize"),
        "sums of squares overflow float16 and lose small terms in bfloat16", narrow=True),
    RuleGroup(FP32, F, ("cosine_similarity",), "sums of squares overflow float16 and lose small terms in bfloat16"),
    RuleGroup(FP32, F, ("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div",
        "l1_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
        "multi_margin_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss",
        "triplet_margin_loss", "ctc_loss"), _LOSS),
    RuleGroup(FP32, (TORCH, TENSOR), _OUT_OF_RANGE, "leaves the range of float16, or is steep"),
    RuleGroup(FP32, (TORCH, TENSOR), ("pow", "__pow__", "__rpow__"), "leaves the range of float16", narrow=True),
    RuleGroup(FP32, (TORCH, TENSOR), ("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
        "reductions over many elements"),
    RuleGroup(PROMOTE, (F, TORCH, TENSOR), ("cross", "dot", "bilinear"), "torch wants equal dtypes"),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("addcdiv", "addcmul", "atan2", "add", "div", "mul", "equal", *_COMPARISONS),
        "torch promotes elementwise functions by itself"),
    RuleGroup(NATIVE, TENSOR, ("__add__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__mul__", "__ne__", "__radd__",
        "__rdiv__", "__rmul__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "__div__"),
        "torch promotes elementwise operators by itself"),
    RuleGroup(NATIVE, TENSOR, ("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__", "__ipow__"),
        "an in-place operator keeps its tensor, dtype and storage, as torch has it"),
    RuleGroup(NATIVE, TORCH, ("cat", "stack"), "torch promotes sequences by itself"),
    RuleGroup(BANNED, F, ("binary_cross_entropy",), "log of a probability that lower precision rounds to 0 or 1"),
    RuleGroup(REJECT, (TORCH, TENSOR), (*(f"{name}_" for name in _OUT_OF_RANGE), "pow_", "cumprod_", "cumsum_", "renorm_"),
        "the result has to fit into the float16 tensor it overwrites"),
    RuleGroup(MATCH_FIRST, TENSOR, ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"),
        "the tensor written to fixes the dtype; torch wants the others to have it"),
    RuleGroup(NATIVE, TENSOR, ("addcdiv_", "addcmul_", "atan2_", "add_", "div_", "mul_",
        *(f"{name}_" for name in _COMPARISONS)), "torch lets the tensor written to fix the dtype by itself"),
)

TODAY = (
    # Matrix products under the names that came later.
    RuleGroup(LOWER, TORCH, ("chain_matmul", "tensordot"), "contractions are matrix products"),
    RuleGroup(CONTRACTION, TORCH, ("einsum",),
        "a matrix product where it sums over an index; else it only multiplies, and angles (position times frequency) need "
        "float32: unlike torch.autocast's list for CUDA, which has them more than 1 rad off before position 512"),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("addmv", "addr", "mv"),
        "one vector gives matrix units nothing to do, and power iteration (spectral norm) needs float32"),
    RuleGroup(LOWER, LINALG, ("multi_dot", "matmul", "vecdot"), "matrix products"),
    RuleGroup(LOWER, TENSOR, ("__rmatmul__",), "the reflected operator form of matmul"),
    RuleGroup(LOWER, F, ("scaled_dot_product_attention",), "two matrix products; its softmax runs in float32 inside"),
    RuleGroup(LOWER, TORCH, ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        "the fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer in eval: they want equal dtypes"),
    RuleGroup(LOWER, TORCH, ("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn",
        "mkldnn_rnn_layer", "_scaled_dot_product_flash_attention"),
        "what convolutions, recurrent layers and attention are made of, where a script calls it by name"),
    RuleGroup(LOWER, (TORCH, TENSOR), ("_addmm_activation",), "a matrix product with its activation"),
    RuleGroup(LOWER, F, ("grouped_mm",), "matrix products of groups of rows"),
    # Softmax, norms and losses in all their spellings.
    RuleGroup(FP32, (TORCH, TENSOR, SPECIAL), ("log_softmax", "logsumexp", "log1p"), "built on exp and log"),
    RuleGroup(FP32, (TORCH, TENSOR, SPECIAL), ("softmax",), "built on exp", narrow=True),
    RuleGroup(FP32, TORCH, ("embedding",),
        "a table that is stored in lower precision gives float32 rows, whose gradients are added up in float32"),
    RuleGroup(FP32, (TORCH, TENSOR), ("arccos", "arcsin"), "other names of acos and asin"),
    RuleGroup(FP32, (TORCH, TENSOR, SPECIAL), ("digamma", "erfc", "exp2", "i0", "lgamma", "mvlgamma", "polygamma", "square"),
        "leaves the range of float16, or is steep"),
    RuleGroup(FP32, SPECIAL, ("entr", "erfinv", "expm1", "gammaln", "logit", "multigammaln", "psi", "xlog1py", "xlogy"),
        "leaves the range of float16, or is steep"),
    RuleGroup(FP32, (TORCH, TENSOR), ("xlogy", "logit", "logaddexp", "logaddexp2", "logcumsumexp"), "built on log"),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("arccos_", "arcsin_", "digamma_", "erfc_", "exp2_", "i0_", "igamma_", "igammac_", "lgamma_",
        "log1p_", "logit_", "mvlgamma_", "polygamma_", "square_", "xlogy_"),
        "an in-place function keeps its tensor, dtype and storage, as torch has it"),
    RuleGroup(FP32, F, ("upsample", "upsample_nearest", "upsample_bilinear"), "older names of interpolate"),
    RuleGroup(FP32, TORCH, ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback"),
        "coordinates need more than 8 or 11 bits"),
    RuleGroup(FP32, TORCH, ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
        "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine",
        "fused_moving_avg_obs_fake_quant"), "its results are points of a grid that bfloat16 does not hold"),
    RuleGroup(FP32, F, ("rms_norm", "instance_norm"), "sums of squares; float32 weights want a float32 input", narrow=True),
    RuleGroup(FP32, TORCH, ("layer_norm", "group_norm", "rms_norm", "instance_norm"),
        "sums of squares; the spellings below torch.nn.functional", narrow=True),
    RuleGroup(FP32, F, ("huber_loss", "gaussian_nll_loss", "triplet_margin_with_distance_loss"), _LOSS),
    RuleGroup(FP32, TORCH, ("binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "hinge_embedding_loss",
        "kl_div", "margin_ranking_loss", "poisson_nll_loss", "triplet_margin_loss"), "losses under their names in torch"),
    RuleGroup(FP32, (F, TORCH), ("pairwise_distance", "pdist", "cdist"), "sums of squares"),
    RuleGroup(FP32, LINALG, ("norm", "vector_norm", "matrix_norm"), "sums of squares"),
    RuleGroup(FP32, (TORCH, TENSOR), ("_weight_norm", "frobenius_norm", "nuclear_norm", "norm_except_dim", "std_mean", "var_mean",
        "cov", "corrcoef", "cosine_similarity", "native_layer_norm", "native_group_norm"), "sums of squares"),
    RuleGroup(FP32, "torch.nn.utils.weight_norm", ("_weight_norm",),
        "sums of squares, under the name that the older weight norm has bound; wants equal dtypes"),
    RuleGroup(FP32, (TORCH, TENSOR), ("bincount", "nansum", "trace", "trapezoid", "cumulative_trapezoid"),
        "reductions over many elements"),
    # Functions without lower-precision kernels: what ran in float32 before must still run.
    RuleGroup(FP32, (TORCH, TENSOR), ("cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "logdet",
        "lu", "lu_solve", "matrix_exp", "matrix_power", "nanquantile", "ormqr", "orgqr", "pinverse", "qr", "quantile",
        "slogdet", "svd", "triangular_solve", "smm", "sspaddmm", "stft", "istft"), "torch has no lower-precision kernel for it"),
    RuleGroup(FP32, TORCH, ("_lu_with_info", "complex", "histogramdd", "lobpcg", "lstsq", "lu_unpack", "pca_lowrank", "polar",
        "svd_lowrank", "view_as_complex", "dsmm", "hspmm", "spmm"), "torch has no lower-precision kernel for it"),
    RuleGroup(FP32, (TORCH, TENSOR), ("angle", "histc", "histogram", "igamma", "igammac"),
        "torch has no lower-precision kernel for it, or none on one device"),
    RuleGroup(FP32, F, ("adaptive_avg_pool3d",), "its CPU kernel sums in the dtype of the input"),
    RuleGroup(FP32, F, ("avg_pool3d",), "torch has no lower-precision kernel for it on the CPU"),
    RuleGroup(FP32, "torch.sparse", ("addmm", "mm", "sampled_addmm"), "torch has no lower-precision kernel for it"),
    RuleGroup(FP32, SPECIAL, ("airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "chebyshev_polynomial_t",
        "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "erfcx", "gammainc", "gammaincc",
        "hermite_polynomial_h", "hermite_polynomial_he", "i0e", "i1", "i1e", "laguerre_polynomial_l", "legendre_polynomial_p",
        "log_ndtr", "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtri",
        "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "shifted_chebyshev_polynomial_t",
        "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v", "shifted_chebyshev_polynomial_w",
        "spherical_bessel_j0", "zeta"), "torch has no lower-precision kernel for it"),
    RuleGroup(FP32, LINALG, ("cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh",
        "householder_product", "inv", "inv_ex", "ldl_factor", "ldl_factor_ex", "ldl_solve", "lstsq", "lu", "lu_factor",
        "lu_factor_ex", "lu_solve", "matrix_exp", "matrix_power", "matrix_rank", "matrix_sqrth", "pinv", "polar", "qr",
        "slogdet", "solve", "solve_ex", "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve", "vander"),
        "torch has no lower-precision kernel for it"),
    RuleGroup(FP32, "torch.fft", ("fft", "fft2", "fftn", "hfft", "hfft2", "hfftn", "ifft", "ifft2", "ifftn", "ihfft",
        "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftn"),
        "no bfloat16 kernels, and float16 only for powers of two"),
    RuleGroup(FP32, TORCH, ("_dirichlet_grad", "_sample_dirichlet", "_standard_gamma", "_standard_gamma_grad", "binomial"),
        "torch has no lower-precision kernel for it; Beta, Dirichlet, Gamma, StudentT and Binomial draw from it"),
    RuleGroup(FP32, TENSOR, ("__array__", "numpy"), "NumPy has no bfloat16"),
    RuleGroup(FP32, VISION, ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"),
        "coordinates need more than 8 or 11 bits; torchvision has no bfloat16 kernel for it", package="torchvision"),
    RuleGroup(FP32, "torchvision.ops.boxes", ("batched_nms",),
        "moves boxes far apart, class by class, where lower precision cannot tell those of a class from one another",
        package="torchvision"),
    # Mixed dtypes that torch refuses to promote: a lower-precision activation meets a float32 tensor of the script.
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("vdot", "inner", "allclose", "isclose", "lerp", "heaviside", "cartesian_prod", "meshgrid"),
        "torch wants equal dtypes"),
    RuleGroup(PROMOTE, TORCH, ("embedding_bag",), "torch wants weights and per_sample_weights of equal dtype"),
    RuleGroup(PROMOTE, LINALG, ("cross",), "torch wants equal dtypes"),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("index_add", "index_copy", "index_put", "index_reduce", "masked_scatter", "put",
        "scatter", "scatter_add", "scatter_reduce"), "torch wants source and destination of equal dtype"),
    RuleGroup(MATCH_FIRST, TENSOR, ("__setitem__", "index_add_", "index_copy_", "index_put_", "index_reduce_", "lerp_",
        "masked_scatter_", "put_", "scatter_", "scatter_add_", "scatter_reduce_"),
        "the tensor written to fixes the dtype; torch wants the source to have it"),
    RuleGroup(MATCH_FIRST, TORCH, ("addmv_", "index_put_"), "the tensor written to fixes the dtype"),
    RuleGroup(NATIVE, (F, TORCH), ("adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d", "max_pool3d",
        "max_unpool2d", "max_unpool3d", "pad"), "selects or copies elements, which is exact in every precision"),
    RuleGroup(FP32_WEIGHTS, F, ("batch_norm",), "its statistics, to which it writes, are float32; its weights then have to be"),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("arctan2_",), "torch lets the tensor written to fix the dtype by itself"),
    RuleGroup(NATIVE, TORCH, ("concat", "concatenate", "hstack", "vstack", "dstack", "outer", "ger", "kron", "where",
        "maximum", "minimum"), "torch promotes by itself"),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("arctan2",), "torch promotes by itself"),
    RuleGroup(NATIVE, F, ("gelu",),
        "computes in float32 inside and rounds its result once, as a matrix product after it would"),
)

APEX_ONLY = (
    RuleGroup(FP32, F, ("gelu",), "built on exp; Apex had it in float32"),
    RuleGroup(LOWER, (TORCH, TENSOR), ("addmv", "addr", "mv"), "matrix products; Apex had them in lower precision"),
    RuleGroup(FP32, TENSOR, ("cpu",), "Apex brought tensors to the host as float32; scripts then call numpy()"),
)

_LOSSES = (
    "cosine_embedding_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits",
)

_CUDA = "torch.autocast's list for CUDA"
CUDA_LIST = (
    RuleGroup(LOWER, (F, TORCH, TENSOR), (*CONVOLUTIONS, "prelu", "linear", "scaled_dot_product_attention", "addmm", "addmv",
        "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm", "__matmul__", "__rmatmul__", "einsum", "chain_matmul",
        "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
        "_scaled_dot_product_flash_attention"), _CUDA),
    RuleGroup(LOWER, LINALG, ("vecdot", "multi_dot", "matmul"), _CUDA),
    RuleGroup(LOWER, (VF, TORCH), ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm", "gru", "rnn_tanh",
        "rnn_relu"), _CUDA),
    RuleGroup(FP32, (TORCH, TENSOR, SPECIAL), ("acos", "arccos", "asin", "arcsin", "cosh", "erfinv", "exp", "expm1", "log",
        "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "logsumexp", "prod",
        "cumprod", "cumsum", "sum", "norm", "dist", "renorm", "nuclear_norm", "frobenius_norm"), _CUDA),
    RuleGroup(FP32, (F, TORCH, TENSOR, SPECIAL), ("softmax", "log_softmax"), _CUDA),
    RuleGroup(FP32, LINALG, ("vector_norm", "matrix_norm", "norm"), _CUDA),
    RuleGroup(FP32, (F, TORCH), (*_LOSSES, "cosine_similarity", "pdist", "cdist", "softplus", "layer_norm", "native_layer_norm",
        "group_norm", "rms_norm", "interpolate", "upsample", "upsample_nearest", "upsample_bilinear"), _CUDA),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("cross", "dot", "vdot", "index_put", "scatter_add", "tensordot"), _CUDA),
    RuleGroup(PROMOTE, (F, TORCH), ("bilinear", "grid_sample", "grid_sampler"), _CUDA),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("addcdiv", "addcmul", "atan2", "arctan2"), f"{_CUDA} promotes, as torch does"),
    RuleGroup(BANNED, F, ("binary_cross_entropy",), _CUDA),
)

_CPU = "torch.autocast's list for the CPU"
CPU_LIST = (
    RuleGroup(LOWER, (F, TORCH, TENSOR), (*CONVOLUTIONS, "prelu", "linear", "scaled_dot_product_attention", "_convolution", "bmm",
        "mm", "baddbmm", "addmm", "addbmm", "matmul", "__matmul__", "__rmatmul__", "_addmm_activation",
        "_native_multi_head_attention", "mkldnn_rnn_layer"), _CPU),
    RuleGroup(LOWER, LINALG, ("vecdot", "matmul"), _CPU),
    RuleGroup(FP32, (F, TORCH), (*_LOSSES, "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d", "max_unpool2d",
        "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d", "grid_sample", "grid_sampler", "grid_sampler_2d",
        "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", "ctc_loss"), _CPU),
    RuleGroup(FP32, F, ("cross_entropy", "binary_cross_entropy"), _CPU),
    RuleGroup(FP32, (TORCH, TENSOR), ("prod", "quantile", "nanquantile", "trace", "cholesky", "cholesky_inverse",
        "cholesky_solve", "inverse", "lu_solve", "orgqr", "ormqr", "geqrf", "qr", "svd", "triangular_solve", "pinverse",
        "stft", "cdist", "polar", "view_as_complex", "_lu_with_info", "fake_quantize_per_tensor_affine"), _CPU),
    RuleGroup(FP32, LINALG, ("cond", "matrix_rank", "solve", "cholesky", "cholesky_ex", "svd", "svdvals", "eig", "eigh",
        "eigvals", "eigvalsh", "inv", "inv_ex", "householder_product", "tensorinv", "tensorsolve", "qr", "lstsq"), _CPU),
    RuleGroup(FP32, "torch.fft", ("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2",
        "irfftn", "rfft", "rfft2", "rfftn"), _CPU),
    RuleGroup(NATIVE, F, ("pad",), "reflection and replication, which the CPU's list has in float32, only copy elements"),
    RuleGroup(NATIVE, TORCH, ("cat", "stack"), f"{_CPU} promotes, as torch does"),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("index_copy",), _CPU),
)
# fmt: on

# A later group wins. A function that a policy's own list does not know keeps the default's row.
DEFAULT = APEX + TODAY
TABLES: dict[str, tuple[RuleGroup, ...]] = {
    "default": DEFAULT,
    "apex": DEFAULT + APEX_ONLY,
    "autocast-cpu": DEFAULT + CPU_LIST,
    "autocast-cuda": DEFAULT + CUDA_LIST,
}
