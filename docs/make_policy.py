"""Writes docs/policy.md from the cast tables: ``python docs/make_policy.py``.

For each function on which torch.autocast's lists for CUDA and for the CPU disagree, it measures the error of both
choices against float64, on the CPU, with the inputs of `SAMPLES`. ``tests/o1/test_policy_docs.py`` keeps the page current.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tables of this clone

from ampkit.policy.cast_rules import CastKind, RuleGroup
from ampkit.policy.tables import APEX, APEX_ONLY, CPU_LIST, CUDA_LIST, DEFAULT

PAGE = Path(__file__).with_name("policy.md")
WORDS = {
    CastKind.LOWER_PRECISION_FP: "lower",
    CastKind.FP32: "fp32",
    CastKind.PROMOTE: "promote",
    CastKind.CONTRACTION: "lower or promote",
    CastKind.MATCH_FIRST: "match first",
    CastKind.FP32_WEIGHTS: "fp32 weights",
    CastKind.REJECT: "refused in float16",
    CastKind.BANNED: "refused",
    CastKind.NATIVE: "native",
}
# Spellings of a function that the page has under another name.
OTHER_NAMES = {
    "arccos", "arcsin", "upsample", "upsample_bilinear", "upsample_nearest", "native_layer_norm", "__pow__", "__rpow__",
    "_grid_sampler_2d_cpu_fallback", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "_lu_with_info",
}  # fmt: skip
# The same kernels as a function that is measured, or kernels that the CPU does not have.
NOT_MEASURED = {
    "_native_multi_head_attention", "_scaled_dot_product_flash_attention", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "mkldnn_rnn_layer",
}  # fmt: skip

Inputs = tuple[Any, ...]


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return torch.randn(shape) * scale + shift


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return torch.rand(shape) * (high - low) + low


def definite(size: int) -> Tensor:
    a = torch.randn(size, size)
    return a @ a.T / size + torch.eye(size)


def factored(size: int) -> Inputs:
    a, tau = torch.geqrf(torch.randn(size, size))
    return a, tau


def solved(size: int) -> Inputs:
    lu, pivots = torch.linalg.lu_factor(definite(size))
    return normal(size, 2), lu, pivots


def recurrent(gates: int) -> Inputs:
    return tuple(uniform(gates * 64, *size, low=-0.125, high=0.125) for size in ((64,), (64,), (), ()))


def elementwise(*names: str, low: float, high: float) -> dict[str, tuple[Callable, Callable[[], Inputs]]]:
    return {name: (getattr(torch, name), lambda: (uniform(4096, low=low, high=high),)) for name in names}


def of_matrix(
    owner: Any, *names: str, inputs: Callable[[], Inputs] = lambda: (definite(16),), prefix: str = ""
) -> dict:
    return {prefix + name: (getattr(owner, name), inputs) for name in names}


ROWS = torch.arange(64) % 16
# Calls on ordinary inputs, as (function, inputs): activations of a network, sums over a batch or a long row.
SAMPLES: dict[str, tuple[Callable, Callable[[], Inputs]]] = {
    **elementwise("acos", "asin", "erfinv", low=-0.99, high=0.99),
    **elementwise("cosh", "sinh", "exp", "expm1", low=-12.0, high=12.0),
    **elementwise("log", "log10", "log2", "log1p", "rsqrt", low=1e-3, high=100.0),
    **elementwise("reciprocal", low=1e-5, high=1.0),
    **elementwise("tan", low=-1.57, high=1.57),
    "pow": (lambda x: torch.pow(x, 2), lambda: (normal(4096, scale=100.0),)),
    "gelu": (F.gelu, lambda: (normal(4096, scale=3.0),)),
    "softplus": (F.softplus, lambda: (normal(4096, scale=4.0),)),
    "softmax": (lambda x: F.softmax(x, -1), lambda: (normal(64, 1000, scale=4.0),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), lambda: (normal(64, 1000, scale=4.0),)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda: (normal(64, 1000, scale=4.0),)),
    "layer_norm": (lambda x: F.layer_norm(x, (512,)), lambda: (normal(64, 512, shift=8.0),)),
    "group_norm": (lambda x: F.group_norm(x, 4), lambda: (normal(8, 16, 32, shift=8.0),)),
    "rms_norm": (lambda x: F.rms_norm(x, (512,)), lambda: (normal(64, 512, scale=300.0),)),
    "cosine_similarity": (F.cosine_similarity, lambda: (normal(64, 512, scale=30.0), normal(64, 512, scale=30.0))),
    "dist": (torch.dist, lambda: (normal(65536, scale=300.0), normal(65536, scale=300.0))),
    "pdist": (F.pdist, lambda: (normal(16, 4096),)),
    "cdist": (torch.cdist, lambda: (normal(16, 512, shift=8.0), normal(16, 512, shift=8.0))),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), lambda: (normal(16, 4096, scale=30.0),)),
    "norm": (torch.norm, lambda: (normal(65536, scale=300.0),)),
    "frobenius_norm": (lambda x: torch.linalg.norm(x, "fro"), lambda: (normal(256, 256, scale=300.0),)),
    "nuclear_norm": (lambda x: torch.linalg.norm(x, "nuc"), lambda: (normal(16, 16),)),
    "linalg.norm": (torch.linalg.norm, lambda: (normal(65536, scale=300.0),)),
    "linalg.vector_norm": (torch.linalg.vector_norm, lambda: (normal(65536, scale=300.0),)),
    "linalg.matrix_norm": (torch.linalg.matrix_norm, lambda: (normal(256, 256, scale=300.0),)),
    "sum": (torch.sum, lambda: (uniform(300000),)),
    "cumsum": (lambda x: torch.cumsum(x, 0), lambda: (uniform(300000),)),
    "cumprod": (lambda x: torch.cumprod(x, 0), lambda: (uniform(64, low=0.9, high=1.6),)),
    "trace": (torch.trace, lambda: (uniform(512, 512),)),
    "interpolate": (
        lambda x: F.interpolate(x, size=(100, 100), mode="bicubic"),
        lambda: (normal(1, 3, 33, 33, shift=4.0),),
    ),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        lambda: (normal(1, 3, 64, 64), uniform(1, 32, 32, 2, low=-1.0, high=1.0)),
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, ROWS, reduction="sum"),
        lambda: (normal(64, 1000, scale=4.0),),
    ),
    "ctc_loss": (
        lambda x: F.ctc_loss(x.log_softmax(-1), ROWS.view(4, 16) + 1, torch.full((4,), 50), torch.full((4,), 16)),
        lambda: (normal(50, 4, 20),),
    ),
    "binary_cross_entropy": (
        lambda p, y: F.binary_cross_entropy(p, y),
        lambda: (torch.sigmoid(normal(4096, scale=4.0)), (normal(4096) > 0).float()),
    ),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), lambda: (normal(2, 4, 16, 16, 16, shift=4.0),)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 8), lambda: (normal(2, 4, 16, 16, 16, shift=4.0),)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), lambda: (normal(2, 4, 16, 16, 16),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), lambda: (normal(2, 4, 16, 16, 16),)),
    "max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), lambda: (normal(2, 4, 16, 16),)),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), lambda: (normal(2, 4, 8, 8, 8),)),
    "fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 8, _random_samples=torch.full((2, 4, 2), 0.5, dtype=x.dtype)),
        lambda: (normal(2, 4, 16, 16),),
    ),
    "fractional_max_pool3d": (
        lambda x: F.fractional_max_pool3d(x, 2, 4, _random_samples=torch.full((2, 4, 3), 0.5, dtype=x.dtype)),
        lambda: (normal(2, 4, 8, 8, 8),),
    ),
    "fake_quantize_per_tensor_affine": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
        lambda: (uniform(4096, high=25.0),),
    ),
    "quantile": (lambda x: torch.quantile(x, 0.9), lambda: (normal(4096),)),
    "nanquantile": (lambda x: torch.nanquantile(x, 0.9), lambda: (normal(4096),)),
    "polar": (torch.polar, lambda: (uniform(4096), uniform(4096, high=6.0))),
    "view_as_complex": (torch.view_as_complex, lambda: (normal(4096, 2),)),
    "stft": (
        lambda x: torch.stft(x, 64, window=torch.ones(64, dtype=x.dtype), return_complex=True),
        lambda: (normal(4096),),
    ),
    "cholesky_solve": (
        lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(a)),
        lambda: (normal(16, 2), definite(16)),
    ),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(a.tril()), lambda: (definite(16),)),
    "geqrf": (lambda a: torch.geqrf(a)[0], lambda: (definite(16),)),
    "orgqr": (torch.orgqr, lambda: factored(16)),
    "ormqr": (lambda a, tau: torch.ormqr(a, tau, a), lambda: factored(16)),
    "linalg.householder_product": (torch.linalg.householder_product, lambda: factored(16)),
    "lu_solve": (torch.lu_solve, lambda: solved(16)),
    "triangular_solve": (lambda b, a: torch.triangular_solve(b, a)[0], lambda: (normal(16, 2), definite(16))),
    "qr": (lambda a: torch.linalg.qr(a)[1].abs(), lambda: (definite(16),)),
    "linalg.qr": (lambda a: torch.linalg.qr(a)[1].abs(), lambda: (definite(16),)),
    "svd": (lambda a: torch.svd(a)[1], lambda: (definite(16),)),
    "linalg.svd": (lambda a: torch.linalg.svd(a)[1], lambda: (definite(16),)),
    "linalg.eig": (lambda a: torch.linalg.eig(a)[0].abs().sort()[0], lambda: (definite(16),)),
    "linalg.eigvals": (lambda a: torch.linalg.eigvals(a).abs().sort()[0], lambda: (definite(16),)),
    "linalg.eigh": (lambda a: torch.linalg.eigh(a)[0], lambda: (definite(16),)),
    "linalg.solve": (torch.linalg.solve, lambda: (definite(16), normal(16, 2))),
    "linalg.lstsq": (lambda a, b: torch.linalg.lstsq(a, b)[0], lambda: (definite(16), normal(16, 2))),
    "linalg.tensorsolve": (torch.linalg.tensorsolve, lambda: (definite(16), normal(16))),
    "linalg.tensorinv": (lambda a: torch.linalg.tensorinv(a, 1), lambda: (definite(16),)),
    "cholesky": (torch.linalg.cholesky, lambda: (definite(16),)),  # newer torch has qr and cholesky in torch.linalg only
    **of_matrix(torch, "inverse", "pinverse"),
    **of_matrix(
        torch.linalg,
        *("cholesky", "cholesky_ex", "cond", "eigvalsh", "inv", "inv_ex", "matrix_rank", "svdvals"),
        prefix="linalg.",
    ),
    **of_matrix(
        torch.fft,
        *("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftn"),
        inputs=lambda: (normal(12, 12),),
        prefix="fft.",
    ),
    "mv": (torch.mv, lambda: (normal(64, 512), normal(512))),
    "addmv": (torch.addmv, lambda: (normal(64), normal(64, 512), normal(512))),
    "addr": (torch.addr, lambda: (normal(64, 64), normal(64), normal(64))),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), lambda: (normal(4, 64, 128), normal(128, 64))),
    "chain_matmul": (lambda *a: torch.chain_matmul(*a), lambda: (normal(64, 64), normal(64, 64), normal(64, 64))),
    "linalg.multi_dot": (lambda *a: torch.linalg.multi_dot(a), lambda: (normal(64, 64), normal(64, 64), normal(64, 64))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), lambda: (normal(4, 64, 128), normal(128, 64))),
    "_addmm_activation": (torch._addmm_activation, lambda: (normal(64), normal(64, 128), normal(128, 64))),
    "lstm_cell": (
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w)[0],
        lambda: (normal(8, 64), normal(8, 64), normal(8, 64), *recurrent(4)),
    ),
    **{
        name: (getattr(torch, name), lambda gates=gates: (normal(8, 64), normal(8, 64), *recurrent(gates)))
        for name, gates in (("gru_cell", 3), ("rnn_tanh_cell", 1), ("rnn_relu_cell", 1))
    },
    "lstm": (
        lambda x, h, c, *w: torch.lstm(x, (h, c), w, True, 1, 0.0, False, False, False)[0],
        lambda: (normal(16, 8, 64), normal(1, 8, 64), normal(1, 8, 64), *recurrent(4)),
    ),
    **{
        name: (
            lambda x, h, *w, name=name: getattr(torch, name)(x, h, w, True, 1, 0.0, False, False, False)[0],
            lambda gates=gates: (normal(16, 8, 64), normal(1, 8, 64), *recurrent(gates)),
        )
        for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    },
}  # fmt: skip


def kinds(groups: Iterable[RuleGroup]) -> dict[tuple[str, str], RuleGroup]:
    """The group of each function, by owner and name."""
    return {(path, name): group for group in groups for path in group.owners for name in group.names}


def short(path: str, name: str) -> str:
    """The name on the page: of torch and torch.nn.functional without them, of the others with theirs."""
    return name if path in ("torch", "torch.nn.functional") else f"{path.removeprefix('torch.')}.{name}"


def choices() -> dict[str, tuple[str, str, RuleGroup]]:
    """The functions on which torch's lists disagree, or the default and Apex: what CUDA's list says, what the CPU's says,
    and the default's group.
    """
    cuda, cpu, default, apex = kinds(CUDA_LIST), kinds(CPU_LIST), kinds(DEFAULT), kinds(APEX_ONLY)
    disagreements = {}
    for key in {**cuda, **cpu, **apex}:
        path, name = key
        group = default.get(key)
        if (
            group is None
            or path in ("torch.Tensor", "torch._VF", "torch.special")
            or name in OTHER_NAMES | NOT_MEASURED
        ):
            continue
        says = [WORDS[table[key].kind] if key in table else "-" for table in (cuda, cpu)]
        matters = key in apex or {*says, WORDS[group.kind]} & {"lower", "fp32"}
        # torch.nn.functional's row is the one that layers meet.
        known = short(*key) in disagreements and path != "torch.nn.functional"
        if (key in apex or says[0] != says[1]) and matters and not known:
            disagreements[short(*key)] = (*says, group)
    return dict(sorted(disagreements.items(), key=lambda item: (item[1][2].kind.name, item[1][2].reason, item[0])))


def measure(name: str) -> dict[str, tuple[float, float]]:
    """Relative errors of result and gradient against float64, when computed in float16, bfloat16 and float32.

    Inputs are rounded to the lower precision first where the function is no matrix product: they come from one. An error
    is infinite where the result is, nan where there is no kernel, and -1 where there is no gradient.
    """
    call, inputs = SAMPLES[name]
    torch.manual_seed(0)
    arguments = inputs()
    errors = {"float16": (0.0, 0.0), "bfloat16": (0.0, 0.0), "float32": (0.0, 0.0)}
    from_product = choices()[name][2].kind not in (CastKind.LOWER_PRECISION_FP, CastKind.CONTRACTION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float16, torch.bfloat16):
            seen = cast(arguments, dtype) if from_product else arguments
            exact = evaluate(call, cast(seen, torch.float64))
            errors[str(dtype).removeprefix("torch.")] = errors_of(call, cast(seen, dtype), exact)
            in_float32 = errors_of(call, cast(seen, torch.float32), exact)
            errors["float32"] = tuple(map(max, errors["float32"], in_float32))
    return errors


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def evaluate(call: Callable, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The result, and the gradient of the first input for a random direction of signs, which every dtype holds."""
    leaf = inputs[0].detach().requires_grad_()
    result = call(leaf, *inputs[1:])
    result = result[0] if isinstance(result, tuple) else result
    if result.is_complex():
        result = torch.view_as_real(result.resolve_conj())
    if not result.requires_grad:
        return result, None
    signs = (torch.rand(result.shape, generator=torch.Generator().manual_seed(1)) < 0.5) * 2 - 1
    try:
        return result.detach(), torch.autograd.grad(result, leaf, signs.to(result.dtype))[0]
    except RuntimeError:  # torch has no derivative
        return result.detach(), None


