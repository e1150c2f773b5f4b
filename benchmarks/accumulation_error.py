"""The error of gradients summed over micro-batches, with and without ``delay_unscale``, against float64.

$ python benchmarks/accumulation_error.py             # --micro-batches 1 8 for the first rows

A three-layer MLP and random data. The first row, a single micro-batch, has the error of computing in bfloat16 alone;
what the others have beyond it comes from adding up.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

import ampkit

WIDTH, BATCH = 256, 16


def relative_error(level, micro_batches, delayed):
    """Root of the summed squares of (gradient - float64) over that of float64, for all weights together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    exact = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, loss_scale=1024.0, verbosity=0)
    for index in range(micro_batches):
        x, y = torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))
        F.cross_entropy(exact(x.double()), y).backward()
        last = index == micro_batches - 1
        with ampkit.scale_loss(F.cross_entropy(model(x), y), optimizer, delay_unscale=delayed and not last) as scaled:
            scaled.backward()
    found = [p.grad.double() for p in ampkit.master_params(optimizer)]
    expected = [p.grad for p in exact.parameters()]
    ampkit.close()
    distance = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True))
    return (distance / sum(b.square().sum() for b in expected)).sqrt().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N", help="a row each")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, bfloat16 on the CPU\n")
    print("| micro-batches | O1 | O1 delay_unscale | O2 | O2 delay_unscale |\n|---|---|---|---|---|")
    for micro_batches in args.micro_batches:
        errors = [relative_error(level, micro_batches, delayed) for level in ("O1", "O2") for delayed in (False, True)]
        print(f"| {micro_batches} | " + " | ".join(f"{error:.2%}" for error in errors) + " |")


if __name__ == "__main__":
    main()
