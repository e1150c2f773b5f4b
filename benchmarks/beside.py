"""Models that meet levels in different ways, at this checkout beside another: time, saved bytes, peak memory.

    git worktree add ../before COMMIT; (cd ../before; AMPKIT_BUILD_EXT=1 python setup.py build_ext --inplace)
    python benchmarks/beside.py ../before --only gpt --only "hand-written gpt"

Every contender has a process of its own, with the ampkit of its checkout, and these take turns; ratios are medians of those of
the same round. Peak memory is that of another process, which gives back what it frees. transformers and timm come with `make
clients`. Without a checkout, levels are compared with torch.autocast alone.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from memory import saved_bytes

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("O1", "O2", "O5")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout, built")
    parser.add_argument("--only", action="append", help="a case; may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--peaks", action="store_true", help="peak memory too")
    parser.add_argument(
        "--initialize", action="store_true", help="only the time of initialize, with transformers loaded"
    )
    parser.add_argument("--unscaled", action="store_true", help="torch.autocast without a GradScaler, as in bfloat16")
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(json.loads(args.serve))
    from bench import KEEP_FREED  # not in the processes that serve, whose ampkit may be an older one

    contenders = {("autocast", "now"): ROOT}
    for level in args.levels.split(","):
        if args.before:
            contenders[level, "before"] = args.before
        contenders[level, "now"] = ROOT
    running = {key: Process(checkout, KEEP_FREED, key[0], args) for key, checkout in contenders.items()}
    if args.initialize:
        for (way, when), process in running.items():
            if way != "autocast":
                print(f"{way}, {when}: initialize {', '.join(f'{ms:.0f}' for ms in process.ask('initialize', 6))} ms")
        return
    for name in args.only or CASES:
        compare(name, contenders, running, args)


class Process:
    """A way of training, with the ampkit of a checkout."""

    def __init__(self, checkout, environment, way, args):
        path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--serve",
                json.dumps(dict(way=way, compiled=args.compiled, threads=args.threads, unscaled=args.unscaled)),
            ],
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *question):
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def compare(name, contenders, running, args):
    """Print the lines of one case."""
    from bench import GIVE_BACK, TURN

    measured = {"time": {}, "saved": {}, "peak": {}}
    for key, process in running.items():
        process.ask("take", name)
        process.ask("turn", 3)
        measured["saved"][key] = process.ask("saved") / 1e6
        measured["time"][key] = []
        if args.peaks:
            alone = Process(contenders[key], GIVE_BACK, key[0], args)
            measured["peak"][key] = alone.ask("peak", name) / 2**20
            alone.process.kill()
    steps = max(1, int(TURN / running["autocast", "now"].ask("turn", 1)))
    for index in range(args.rounds):
        for key in list(running)[:: 1 if index % 2 else -1]:
            measured["time"][key].append(running[key].ask("turn", steps) * 1e3)
    autocast = ("autocast", "now")
    print(f"{name}{', compiled' if args.compiled else ''}: autocast {described(measured, autocast)}")
    for level in args.levels.split(","):
        references = [((level, "before"), "before")] * bool(args.before) + [(autocast, "autocast")]
        told = "; ".join(f"{beside(measured, (level, 'now'), other)} of {called}" for other, called in references)
        print(f"  {level}: {described(measured, (level, 'now'))}; {told}", flush=True)


def described(measured, key):
    peak = f", peak {measured['peak'][key]:.0f} MiB" if key in measured["peak"] else ""
    return f"{statistics.median(measured['time'][key]):.2f} ms, saved {measured['saved'][key]:.2f} MB{peak}"


def beside(measured, key, other):
    """The ratios of one contender to another."""
    ratios = [a / b for a, b in zip(measured["time"][key], measured["time"][other], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    words = [f"time {ratio:.3f} ({low:.3f}-{high:.3f})"]
    for quantity in ("saved", "peak"):
        if measured[quantity].get(other):
            words.append(f"{quantity} {measured[quantity][key] / measured[quantity][other]:.3f}")
    return ", ".join(words)


# In a process of its own


def serve(task):
    import torch

    import ampkit

    torch.set_num_threads(task["threads"])
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step = model = None
    for line in sys.stdin:
        question, argument = (*json.loads(line), None)[:2]
        answer = None
        if question == "take":
            ampkit.close()
            step, model = prepare({**task, "case": argument})
        elif question == "turn":
            start = time.perf_counter()
            for _ in range(argument):
                step()
            answer = (time.perf_counter() - start) / argument
        elif question == "saved":
            answer = saved_bytes(step, [model])
        elif question == "initialize":
            answer = times_of_initialize(task["way"], argument)
        else:
            step, model = prepare({**task, "case": argument})
            for _ in range(3):
                step()
            status = Path("/proc/self/status").read_text()
            answer = int(status.split("VmHWM:")[1].split()[0]) * 1024 - before
        print(json.dumps(answer), flush=True)


def prepare(task):
    """Return a function for one step of a case, and its initialized model."""
    import torch

    import ampkit

    torch.manual_seed(0)
    model, loss_of = CASES[task["case"]]()
    way = task["way"]
    trains = any(param.requires_grad for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if trains else None
    if way != "autocast":
        setting = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}.get(way)
        initialized = ampkit.initialize(
            model, optimizer, opt_level=way, verbosity=0, **({setting: torch.bfloat16} if setting else {})
        )
        model, optimizer = initialized if trains else (initialized, None)
    called = torch.compile(model) if task["compiled"] else model
    scaler = torch.amp.GradScaler("cpu", enabled=trains and not task["unscaled"])

    def region():
        return torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext()

    def evaluate():
        with torch.no_grad(), region():
            loss_of(called)

    def train():
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES.get(task["case"], 1)):
            with region():
                loss = loss_of(called)
            if way == "autocast":
                scaler.scale(loss).backward()
            else:
                with ampkit.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        if way == "autocast":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    return train if trains else evaluate, model


def times_of_initialize(level, times):
    """Milliseconds of each `initialize`, in a process with the classes of a library that has many."""
    import torch
    from transformers import BertModel, GPT2Model, LlamaModel, T5Model  # noqa: F401

    import ampkit

    milliseconds = []
    for _ in range(times):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24)))
        optimizer = torch.optim.AdamW(model.parameters())
        start = time.perf_counter()
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        milliseconds.append((time.perf_counter() - start) * 1e3)
        ampkit.close()
    return milliseconds


# The cases


def of_bench(name):
    def make():
        import cases

        case = cases.make(name)
        (model,), ((x, y), *_) = case.models, case.batches
        return model, lambda model: case.loss(model(x), y)

    return make


def hand_written_gpt(adds_mask=False):
    """A GPT with attention as lectures write it, with a mask that is filled in or added, and GELU by its formula."""
    import math

    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, heads, length):
            super().__init__()
            self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1))

        def forward(self, x):
            q, k, v = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1)
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = scores + self.mask if adds_mask else scores.masked_fill(self.mask < 0, -math.inf)
            attention = scores.softmax(-1)
            x = x + self.project((attention @ v).transpose(1, 2).flatten(2))
            y = self.up(self.norm2(x))
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            return x + self.down(y)

    width, length = 192, 64
    model = nn.Sequential(
        nn.Embedding(1000, width),
        *(Block(width, 6, length) for _ in range(4)),
        nn.LayerNorm(width),
        nn.Linear(width, 1000),
    )
    tokens = torch.randint(1000, (4, length + 1))
    return model, lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def of_transformers(name, images=False, **settings):
    def make():
        import torch
        import transformers

        cls = getattr(transformers, name)
        model = cls(cls.config_class(**settings)).train()
        if images:
            batch = dict(pixel_values=torch.randn(4, 3, 64, 64), labels=torch.randint(2, (4,)))
        else:
            tokens = torch.randint(3, 1000, (4, 64))
            batch = dict(input_ids=tokens, labels=tokens)
        return model, lambda model: model(**batch).loss

    return make


def vit_with_layer_scale():
    import timm
    import torch
    import torch.nn.functional as F

    model = timm.create_model(
        "deit3_small_patch16_224",
        img_size=64,
        patch_size=8,
        depth=6,
        embed_dim=192,
        num_heads=6,
        num_classes=10,
        init_values=1e-2,
    )
    x, y = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return model, lambda model: F.cross_entropy(model(x), y)


def prenorm_wrapper():
    """A module around each layer that bears a norm's name and has the layer inside it."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class PreNorm(nn.Module):
        def __init__(self, width, fn):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(width), fn

        def forward(self, x):
            return x + self.fn(self.norm(x))

    def feed_forward():
        return PreNorm(256, nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))

    model = nn.Sequential(*(feed_forward() for _ in range(6)))
    x = torch.randn(4, 64, 256)
    return model, lambda model: F.mse_loss(model(x), x)


