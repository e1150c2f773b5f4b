"""The speed of the multi-tensor kernels: GB/s beside a plain copy, and the time of the same work in public torch calls.

    python benchmarks/bench_kernels.py [--lists resnet50 gpt2 tiny] [--only adam] [--device cpu] [--rounds 11] [--minima]

For each kernel, the copy, ours and torch's run in turn, round after round, and medians are printed: what else the machine
does hits all alike. Ours and torch's take turns in following the copy, which leaves nothing else in the caches. Bytes are
those that the operation must move: each input read once, each output written once. The copy is of float32, as many bytes as
the largest list has. Where torch has no fused optimizer of the kind, its foreach calls are the other side
(ampkit/kernels/reference_optimizers.py), and for weights and rests what defines them (split.py); moments in 8 bits are compared
with ours in float32. `--minima` takes the smallest time of one thread instead, not counting when it waited: for a machine that has
other work. `gpt2_quarter` is gpt2 with half the width.
"""

import argparse
import statistics
import time
from functools import partial

import torch

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import backend, moments

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lists", nargs="+", default=["resnet50", "gpt2", "tiny"], choices=list(LISTS))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--minima", action="store_true", help="the smallest times of one thread; on the CPU only")
    args = parser.parse_args()
    if args.minima:
        torch.set_num_threads(1)
    print(kernels.implementation())
    for name in args.lists:
        shapes = LISTS[name]()
        elements = sum(shape.numel() for shape in shapes)
        print(f"\n{name}: {len(shapes)} tensors, {elements / 1e6:.1f} M elements, on {args.device}", end="")
        print(f", {torch.get_num_threads()} threads" if args.device == "cpu" else "")
        print(f"{'operation':<44}{'bytes':>6}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'torch, ms':>11}{'ratio':>7}")
        for case, (make, size) in CASES.items():
            if args.only in case:
                print_row(case, size, elements, *time_case(make, shapes, elements, args))


def print_row(case, size, elements, copy, ours, theirs):
    rate, copy_rate = elements * size / ours / 1e9, elements * 8 / copy / 1e9
    print(f"{case:<44}{size:>6}{ours * 1e3:>9.3f}{rate:>8.1f}{rate / copy_rate:>9.2f}", end="")
    print(f"{theirs * 1e3:>11.3f}{ours / theirs:>7.2f}", flush=True)


def time_case(make, shapes, elements, args):
    torch.manual_seed(0)
    run, run_torch = make(shapes, args.device)
    source, target = torch.ones(elements, device=args.device), torch.zeros(elements, device=args.device)
    if args.minima:
        return interleaved((lambda: target.copy_(source), run, run_torch), args.rounds, time.thread_time, min)
    return interleaved(
        (lambda: target.copy_(source), run, run_torch), args.rounds, lambda: now(args.device), statistics.median
    )


def interleaved(runs, rounds, clock, typical):
    times = [[] for _ in runs]
    first, *others = range(len(runs))
    for i in range(rounds + 2):
        for which in (first, *(others if i % 2 else others[::-1])):
            start = clock()
            runs[which]()
            if i >= 2:
                times[which].append(clock() - start)
    return [typical(seconds) for seconds in times]