def errors_of(call: Callable, inputs: Inputs, exact: tuple[Tensor, Tensor | None]) -> tuple[float, float]:
    try:
        computed = evaluate(call, inputs)
    except RuntimeError:
        return math.nan, math.nan
    return tuple(map(relative_error, computed, exact))


def relative_error(computed: Tensor | None, exact: Tensor | None) -> float:
    if computed is None or exact is None:
        return -1.0
    if not computed.isfinite().all():
        return math.inf
    return ((computed.double() - exact.double()).norm() / exact.double().norm()).item()


def shown(errors: tuple[float, float]) -> str:
    """Write each error with one digit: more would differ from processor to processor."""
    if math.isnan(errors[0]):
        return "no kernel"
    words = {math.inf: "overflows", -1.0: "-", 0.0: "exact"}
    return " / ".join(words.get(error, f"{error:.0e}") for error in errors)


def choices_table() -> list[str]:
    lines = [
        "| function | CUDA's list | CPU's list | ampkit | float16 | bfloat16 | float32 | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (cuda, cpu, group) in choices().items():
        errors = " | ".join(shown(error) for error in measure(name).values())
        origin = "; a row of Apex's" if group in APEX else ""
        lines.append(f"| `{name}` | {cuda} | {cpu} | {WORDS[group.kind]} | {errors} | {group.reason}{origin} |")
    return lines


def all_rows() -> list[str]:
    lines = ["| functions | of | in | reason |", "|---|---|---|---|"]
    for group in sorted(DEFAULT, key=lambda group: list(WORDS).index(group.kind)):
        owners = ", ".join(f"`{path}`" for path in group.owners)
        names = ", ".join(f"`{name}`" for name in group.names)
        kind = WORDS[group.kind] + ", narrow" * group.narrow
        lines.append(f"| {names} | {owners} | {kind} | {group.reason} |")
    return lines


def differences(groups: Iterable[RuleGroup]) -> list[str]:
    """The rows of another policy that differ from the default."""
    default = kinds(DEFAULT)
    lines = ["| function | default | here |", "|---|---|---|"]
    for (path, name), group in kinds(groups).items():
        usual = default.get((path, name))
        if getattr(owner_of(path), name, None) is not None and (usual is None or usual.kind is not group.kind):
            before = WORDS[usual.kind] if usual else "-"
            lines.append(f"| `{path}.{name}` | {before} | {WORDS[group.kind]} |")
    return lines


def owner_of(path: str) -> Any:
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    return owner


def page() -> str:
    tables = {
        "choices": choices_table(),
        "rows": all_rows(),
        "apex": differences(APEX_ONLY),
        "autocast_cpu": differences(CPU_LIST),
        "autocast_cuda": differences(CUDA_LIST),
    }
    return TEXT.format(**{name: "\n".join(lines) for name, lines in tables.items()})


TEXT = """# Which function computes in which precision

Written by `python docs/make_policy.py` from the tables in `ampkit/policy/`; do not edit.

At every level but O0 each torch function that has a row computes in the precision of its row. A function without one takes
its arguments as they come.

| in | means |
|---|---|
| lower | arguments are cast to the lower precision of the session; casts of weights are kept |
| fp32 | float16 and bfloat16 arguments are cast to float32 |
| fp32, narrow | the same; at O2, O3 and O5 the result is handed on, and saved, in the precision of the input |
| promote | where dtypes are mixed, arguments are cast to the widest |
| lower or promote | lower where the call sums over an index, else promote |
| match first | an in-place function: other arguments are cast to the dtype of the tensor written to |
| fp32 weights | what comes after the input is cast to float32, but for statistics in lower precision |
| native | left to torch, which promotes by itself |
| refused | an error, with advice, for lower-precision arguments; in float16 only where it says so; at O2, O3 and O5 fp32 |

float64, integer and complex tensors, an explicit `dtype=`, and the tensors that `out=` and in-place functions write to are left
as they are. NumPy has no bfloat16: `numpy()` of a bfloat16 tensor gives a float32 array, wherever the tensor is.

torchvision's operators have rows where torchvision is loaded: from `initialize` on, or, when it is imported later, from the
next forward of an initialized model on.

## Choosing and changing

```python
import torch

import ampkit

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ampkit.initialize(model, optimizer, policy="apex")  # or "autocast"
ampkit.initialize(model, optimizer, policy={{"torch.nn.functional.gelu": "fp32"}})
policy = ampkit.Policy("apex", {{"torch.exp": "native"}}, banned="fp32")
ampkit.initialize(model, optimizer, policy=policy)
```

A row may become `"lower"`, `"bfloat16"`, `"fp32"`, `"promote"`, `"native"` or `"error"` (refused in lower precision); that
of an in-place function `"promote"`, `"native"` or `"error"`. A changed row of torch.nn.functional holds for what it
calls under the same name, too:
`F.softmax` calls `Tensor.softmax`. What it calls under other names keeps its own row. `banned="fp32"` has the functions that the
tables refuse computed in float32, `banned="allow"` leaves them to torch.

`"autocast"` takes torch.autocast's list for the device type of the models when they are initialized; `"autocast-cpu"` and
`"autocast-cuda"` name one outright. A function that a list does not know keeps its row of the default. Sessions that
live at the same time need the same policy. A changed row is not narrow.

## Where torch's own lists disagree

torch.autocast has a list for CUDA and another for the CPU. Where they disagree, the default takes the lower precision, unless that
can overflow float16 from ordinary inputs, or loses accuracy, or has no kernel. A dash is a function that is not in the
list and so computes in the precision of its inputs. The last columns are relative errors against float64 of result / gradient,
measured on the CPU. Rounding the result alone gives about 2e-04 in float16 and 2e-03 in bfloat16. Rows of Apex's are kept where
rounding is all they save: the results of these functions are what losses and statistics are made of, and scripts written
for Apex count on float32. gelu is the exception: no list of torch's knows it, and it is an activation, whose result goes
to the next layer.

{choices}

## policy="apex"

Apex's lists are part of the default. What differs:

{apex}

## policy="autocast"

On the CPU (`"autocast-cpu"`):

{autocast_cpu}

On CUDA and other accelerators (`"autocast-cuda"`):

{autocast_cuda}

## All rows of the default

{rows}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