def narrow():
    import torch
    from torch import nn

    model = nn.Sequential(*(layer for _ in range(150) for layer in (nn.Linear(16, 16), nn.LayerNorm(16))))
    x = torch.randn(8, 16)
    return model, lambda model: model(x).float().square().mean()


def policy_network():
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(
        False
    )
    x = torch.randn(1, 8)
    return model, lambda model: model(x)


def matrix_factorization():
    import torch
    from torch import nn

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(500, 16), nn.Embedding(300, 16)

        def forward(self, pairs):
            return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1)

    pairs = torch.stack([torch.randint(500, (128,)), torch.randint(300, (128,))], dim=1)
    return Factors(), lambda model: (model(pairs) - 3.0).square().mean()


def wide_mlp():
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    x = torch.randn(8, 2048)
    return model, lambda model: model(x).float().square().mean()


def small_mlp(*widths, policy=False):
    """A small network on 32 rows, as a regression, or as a policy by the logarithms of its choices."""

    def make():
        import torch
        import torch.nn.functional as F
        from torch import nn

        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())][:-1]
        x, y = torch.randn(32, widths[0]), torch.randint(widths[-1], (32,))
        advantage = torch.randn(32)

        def loss_of(model):
            if policy:
                return -(advantage * model(x).float().log_softmax(1).gather(1, y[:, None])[:, 0]).mean()
            return F.mse_loss(model(x).float(), x[:, : widths[-1]])

        return nn.Sequential(*layers), loss_of

    return make