def now(device):
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def resnet50_shapes():
    """The shapes of all parameters but the last bias: 160."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                convolutions.append((4 * planes, width, 1, 1))
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            width = 4 * planes
    return [torch.Size(shape) for shape in [*shapes, (1000, 2048)]]


def gpt2_shapes(width=768):
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [torch.Size(shape) for shape in [(50257, width), (1024, width), *block * 12, (width,), (width,)]]


LISTS = {
    "resnet50": resnet50_shapes,
    "gpt2": gpt2_shapes,
    "gpt2_quarter": lambda: gpt2_shapes(384),
    "tiny": lambda: [torch.Size((100,))] * 5000,
}


def random(shapes, device, dtype=F32):
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def zeros(shapes, device, dtype=F32):
    return [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]


def flags(device):
    """(found_inf, inverse scale)"""
    return torch.zeros(1, device=device), torch.ones(1, device=device)


def torch_unscale(lower, outputs, found_inf, inverse):
    torch._foreach_copy_(outputs, lower)
    torch._amp_foreach_non_finite_check_and_unscale_(outputs, found_inf, inverse)


def unscale(dtype):
    def make(shapes, device):
        grads, outputs = random(shapes, device, dtype), zeros(shapes, device)
        found_inf, inverse = flags(device)
        return (
            lambda: kernels.multi_tensor_scale(grads, outputs, inverse, found_inf),
            lambda: torch_unscale(grads, outputs, found_inf, inverse),
        )

    return make


def unscale_in_place(shapes, device):
    grads = random(shapes, device)
    found_inf, inverse = flags(device)
    return (
        lambda: kernels.multi_tensor_scale(grads, grads, inverse, found_inf),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse),
    )


def narrow(dtype):
    def make(shapes, device):
        masters, weights = random(shapes, device), zeros(shapes, device, dtype)
        return (
            lambda: kernels.multi_tensor_scale(masters, weights, 1.0),
            lambda: torch._foreach_copy_(weights, masters),
        )

    return make


def accumulate(shapes, device):
    grads, sums, spare = random(shapes, device, BF16), random(shapes, device), zeros(shapes, device)
    found_inf, inverse = flags(device)

    def theirs():
        torch_unscale(grads, spare, found_inf, inverse)
        torch._foreach_add_(sums, spare)

    return lambda: kernels.multi_tensor_axpby(grads, sums, sums, inverse, 1.0, found_inf, 0), theirs


def norm(dtype):
    def make(shapes, device):
        tensors = random(shapes, device, dtype)
        return (
            lambda: kernels.multi_tensor_l2norm(tensors),
            lambda: torch.stack(torch._foreach_norm(tensors, 2, dtype=F32)).norm(),
        )

    return make


def norm_and_check(writes):
    def make(shapes, device):
        grads, outputs = random(shapes, device, BF16), zeros(shapes, device)
        found_inf, inverse = flags(device)

        def theirs():
            torch_unscale(grads, outputs, found_inf, inverse)
            return torch.stack(torch._foreach_norm(outputs, 2)).norm()

        targets = outputs if writes else None
        return lambda: kernels.multi_tensor_unscale_l2norm(grads, targets, inverse, found_inf), theirs

    return make


def weights_with_rests(shapes, device):
    weights, rests = zeros(shapes, device, BF16), zeros(shapes, device, torch.int16)
    kernels.multi_tensor_split(random(shapes, device), weights, rests)
    return weights, rests


def in_torch(function, *args, **kwargs):
    """Call the function with the reference in plain torch in place of kernels."""
    devices, backend.kernel_devices = backend.kernel_devices, frozenset()
    try:
        return function(*args, **kwargs)
    finally:
        backend.kernel_devices = devices


def join(shapes, device):
    weights, rests = weights_with_rests(shapes, device)
    outputs = zeros(shapes, device)
    return (
        lambda: kernels.multi_tensor_join(weights, rests, outputs),
        lambda: in_torch(kernels.multi_tensor_join, weights, rests, outputs),
    )


def split(shapes, device):
    values, (weights, rests) = random(shapes, device), weights_with_rests(shapes, device)
    return (
        lambda: kernels.multi_tensor_split(values, weights, rests),
        lambda: in_torch(kernels.multi_tensor_split, values, weights, rests),
    )


def step_of(kernel):
    """The function of a rule, the drop-in's ones included."""
    name = f"multi_tensor_{kernel}"
    return getattr(kernels, name, None) or getattr(multi_tensor_steps, name)


def step(kernel, states, settings, torch_optimizer=None, with_rests=False):
    """A check of the gradients and a step of masters that are rounded into weights, or of weights with rests; against check and
    unscale, torch's step, and copying back.
    """

    def make(shapes, device):
        grads, masters, weights = random(shapes, device, BF16), random(shapes, device), zeros(shapes, device, BF16)
        stored = weights_with_rests(shapes, device) if with_rests else (masters, weights)
        moments = [zeros(shapes, device) for _ in range(states)]
        norms = [torch.ones(len(shapes), device=device)] if kernel == "novograd" else []
        found_inf, inverse = flags(device)
        more = {"inv_scale": inverse, "found_inf": found_inf}
        function = step_of(kernel)

        def run():
            _, each = kernels.multi_tensor_unscale_l2norm(grads, None, inverse, found_inf, per_tensor=bool(norms))
            grad_norms = {"grad_norms": each} if norms else {}
            function(grads, stored[0], *moments, *norms, stored[1], **settings, **grad_norms, **more)

        outputs = zeros(shapes, device)
        if torch_optimizer is None:

            def run_torch():
                torch_unscale(grads, outputs, found_inf, inverse)
                in_torch(function, outputs, masters, *moments, *norms, weights, **settings)

            return run, run_torch

        params = [torch.nn.Parameter(master.clone()) for master in masters]
        for param, gradient in zip(params, outputs):
            param.grad = gradient
        optimizer = torch_optimizer(params)
        detached = [param.detach() for param in params]

        def run_torch():
            torch_unscale(grads, outputs, found_inf, inverse)
            optimizer.step()
            torch._foreach_copy_(weights, detached)

        return run, run_torch

    return make


