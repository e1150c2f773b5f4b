"""torch.autocast's own op lists, under the names that Python has for their operators: data only.

Under ``policy="autocast"`` `CUDA_LIST` and `CPU_LIST` override the default tables (`tables.py`);
docs/policy.md compares them with these. Their sources are ATen/autocast_mode.h and autocast_mode.cpp; the tests compare
them with what the installed torch has registered.
"""

from __future__ import annotations

from .cast_rules import BANNED, FP32, LINALG, LOWER, NATIVE, PROMOTE, SPECIAL, TENSOR, TORCH, VF, F, RuleGroup

# Many names to a line, as in a table.
# fmt: off
CONVOLUTIONS = (
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
)
_LOSSES = (
    "cosine_embedding_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits",
)

_CUDA = "torch.autocast's list for CUDA"
CUDA_LIST = (
    RuleGroup(LOWER, (F, TORCH), CONVOLUTIONS, _CUDA),
    RuleGroup(LOWER, (F, TORCH, TENSOR), ("prelu",), _CUDA),
    RuleGroup(LOWER, F, ("linear", "scaled_dot_product_attention"), _CUDA),
    RuleGroup(LOWER, TORCH, ("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"), _CUDA),
    RuleGroup(LOWER, (TORCH, TENSOR), ("addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm"), _CUDA),
    RuleGroup(LOWER, TENSOR, ("__matmul__", "__rmatmul__"), _CUDA),
    RuleGroup(LOWER, TORCH, ("einsum", "chain_matmul"), _CUDA),
    RuleGroup(LOWER, LINALG, ("vecdot", "multi_dot", "matmul"), _CUDA),
    RuleGroup(LOWER, (VF, TORCH), ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _CUDA),
    RuleGroup(LOWER, (VF, TORCH), ("lstm", "gru", "rnn_tanh", "rnn_relu"), _CUDA),
    RuleGroup(LOWER, TORCH, ("_scaled_dot_product_flash_attention",), _CUDA),
    RuleGroup(FP32, (TORCH, TENSOR, SPECIAL), ("acos", "arccos", "asin", "arcsin", "cosh", "erfinv", "exp", "expm1", "log",
        "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow", "logsumexp", "prod", "softmax", "log_softmax",
        "cumprod", "cumsum", "sum", "norm", "dist", "renorm", "nuclear_norm", "frobenius_norm"), _CUDA),
    RuleGroup(FP32, TENSOR, ("__pow__", "__rpow__"), _CUDA),
    RuleGroup(FP32, LINALG, ("vector_norm", "matrix_norm", "norm"), _CUDA),
    RuleGroup(FP32, F, ("softplus", "softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm"), _CUDA),
    RuleGroup(FP32, TORCH, ("layer_norm", "native_layer_norm", "group_norm", "rms_norm"), _CUDA),
    RuleGroup(FP32, (F, TORCH), (*_LOSSES, "cosine_similarity", "pdist", "cdist"), _CUDA),
    RuleGroup(FP32, F, ("interpolate", "upsample", "upsample_nearest", "upsample_bilinear"), _CUDA),
    RuleGroup(PROMOTE, (F, TORCH), ("bilinear",), _CUDA),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("cross", "dot", "vdot", "index_put", "scatter_add"), _CUDA),
    RuleGroup(PROMOTE, TORCH, ("tensordot",), _CUDA),
    RuleGroup(PROMOTE, F, ("grid_sample",), _CUDA),
    RuleGroup(PROMOTE, TORCH, ("grid_sampler",), _CUDA),
    RuleGroup(NATIVE, (TORCH, TENSOR), ("addcdiv", "addcmul", "atan2", "arctan2"), f"{_CUDA} promotes, as torch does"),
    RuleGroup(BANNED, F, ("binary_cross_entropy",), _CUDA),
)

_CPU = "torch.autocast's list for the CPU"
CPU_LIST = (
    RuleGroup(LOWER, (F, TORCH), CONVOLUTIONS, _CPU),
    RuleGroup(LOWER, (F, TORCH, TENSOR), ("prelu",), _CPU),
    RuleGroup(LOWER, F, ("linear", "scaled_dot_product_attention"), _CPU),
    RuleGroup(LOWER, TORCH, ("_convolution",), _CPU),
    RuleGroup(LOWER, (TORCH, TENSOR), ("bmm", "mm", "baddbmm", "addmm", "addbmm", "matmul", "_addmm_activation"), _CPU),
    RuleGroup(LOWER, TENSOR, ("__matmul__", "__rmatmul__"), _CPU),
    RuleGroup(LOWER, LINALG, ("vecdot", "matmul"), _CPU),
    RuleGroup(LOWER, TORCH, ("_native_multi_head_attention", "mkldnn_rnn_layer"), _CPU),
    RuleGroup(FP32, (F, TORCH), ("avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d", "max_unpool2d",
        "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d"), _CPU),
    RuleGroup(FP32, F, ("grid_sample", "cross_entropy", "binary_cross_entropy"), _CPU),
    RuleGroup(FP32, TORCH, ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback"), _CPU),
    RuleGroup(FP32, (F, TORCH), (*_LOSSES, "ctc_loss"), _CPU),
    RuleGroup(FP32, (TORCH, TENSOR), ("prod", "quantile", "nanquantile", "trace", "cholesky", "cholesky_inverse",
        "cholesky_solve", "inverse", "lu_solve", "orgqr", "ormqr", "geqrf", "qr", "svd", "triangular_solve", "pinverse",
        "stft"), _CPU),
    RuleGroup(FP32, TORCH, ("cdist", "polar", "view_as_complex", "_lu_with_info", "fake_quantize_per_tensor_affine"), _CPU),
    RuleGroup(FP32, LINALG, ("cond", "matrix_rank", "solve", "cholesky", "cholesky_ex", "svd", "svdvals", "eig", "eigh",
        "eigvals", "eigvalsh", "inv", "inv_ex", "householder_product", "tensorinv", "tensorsolve", "qr", "lstsq"), _CPU),
    RuleGroup(FP32, "torch.fft", ("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2",
        "irfftn", "rfft", "rfft2", "rfftn"), _CPU),
    RuleGroup(NATIVE, F, ("pad",), "reflection and replication, which the CPU's list has in float32, only copy elements"),
    RuleGroup(NATIVE, TORCH, ("cat", "stack"), f"{_CPU} promotes, as torch does"),
    RuleGroup(PROMOTE, (TORCH, TENSOR), ("index_copy",), _CPU),
)
# fmt: on