def reptile(inner=8, rate=0.1):
    """Reptile: after each ``inner`` steps on one sine wave the weights go a tenth of the way from those before."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    before = [param.detach().clone() for param in model.parameters()]
    wave = {}

    def loss_of(model):
        if wave.setdefault("step", 0) % inner == 0:
            with torch.no_grad():
                for param, start in zip(model.parameters(), before):
                    param.copy_(start.lerp_(param, rate))
            wave["x"] = torch.rand(10, 1) * 10 - 5
            wave["y"] = torch.sin(wave["x"] + torch.rand(1) * 3)
        wave["step"] += 1
        return (model(wave["x"]) - wave["y"]).square().mean()

    return model, loss_of


def generate():
    import torch
    import transformers

    config = transformers.LlamaConfig(**TINY_LLAMA)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    tokens = torch.randint(3, 1000, (1, 8))
    return model, lambda model: model.generate(tokens, max_new_tokens=16, do_sample=False)


TINY_LLAMA = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
DECODER = dict(vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6)
ENCODER = dict(vocab_size=1000, hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=6)
WITHOUT_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CASES = {
    **{name: of_bench(name) for name in ("resnet18", "gpt", "bert", "lstm", "mlp")},
    "hand-written gpt": hand_written_gpt,
    "hand-written gpt, mask added": lambda: hand_written_gpt(adds_mask=True),
    "vit with layer scale": vit_with_layer_scale,
    "transformers gpt2": of_transformers(
        "GPT2LMHeadModel",
        vocab_size=1000,
        n_embd=256,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "transformers bert": of_transformers("BertForMaskedLM", **ENCODER, **WITHOUT_DROPOUT),
    "transformers llama": of_transformers("LlamaForCausalLM", **DECODER),
    "transformers convnextv2": of_transformers(
        "ConvNextV2ForImageClassification", images=True, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1]
    ),
    "prenorm wrapper": prenorm_wrapper,
    "narrow layers": narrow,
    "policy network": policy_network,
    "matrix factorization": matrix_factorization,
    "policy gradient": small_mlp(8, 64, 64, 4, policy=True),
    "reptile": reptile,
    "mlp of 3 layers": small_mlp(16, 32, 32, 1),
    "mlp of 5 layers": small_mlp(16, 64, 64, 64, 64, 1),
    "wide mlp": wide_mlp,
    "generate": generate,
}
MICRO_BATCHES = {"wide mlp": 4}  # of a step; 1 elsewhere


if __name__ == "__main__":
    main()
