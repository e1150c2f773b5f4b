"""How fast the multi-tensor kernels are: GB/s beside a plain copy, and the time of the same work in plain torch.

    python benchmarks/bench_kernels.py [--parameters 124] [--device cpu] [--rounds 15]

All candidates run in turn, round after round, and medians are printed: what else the machine does hits all alike. Bytes
are those that the operator must move: each input once, each output once.
"""

import argparse
import statistics
import time

import torch

from ampkit import kernels
from ampkit.kernels import reference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=124, help="millions (default: %(default)s, as GPT-2 small)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    shapes = model_like_shapes(int(args.parameters * 1e6))
    elements = sum(shape.numel() for shape in shapes)
    cases = make_cases(shapes, args.device)
    source = torch.empty(elements, device=args.device).normal_()
    target = torch.empty_like(source)

    runs = {("copy", "torch"): lambda: target.copy_(source)}
    for name, (run, plain, _) in cases.items():
        runs[name, "ampkit"], runs[name, "torch"] = run, plain
    medians = interleaved_medians(runs, args.rounds, args.device)

    copy_rate = elements * 8 / medians["copy", "torch"] / 1e9
    print(f"{kernels.implementation()}")
    print(
        f"{elements / 1e6:.0f} M elements, {len(shapes)} tensors on {args.device}; a copy runs at {copy_rate:.1f} GB/s"
    )
    print(f"{'operator':<28}{'ms':>9}{'GB/s':>9}{'of copy':>9}{'torch, ms':>11}{'ratio':>8}")
    for name, (_, _, bytes_per_element) in cases.items():
        ours, theirs = medians[name, "ampkit"], medians[name, "torch"]
        rate = elements * bytes_per_element / ours / 1e9
        print(f"{name:<28}{ours * 1e3:>9.2f}{rate:>9.1f}{rate / copy_rate:>9.2f}", end="")
        print(f"{theirs * 1e3:>11.2f}{ours / theirs:>8.2f}")


def model_like_shapes(elements):
    """Weights and biases in the proportions of a transformer: one large embedding, then matrices, then vectors."""
    width = 768
    shapes = [torch.Size((elements // 3 // width, width))]
    while elements - sum(s.numel() for s in shapes) > 4 * width * width:
        shapes += [torch.Size((4 * width, width)), torch.Size((width,))]
    return shapes


def make_cases(shapes, device):
    """name: (the operator, the same in torch's best public calls, bytes per element)."""
    lists = {
        dtype: [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    outputs = [torch.empty(shape, device=device) for shape in shapes]
    found_inf, one = torch.zeros(1, device=device), torch.ones(1, device=device)

    def torch_unscale(inputs):
        torch._foreach_copy_(outputs, inputs)
        torch._amp_foreach_non_finite_check_and_unscale_(outputs, found_inf, one)

    cases = {}
    for dtype in (torch.bfloat16, torch.float16):
        cases[f"scale {dtype} to float32".replace("torch.", "")] = (
            lambda inputs=lists[dtype]: kernels.multi_tensor_scale(inputs, outputs, 0.5, found_inf),
            lambda inputs=lists[dtype]: torch_unscale(inputs),
            6,
        )
    f32, bf16 = lists[torch.float32], lists[torch.bfloat16]
    cases["scale float32 to bfloat16"] = (
        lambda: kernels.multi_tensor_scale(f32, bf16, 1.0),
        lambda: torch._foreach_copy_(bf16, f32),
        6,
    )
    cases["scale float32 in place"] = (
        lambda: kernels.multi_tensor_scale(f32, f32, 1.0, found_inf),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_(f32, found_inf, one),
        8,
    )
    cases["axpby bfloat16, float32"] = (
        lambda: kernels.multi_tensor_axpby(bf16, f32, f32, 0.5, 0.5, found_inf),
        lambda: reference.multi_tensor_axpby(bf16, f32, f32, 0.5, 0.5, found_inf),
        10,
    )
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        cases[f"l2norm {dtype}".replace("torch.", "")] = (
            lambda inputs=lists[dtype]: kernels.multi_tensor_l2norm(inputs),
            lambda inputs=lists[dtype]: torch.stack(torch._foreach_norm(inputs, 2, dtype=torch.float32)).norm(),
            size,
        )
    return cases


def interleaved_medians(runs, rounds, device):
    times = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
