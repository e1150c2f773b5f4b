"""The loss with FusedAdam's state in 8 bits or in bfloat16, beside state in float32: a small GPT, 500 steps at O5.

    python benchmarks/state_dtypes.py [--seeds 3] [--steps 500] [--level O5]

It learns a language of 32 words in which the next one follows from the last two, but for one word in five, which may be any. The
loss is that of text that was not seen, after the last step, and the bytes are those of moments for each parameter. It ends with
an error when the loss of a state dtype is, in the mean over the seeds, more than 0.5% above that of float32 (after 500 steps).
"""

import argparse
import math
import statistics

import torch
import torch.nn.functional as F
from cases import Gpt

import ampkit
from ampkit.optimizers import FusedAdam

WORDS, LENGTH, BATCH = 32, 64, 16
PEAK_LR, WARM_UP = 3e-3, 50
STATE_DTYPES = ("float32", "bfloat16", "int8")
BOUND = 0.005


class Language:
    """Text in which word ``follows[a, b]`` comes after a and b four times in five."""

    def __init__(self):
        self.follows = torch.randint(WORDS, (WORDS, WORDS), generator=torch.Generator().manual_seed(0))

    def text(self, generator, size):
        free = torch.randint(WORDS, (size, LENGTH + 1), generator=generator)
        is_free = torch.rand(size, LENGTH + 1, generator=generator) < 0.2
        words = [free[:, 0], free[:, 1]]
        for i in range(2, LENGTH + 1):
            words.append(torch.where(is_free[:, i], free[:, i], self.follows[words[-2], words[-1]]))
        text = torch.stack(words, dim=1)
        return text[:, :-1], text[:, 1:].flatten()


def final_loss(level, state_dtype, seed, steps):
    """The loss of unseen text, and bytes of moments for each parameter."""
    torch.manual_seed(seed)
    model = Gpt(width=64, layers=2, heads=4, length=LENGTH, vocabulary=WORDS)
    for param in model.parameters():
        if param.dim() > 1:
            torch.nn.init.normal_(param, 0.0, 0.02)
    optimizer = FusedAdam(model.parameters(), lr=PEAK_LR, weight_decay=0.1, state_dtype=state_dtype)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    language, generator = Language(), torch.Generator().manual_seed(seed)
    for step in range(steps):
        decay = (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = PEAK_LR * min(1.0, (step + 1) / WARM_UP) * decay
        x, y = language.text(generator, BATCH)
        optimizer.zero_grad()
        with ampkit.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = [x for param in params for x in optimizer.state[param].values() if x.dim()]
    each = sum(x.numel() * x.element_size() for x in moments) / sum(param.numel() for param in params)
    generator = torch.Generator().manual_seed(2**20)
    with torch.no_grad():
        batches = [language.text(generator, BATCH) for _ in range(40)]
        loss = statistics.mean(F.cross_entropy(model(x).float(), y).item() for x, y in batches)
    ampkit.close()
    return loss, each


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--level", default="O5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | " + " | ".join(f"{name} | against float32" for name in STATE_DTYPES) + " |")
    print("|---" * (1 + 2 * len(STATE_DTYPES)) + "|")
    ratios, each = {name: [] for name in STATE_DTYPES}, {}
    for seed in range(args.seeds):
        row, losses = [], {}
        for name in STATE_DTYPES:
            losses[name], each[name] = final_loss(args.level, name, seed, args.steps)
            ratios[name].append(losses[name] / losses["float32"] - 1)
            row.append(f"{losses[name]:.4f} | {100 * ratios[name][-1]:+.2f}%")
        print(f"| {seed} | " + " | ".join(row) + " |", flush=True)
    means = {name: statistics.mean(found) for name, found in ratios.items()}
    print("| mean | " + " | ".join(f"| {100 * means[name]:+.2f}%" for name in STATE_DTYPES) + " |")
    print("bytes of moments per parameter: " + ", ".join(f"{name} {size:.2f}" for name, size in each.items()))
    worse = [name for name in STATE_DTYPES if means[name] > BOUND]
    if args.steps >= 500 and worse:
        raise SystemExit(f"more than {100 * BOUND}% above float32: {', '.join(worse)}")


if __name__ == "__main__":
    main()