def plain_step(kernel, states, settings):
    """A step of float32 parameters, against the same rule in torch._foreach_*."""

    def make(shapes, device):
        grads, params = random(shapes, device), random(shapes, device)
        moments = [zeros(shapes, device) for _ in range(states)]
        norms = [torch.ones(len(shapes), device=device)] if kernel == "novograd" else []
        function = step_of(kernel)
        grad_norms = {"grad_norms": torch.ones(len(shapes), device=device)} if norms else {}

        run = partial(function, grads, params, *moments, *norms, **settings, **grad_norms)
        return run, partial(in_torch, run)

    return make


def packed_adam(shapes, device):
    """Adam of weights with rests and moments in 8 bits, against ampkit's with moments in float32, which moves 26 bytes."""
    grads, (weights, rests) = random(shapes, device, BF16), weights_with_rests(shapes, device)
    wide = [zeros(shapes, device) for _ in range(2)]
    packed = [[moments.pack(x, i == 0) for x in column] for i, column in enumerate(wide)]
    settings = dict(_ADAM, decoupled=True, weight_decay=0.01)
    drawn = dict(settings, positions=torch.arange(len(shapes), dtype=F32, device=device), seed=0)
    return (
        lambda: kernels.multi_tensor_adam(grads, weights, *packed, rests, **drawn),
        lambda: kernels.multi_tensor_adam(grads, weights, *wide, rests, **settings),
    )


def fused(cls, **settings):
    return lambda params: cls(params, fused=True, **settings)


def torch_adagrad(params):
    """torch.optim.Adagrad; torch has no fused Adagrad on CUDA, and refuses to make it."""
    fastest = {"foreach": True} if params[0].is_cuda else {"fused": True}
    return torch.optim.Adagrad(params, lr=1e-3, **fastest)


def scale_rule(shapes, device):
    scale, found_inf = torch.full((1,), 2.0, device=device), torch.zeros(1, device=device)
    state = torch.ones(7, dtype=torch.int32, device=device)
    return (
        lambda: kernels.update_scale(state, found_inf),
        lambda: torch._amp_update_scale_(scale, state[1:2], found_inf, 2.0, 0.5, 2000),
    )


_ADAM = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step=1)
_torch = torch.optim
#: name: (lists and device -> (ours, torch's), bytes per element)
CASES = {
    "scale: bfloat16 into float32, check": (unscale(BF16), 6),
    "scale: float16 into float32, check": (unscale(F16), 6),
    "scale: float32 in place, check": (unscale_in_place, 8),
    "scale: float32 into bfloat16": (narrow(BF16), 6),
    "scale: float32 into float16": (narrow(F16), 6),
    "axpby: bfloat16 added to float32, check": (accumulate, 10),
    "l2norm: float32": (norm(F32), 4),
    "l2norm: bfloat16": (norm(BF16), 2),
    "unscale_l2norm: bfloat16, check": (norm_and_check(False), 2),
    "unscale_l2norm: bfloat16 into float32, check": (norm_and_check(True), 6),
    "join: bfloat16 and rests into float32": (join, 8),
    "split: float32 into bfloat16 and rests": (split, 8),
    "check, sgd with rests": (
        step("sgd", 1, dict(lr=1e-3, momentum=0.9), fused(_torch.SGD, lr=1e-3, momentum=0.9), with_rests=True),
        20,
    ),
    "check, adam with rests": (
        step("adam", 2, dict(_ADAM, decoupled=True, weight_decay=0.01), fused(_torch.AdamW, lr=1e-3), with_rests=True),
        28,
    ),
    "check, adagrad with masters": (
        step("adagrad", 1, dict(lr=1e-3, eps=1e-10), torch_adagrad),
        22,
    ),
    "check, novograd with masters": (step("novograd", 1, _ADAM), 22),
    "check, lamb with masters": (step("lamb", 2, dict(_ADAM, weight_decay=0.01)), 42),
    "plain step, adam": (plain_step("adam", 2, dict(_ADAM, decoupled=True, weight_decay=0.01)), 28),
    "plain step, adagrad": (plain_step("adagrad", 1, dict(lr=1e-3, eps=1e-10, weight_decay=0.01)), 20),
    "plain step, novograd": (plain_step("novograd", 1, dict(_ADAM, weight_decay=0.01)), 20),
    "plain step, lamb": (plain_step("lamb", 2, dict(_ADAM, weight_decay=0.01)), 40),
    "adam, moments in 8 bits, beside float32 ones": (packed_adam, 14),
    "update_scale": (scale_rule, 0),
}


if __name__ == "__main__":
    main()
