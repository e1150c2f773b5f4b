"""Planted troubles, as strangers write them, and healthy scripts: the reports of ampkit's tools, in six ways of training.

Non-finite values are for `ampkit diagnose`, a model that does not move for `ampkit check`, a slow script for `ampkit record`.
Whether a script is in trouble is read off a plain run, without these: a loss, or a weight, that is not finite, an exception,
weights that stand still, a loss that is a hundred times those before, or a loss scale that falls in each of the last iterations;
the named parameter that has not moved; or
the count of operators: products in float32 or of odd sizes, float64, numbers that are read. Then the tool has to name the marked
line, or the parameter, the kind and the cure, and the script with the cure in its place has to be healthy. If the plain run is
healthy, the tool has to report nothing.

    python benchmarks/troubles.py                     # all, some minutes on one core
    python benchmarks/troubles.py --only "log of p"   # troubles whose names have these words
    python benchmarks/troubles.py --out results.md    # writes the table too
"""

import argparse
import ast
import os
import re
import runpy
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # each run is a fork of this process: its modules are imported here, once
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
import ampkit.insight.check
import ampkit.insight.diagnose_script
import ampkit.insight.record.advice
import ampkit.insight.record.command
from ampkit.__main__ import main as ampkit_main

#: The setup of a script, and its iteration.
WAYS = {
    "plain": ("", "out = model(x)\nloss = loss_of(out, y)", "loss.backward()\n{clip}\noptimizer.step()"),
    "torch.amp": (
        "scaler = torch.amp.GradScaler('cpu')",
        "with torch.autocast('cpu', torch.float16):\n    out = model(x)\n    loss = loss_of(out, y)",
        "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n{clip}\nscaler.step(optimizer)\nscaler.update()",
    ),
    **{
        level: (
            f"model, optimizer = ampkit.initialize(model, optimizer, opt_level='{level}'{dtype}, verbosity=0)",
            "out = model(x)\nloss = loss_of(out, y)",
            "with ampkit.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n{clip}\noptimizer.step()",
        )
        for level, dtype in (
            ("O1", ", patch_torch_functions_type=torch.float16"),
            ("O2", ", cast_model_type=torch.float16"),
            ("O5", ""),
        )
    },
    "alone": (
        "model = model.bfloat16()\noptimizer = ampkit.optimizers.AdamW(trained, lr=LR)",
        "out = model(x.bfloat16())\nloss = loss_of(out, y)",
        "loss.backward()\n{clip}\noptimizer.step()",
    ),
}
SCRIPT = """
import torch, ampkit
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
LR = {lr}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        {init}
    def forward(self, x):
        {forward}
def batch(i):
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    {batch}
    return x, y
def loss_of(out, y):
    {loss}
model = Net()
{model}
optimizer = torch.optim.AdamW(trained, lr=LR)
{setup}
for i in range({iterations}):
    x, y = batch(i)
    optimizer.zero_grad()
    {run}
    {step}
    if i == {iterations} - 4:
        before = {name: value.float().clone() for name, value in STATE().items()}
    print("iteration", i, loss.item(), scaler.get_scale() if "scaler" in globals() else SCALE())
after = {name: value.float() for name, value in STATE().items()}
print("weights", all(bool(p.isfinite().all()) for p in after.values()), any(not after[n].equal(b) for n, b in before.items()))
print("moved", *(name for name, b in before.items() if (after[name] != b).float().mean() > 0.5))
"""
SCALE = "lambda: ampkit.loss_scale(optimizer) if ampkit.current_session() is not None else 1.0"
STATE = (
    "lambda: model.state_dict() if ampkit.current_session() is not None else "
    "ampkit.optimizers.float32_state_dict(model, optimizer)"
)
OPTIMIZERS = os.path.dirname(torch.optim.__file__)
AT = 13  # the iteration of faults that are of a batch: the loss scale has come down by then

BODY = "h = F.relu(self.norm(self.body(x)))"
HEAD = "return self.head(h)"
CE = "return F.cross_entropy(out.float(), y)"
TRAINED = "trained = list(model.parameters())"


@dataclass
class Trouble:
    """A script with ``line`` in place of ``{here}`` in one of its parts; the cured script has ``cured`` there.

    ``kind`` and ``cure`` are words that the tool has to print, ``also``
    another line that may be named, by the way of training. ``moves`` is
    a parameter that has to move, ``most`` what a count of operators may
    show at most, `Count`'s fields; ``cured_way`` is the way of the cured
    script, where the way itself is the cure.
    """

    line: str
    cured: str
    kind: str
    cure: str = ""
    forward: str = f"{BODY}\n{HEAD}"
    batch: str = ""
    loss: str = CE
    init: str = ""
    clip: str = ""
    lr: float = 1e-3
    iterations: int = 20
    also: dict = field(default_factory=dict)
    model: str = TRAINED
    moves: str = ""
    most: dict = field(default_factory=dict)
    cured_way: str = ""
    ways: tuple = tuple(WAYS)

    @property
    def tool(self):
        return "check" if self.moves else "record" if self.most else "diagnose"

    def script(self, way, line):
        setup, run, step = WAYS[way]
        parts = {"forward": self.forward, "batch": self.batch, "loss": self.loss, "init": self.init, "run": run}
        parts["model"] = self.model
        parts |= {"step": step.replace("{clip}", self.clip), "lr": str(self.lr), "iterations": str(self.iterations)}
        parts |= {"setup": f"{setup}\nSCALE = {SCALE}\nSTATE = {STATE}"}
        text = SCRIPT.lstrip()
        for name, part in parts.items():
            text = re.sub(
                rf"^( *)(.*)\{{{name}\}}",
                lambda match, part=part: "\n".join(
                    match[1] + match[2] * (not i) + row for i, row in enumerate(part.split("\n"))
                ),
                text,
                flags=re.M,
            )
        return re.sub(
            r"^( *)(.*)\{here\}",
            lambda match: (
                "\n".join(match[1] + match[2] * (not i) + row for i, row in enumerate(line.split("\n"))) + "  # here"
            ),
            text,
            flags=re.M,
        )


FLOAT16 = ("torch.amp", "O1", "O2")
TROUBLES = {
    "log of p that has reached 0": Trouble(
        "p = torch.softmax(out.float() * 500, 1)\nreturn -p.log().gather(1, y[:, None]).mean()",
        "return F.nll_loss(F.log_softmax(out.float() * 500, 1), y)",
        "log of zero",
        "log_softmax",
        loss="{here}",
    ),
    "a row divided by its norm": Trouble(
        "x = x / x.norm(dim=1, keepdim=True)",
        "x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)",
        "division by zero",
        "clamp(min=eps)",
        forward=f"{{here}}\n{BODY}\n{HEAD}",
        batch=f"if i == {AT}: x[3] = 0",
    ),
    "the root of a distance that is 0": Trouble(
        "d = ((h - h.detach()) ** 2).sum(1).sqrt()",
        "d = (((h - h.detach()) ** 2).sum(1) + 1e-6).sqrt()",
        "division by zero",
        "what a root is taken of, before it",
        forward=f"{BODY}\n{{here}}\nreturn self.head(h) + d[:, None]",
    ),
    "the deviation of one row": Trouble(
        "x = (x - x.mean(0)) / (x.std(0) + 1e-5)",
        "x = (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)",
        "a deviation of one element",
        "unbiased=False",
        forward=f"{{here}}\n{BODY}\n{HEAD}",
        batch=f"if i == {AT}: x, y = x[:1], y[:1]",
    ),
    "a softmax whose row is all masked": Trouble(
        "w = torch.softmax((h @ h.T).masked_fill(mask, float('-inf')), 1)",
        "w = torch.softmax((h @ h.T).masked_fill(mask & ~mask.all(1, keepdim=True), float('-inf')), 1)",
        "inf - inf",
        "one element of each row",
        forward=f"{BODY}\nmask = (x[:, :1] > 50).expand(6, 6)\n{{here}}\nreturn self.head(w @ h)",
        batch=f"if i == {AT}: x[2, 0] = 99",
    ),
    "a product of activations": Trouble(
        "h = h * h",
        "h = h.float() * h.float()",
        "overflow of the format",
        "bfloat16",
        forward="h = F.relu(self.body(x)) * 400\n{here}\nreturn self.head((h / 1e5).to(self.head.weight.dtype))",
    ),
    "attention that is not scaled": Trouble(
        "s = q @ q.T",
        "s = (q / 64) @ (q / 64).T",
        "overflow of the format",
        "divide before the function",
        forward="q = self.body(x) * 500\n{here}\nreturn self.head(self.norm(torch.softmax(s.float(), 1).to(q.dtype) @ q))",
    ),
    "exp of a large number": Trouble(
        "ratio = (out.float() - out.float().detach() + bad).exp()",
        "ratio = (out.float() - out.float().detach() + bad).clamp(max=2).exp()",
        "overflow of the format",
        "clamp it",
        loss=f"bad = 100.0 * (i == {AT})\n{{here}}\nreturn F.cross_entropy(out.float(), y) + ratio.mean()",
    ),
    "masked_fill with -1e9": Trouble(
        "s = s.masked_fill(mask, -1e9)",
        "s = s.masked_fill(mask, torch.finfo(s.dtype).min)",
        "a value that does not fit",
        "torch.finfo(x.dtype).min",
        forward=f"{BODY}\nmask = torch.eye(6, dtype=torch.bool)\ns = torch.mm(h, h.T)\n{{here}}\n"
        "return self.head(s.softmax(1).to(h.dtype) @ h)",
    ),
    "the entropy of masked actions": Trouble(
        "entropy = -(p * p.log()).sum(1)",
        "entropy = -torch.where(p > 0, p * p.clamp(min=1e-6).log(), 0.0).sum(1)",
        "log of zero",
        "clamp(min=eps)",
        loss="p = out.float().masked_fill(F.one_hot((y + 1) % 4, 4).bool(), float('-inf')).softmax(1)\n{here}\n"
        "return F.cross_entropy(out.float(), y) - 0.01 * entropy.mean()",
    ),
    "the same entropy by log_softmax": Trouble(
        "entropy = -(logp.exp() * logp).sum(1)",
        "entropy = -torch.where(logp > -1e9, logp.exp() * logp.clamp(min=-1e9), 0.0).sum(1)",
        "0 * inf",
        "torch.where",
        loss="logp = F.log_softmax(out.float().masked_fill(F.one_hot((y + 1) % 4, 4).bool(), float('-inf')), 1)\n{here}\n"
        "return F.cross_entropy(out.float(), y) - 0.01 * entropy.mean()",
    ),
    "NaN in a row of the data": Trouble(
        "h = self.body(x)",
        "h = self.body(x.nan_to_num())",
        "not finite before the iteration",
        "row 4 of 6",
        also={"alone": "out = model(x.bfloat16())"},
        forward="{here}\nh = F.relu(self.norm(h))\nreturn self.head(h)",
        batch=f"rows = x.numpy()\nif i == {AT}: rows[4, 1] = float('nan')\nx = torch.from_numpy(rows)",
    ),
    "acos of a cosine above 1": Trouble(
        "angle = torch.acos(cosine)",
        "angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))",
        "outside of the function's domain",
        "clamp its input",
        loss="a = out.float()\ncosine = (a * a.detach()).sum(1) / a.detach().square().sum(1) * 1.0001\n{here}\n"
        "return F.cross_entropy(out.float(), y) + angle.mean()",
    ),
    "a root of negative numbers": Trouble(
        "r = (h - 0.5) ** 0.5",
        "r = (h - 0.5).clamp(min=1e-3) ** 0.5",
        "outside of the function's domain",
        "clamp its input",
        forward=f"{BODY}\n{{here}}\nreturn self.head(r.to(h.dtype))",
    ),
    "a batch whose targets are all ignored": Trouble(
        "return F.cross_entropy(out.float(), y)",
        "return F.cross_entropy(out.float(), y, reduction='sum') / (y >= 0).sum().clamp(min=1)",
        "division by zero",
        "",
        loss="{here}",
        batch=f"if i == {AT}: y[:] = -100",
    ),
    "an eps that float16 has not": Trouble(
        "return self.head(h / (h.std(1, keepdim=True) + 1e-8))",
        "return self.head(h / (h.std(1, keepdim=True) + 1e-3))",
        "division by zero",
        "1e-8 is, it is 0 in float16",
        forward="h = self.body(x)\nh = h * (x[:, :1] < 50)\n{here}",
        batch=f"if i == {AT}: x[2, 0] = 99",
        ways=FLOAT16,
    ),
    "where around a log": Trouble(
        "z = torch.where(h > 0, h.log(), 0.0)",
        "z = torch.where(h > 0, h.clamp(min=1e-3).log(), 0.0)",
        "log of zero",
        "torch.where does not stop the gradient",
        forward="h = self.norm(self.body(x))\nh = h * (h > 0)\n{here}\nreturn self.head(z.to(h.dtype))",
    ),
    "a divergence whose target is 0": Trouble(
        "return (t * (t.log() - F.log_softmax(out.float(), 1))).sum(1).mean()",
        "return F.kl_div(F.log_softmax(out.float(), 1), t, reduction='batchmean')",
        "log of zero",
        "clamp(min=eps)",
        loss="t = F.one_hot(y, 4).float()\n{here}",
    ),
    "a temperature that reaches 0": Trouble(
        "return F.cross_entropy(out.float() / t, y)",
        "return F.cross_entropy(out.float() / max(t, 0.1), y)",
        "division by zero",
        "keep the divisor from 0",
        loss=f"t = 1.0 - i / {AT}\n{{here}}",
    ),
    "a loss whose gradient fits at no scale": Trouble(
        "return F.cross_entropy(out.float() * 1e12, y)",
        "return F.cross_entropy(out.float(), y)",
        "overflow of the format",
        "",
        loss="{here}",
        iterations=40,
        ways=FLOAT16,
        also={"O2": "out = model(x)"},  # O2 gives outputs in float32: the cast there
    ),
    "a table of another dtype": Trouble(
        "h = torch.mm(h, self.table)",
        "h = torch.mm(h, self.table.to(h.dtype))",
        "two dtypes in one call",
        "x.to(y.dtype)",
        init="self.register_buffer('table', torch.eye(16), persistent=False)",
        forward=f"{BODY}\nself.table = self.table.double()\n{{here}}\n{HEAD}",
    ),
    "a frozen teacher in bfloat16": Trouble(
        "t = self.teacher[0](x)",
        "t = self.teacher[0](x.to(self.teacher[0].weight.dtype))",
        "two dtypes in one call",
        "x.to(y.dtype)",
        init="self.teacher = [nn.Linear(8, 4).bfloat16().requires_grad_(False)]",
        forward=f"{BODY}\n{{here}}\nreturn self.head(h) + 0 * t.to(h.dtype)",
    ),
    "a weight that a file has ruined": Trouble(
        "self.body.weight.data.copy_(torch.from_numpy(saved))",
        "self.body.weight.data.copy_(torch.from_numpy(saved).nan_to_num())",
        "not finite before the iteration",
        init="saved = self.body.weight.data.clone().numpy()\nsaved[3, 3] = float('nan')\n{here}",
    ),
}

# What float32 does too, in finite numbers.

MSE = "return F.mse_loss(out.float().mean(1), y.float())"
SMALL = {
    "loss": MSE,
    "forward": f"{{here}}\n{BODY.replace('self.norm', '')}\n{HEAD}",
    "batch": f"if i == {AT}: x[3] = 1",
}
TROUBLES |= {
    "a row divided by a small deviation": Trouble(
        "x = x / (x.std(1, keepdim=True) + 1e-5)",
        "x = x / (x.std(1, keepdim=True) + 0.1)",
        "",
        "the smallest divisor is 1",
        **SMALL,
    ),
    "a loss divided by the variance of its targets": Trouble(
        "return F.mse_loss(out.float().mean(1), y.float()) / (y.float().var() + 1e-6)",
        "return F.mse_loss(out.float().mean(1), y.float()) / y.float().var().clamp(min=0.5)",
        "",
        "the smallest divisor is 1e-06",
        loss="{here}",
        batch=f"if i == {AT}: y[:] = 2",
    ),
    "a learning rate far too high": Trouble(
        "LR = 1e3",
        "LR = 1e-3",
        "the run diverges",
        "lower the learning rate",
        model=f"{{here}}\n{TRAINED}",
        loss=MSE,
    ),
}

TROUBLES |= {
    "a schedule that raises the learning rate": Trouble(
        "optimizer.param_groups[0]['lr'] *= 10",
        "pass",
        "the run diverges",
        "lower the learning rate",
        lr=1e-2,
        clip="{here}",
        loss=MSE,
        also=dict.fromkeys(WAYS, "norm(self.body(x))"),
    ),
    "the determinant of what is singular": Trouble(
        "return F.cross_entropy(out.float(), y) + 0 * torch.logdet(gram)",
        "return F.cross_entropy(out.float(), y) + 0 * torch.logdet(gram + torch.eye(6))",
        "outside of the function's domain",
        "",
        loss="with torch.autocast('cpu', enabled=False):\n    gram = (out.float() * 0) @ (out.float().T * 0)\n{here}",
        ways=("plain", "O1", "O2", "O5", "alone"),
    ),
    "gradients divided by a norm of 0": Trouble(
        "for p in model.parameters(): p.grad.div_(norm)",
        "for p in model.parameters(): p.grad.div_(norm + 1e-6)",
        "division by zero",
        "keep the divisor from 0",
        clip=f"norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() * (i != {AT})\n{{here}}",
        ways=("plain", "torch.amp"),
    ),
    "an rms norm whose eps underflows": Trouble(
        "h = h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-8)",
        "h = h * torch.rsqrt(h.float().pow(2).mean(1, keepdim=True) + 1e-6).to(h.dtype)",
        "division by zero",
        "1e-8 is, it is 0 in float16",
        forward="h = self.body(x)\nh = h * (x[:, :1] < 50)\n{here}\nreturn self.head(h)",
        batch=f"if i == {AT}: x[2, 0] = 99",
        ways=FLOAT16,
    ),
}

# A model that does not move.

LOWER = "x = x.to(self.body.weight.dtype)"
TROUBLES |= {
    "a learning rate below what float32 resolves": Trouble(
        "LR = 1e-12",
        "LR = 1e-3",
        "rounds",
        "",
        model=f"{{here}}\n{TRAINED}",
        moves="body.weight",
    ),
    "a model in plain bfloat16": Trouble(
        "model = model.bfloat16()",
        "model = model.float()",
        "rounds small updates away",
        "O5 and O2 train them in float32",
        model=f"LR = 1e-5\n{{here}}\n{TRAINED}",
        forward=f"{LOWER}\n{BODY}\n{HEAD}",
        moves="body.bias",
        ways=("plain", "O1", "O2", "O5", "alone"),
    ),
    "a norm in bfloat16": Trouble(
        "model.norm.bfloat16()",
        "model.norm.float()",
        "rounds small updates away",
        "O5 and O2 train them in float32",
        model=f"LR = 1e-4\n{{here}}\n{TRAINED}",
        forward="h = self.body(x)\nh = F.relu(self.norm(h.to(self.norm.weight.dtype))).to(h.dtype)\nreturn self.head(h)",
        moves="norm.weight",
    ),
    "a body that is still frozen": Trouble(
        "model.body.requires_grad_(False)",
        "model.body.requires_grad_(True)",
        "requires_grad is False",
        "requires_grad_(True)",
        model=f"{{here}}\n{TRAINED}",
        moves="body.weight",
    ),
    "an optimizer over another model": Trouble(
        "trained = list(Net().parameters())",
        "trained = list(model.parameters())",
        "",
        "model.parameters()",
        model="{here}",
        moves="body.weight",
        also={"torch.amp": "scaler.step(", **dict.fromkeys(("O1", "O2", "O5"), "ampkit.initialize(model")},
    ),
    "a head that is newer than the optimizer": Trouble(
        "trained = list(model.parameters())\nmodel.head = nn.Linear(16, 4)",
        "model.head = nn.Linear(16, 4)\ntrained = list(model.parameters())",
        "no optimizer",
        "model.parameters()",
        model="{here}",
        moves="head.weight",
    ),
    "zero_grad after backward": Trouble(
        "optimizer.zero_grad()",
        "pass",
        "gradients were cleared between backward() at",
        "zero_grad() belongs in front of backward()",
        clip="{here}",
        moves="body.weight",
    ),
    "detach in the forward pass": Trouble(
        "h = h.detach()",
        "h = h * 1",
        "no gradient reaches them",
        "detach() at script.py",
        forward=f"{BODY}\n{{here}}\n{HEAD}",
        moves="body.weight",
    ),
    "no_grad around a part": Trouble(
        "with torch.no_grad():\n    h = self.body(x)",
        "with torch.enable_grad():\n    h = self.body(x)",
        "no gradient reaches them",
        "no_grad() at script.py",
        forward="{here}\nh = F.relu(self.norm(h))\nreturn self.head(h)",
        moves="body.weight",
    ),
    ".data of an activation": Trouble(
        "h = h.data",
        "h = h * 1",
        "no gradient reaches them",
        ".data at script.py",
        forward=f"{BODY}\n{{here}}\n{HEAD}",
        moves="body.weight",
    ),
}

TROUBLES |= {
    "a layer in a list": Trouble(
        "self.more = [nn.Linear(16, 16)]",
        "self.more = nn.ModuleList([nn.Linear(16, 16)])",
        "no model has it as a part",
        "nn.ModuleList",
        init="{here}",
        forward=f"{BODY}\nh = self.more[0](h)\n{HEAD}",
        moves="more.0.weight",
        also=dict.fromkeys(WAYS, "h = self.more[0](h)"),
        ways=("plain",),
    ),
    "a schedule that ends at 0": Trouble(
        "optimizer.param_groups[0]['lr'] = 1e-3 * max(0, 1 - i / 2)",
        "optimizer.param_groups[0]['lr'] = 1e-3 * max(0, 1 - i / 50)",
        "the learning rate is 0",
        "look at the scheduler",
        clip="{here}",
        moves="body.weight",
    ),
    "an index in the middle": Trouble(
        "h = F.one_hot(h.argmax(1), 16).to(h.dtype)",
        "h = h.softmax(1).to(h.dtype)",
        "no gradient reaches them",
        "argmax()",
        forward=f"{BODY}\n{{here}}\n{HEAD}",
        model=f"{TRAINED}\n_W = torch.optim.AdamW\ntorch.optim.AdamW = lambda params, lr: _W(params, lr, weight_decay=0.0)",
        moves="body.weight",
    ),
    "a ReLU that is dead": Trouble(
        "h = F.relu(self.norm(self.body(x)) - 100)",
        "h = F.relu(self.norm(self.body(x)))",
        "every gradient is 0",
        "a dead ReLU",
        forward=f"{{here}}\n{HEAD}",
        model=f"{TRAINED}\n_W = torch.optim.AdamW\ntorch.optim.AdamW = lambda params, lr: _W(params, lr, weight_decay=0.0)",
        moves="body.weight",
        ways=("plain", "torch.amp", "O1", "O2", "O5"),
    ),
}

# A script that is slow.

WIDE = "self.body, self.norm, self.head = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 8)\nself.mid = nn.Linear(64, 64)"
EIGHT = "x, y = torch.randn(8, 8), torch.randint(4, (8,))"
SLOW = {"init": WIDE, "batch": EIGHT, "forward": f"{BODY}\nh = self.mid(h)\n{HEAD}"}
CASTING = ("torch.amp", "O1", "O2", "O5")
TROUBLES |= {
    "a region without casts": Trouble(
        "with torch.autocast('cpu', enabled=False):\n    h = F.linear(h.float(), self.mid.weight.float())",
        "h = F.linear(h, self.mid.weight)",
        "computes in float32",
        "end the region",
        most={"float32": 0.01},
        ways=CASTING,
        **SLOW | {"forward": f"{BODY}\n{{here}}\n{HEAD}"},
    ),
    "a product of .float()": Trouble(
        "h = F.linear(h.float(), self.mid.weight.float()).to(h.dtype)",
        "h = F.linear(h, self.mid.weight)",
        "computes in float32",
        "x.to(y.dtype)",
        most={"float32": 0.01},
        ways=(*CASTING, "alone"),
        **SLOW | {"forward": f"{BODY}\n{{here}}\n{HEAD}"},
    ),
    "a scale that makes float32": Trouble(
        "h = h * self.scale.float()",
        "h = h * self.scale.to(h.dtype)",
        "computes in float32",
        "cast what promotes it",
        most={"float32": 0.01},
        ways=(*CASTING, "alone"),
        **SLOW
        | {
            "init": f"{WIDE}\nself.scale = nn.Parameter(torch.ones(64))",
            "forward": f"{BODY}\n{{here}}\nh = torch.einsum('bi,oi->bo', h, self.mid.weight.to(h.dtype))\n"
            "return self.head(h.to(self.head.weight.dtype))",
        },
    ),
    "a penalty in float64": Trouble(
        "w = model.mid.weight.double()",
        "w = model.mid.weight.float()",
        "computes in float64",
        "x.float()",
        most={"float64": 0},
        **SLOW | {"loss": "{here}\nreturn F.cross_entropy(out.float(), y) + 1e-6 * (w @ w.T).square().sum()"},
        also=dict.fromkeys(WAYS, "(w @ w.T)"),
    ),
    "positions in float64": Trouble(
        "h = (h * torch.linspace(0, 1, 64, dtype=torch.float64)).to(h.dtype)",
        "h = h * torch.linspace(0, 1, 64, dtype=h.dtype)",
        "computes in float64",
        "x.float()",
        most={"float64": 0},
        **SLOW | {"forward": f"{BODY}\n{{here}}\nh = self.mid(h)\n{HEAD}"},
    ),
    "a width of 60": Trouble(
        "self.mid, self.out = nn.Linear(64, 60), nn.Linear(60, 64)",
        "self.mid, self.out = nn.Linear(64, 64), nn.Linear(64, 64)",
        "N = 60 is no multiple of 8",
        "pad it to 64",
        most={"odd": 0.01},
        ways=(*CASTING, "alone"),
        **SLOW | {"init": f"{WIDE}\n{{here}}", "forward": f"{BODY}\nh = self.out(self.mid(h))\n{HEAD}"},
        also=dict.fromkeys(WAYS, "self.mid(h)"),
    ),
    "the norm of each gradient, read": Trouble(
        "norm = sum(p.grad.float().norm().item() ** 2 for p in model.parameters()) ** 0.5",
        "norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()",
        "numbers an iteration",
        "read one number",
        most={"reads": 6},
        clip="{here}",
        **SLOW,
    ),
    "no lower precision at all": Trouble(
        "h = self.mid(h)",
        "h = self.mid(h)",
        "every matrix product computes in float32",
        'opt_level="O1"',
        most={"float32": 0.01},
        ways=("plain",),
        cured_way="O1",
        **SLOW | {"forward": f"{BODY}\n{{here}}\n{HEAD}"},
    ),
}

HEALTHY = {
    "cross entropy": {},
    "label smoothing": {"loss": "return F.cross_entropy(out.float(), y, label_smoothing=0.1)"},
    "some targets ignored": {"batch": "y[0] = -100"},
    "a causal mask of -inf": {
        "forward": f"{BODY}\nw = torch.softmax((h @ h.T) + torch.full((6, 6), float('-inf')).triu(1), 1)\n"
        "return self.head(w.to(h.dtype) @ h)"
    },
    "masked_fill with -inf": {
        "forward": f"{BODY}\nw = (h @ h.T).masked_fill(torch.ones(6, 6).triu(1).bool(), float('-inf')).softmax(1)\n"
        "return self.head(w.to(h.dtype) @ h)"
    },
    "fused attention with a mask": {
        "forward": f"{BODY}\nq = h[None, None]\nreturn self.head(F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0])"
    },
    "top two by -inf": {
        "loss": "keep = out.float().masked_fill(out < out.topk(2, 1).values[:, 1:], float('-inf'))\n"
        "return F.cross_entropy(out.float(), y) + 0.1 * keep.logsumexp(1).mean()"
    },
    "a maximum that begins at -inf": {
        "forward": f"{BODY}\nm = torch.full_like(h, float('-inf')).maximum(h)\nreturn self.head(m)"
    },
    "a best value that begins at inf": {"batch": "best = torch.tensor(float('inf')).minimum(x.mean())"},
    "a safe where": {
        "forward": f"{BODY}\nz = torch.where(h > 0, h.clamp(min=1e-3).log(), 0.0)\nreturn self.head(z.to(h.dtype))"
    },
    "NaN that is taken out": {"batch": "x[1, 1] = float('nan')\nx = x.nan_to_num()"},
    "rows with NaN left out": {
        "batch": "bad = torch.full((2, 8), float('nan'))\nx = torch.cat([x, bad])\nx = x[x.isfinite().all(1)]"
    },
    "empty memory": {"batch": "x = torch.empty(6, 8).copy_(x)"},
    "dropout": {"forward": f"{BODY}\nh = F.dropout(h, 0.5)\n{HEAD}"},
    "a regression": {"loss": "return F.mse_loss(out.float().mean(1), y.float())"},
    "logits of two classes": {
        "loss": "return F.binary_cross_entropy_with_logits(out.float(), F.one_hot(y, 4).float())"
    },
    "a frozen part": {"init": "self.body.requires_grad_(False)"},
    "a loss of large numbers": {"loss": "return F.cross_entropy(out.float(), y) * 300", "iterations": 30},
    "a norm that is clipped": {"clip": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    "batch norm": {"init": "self.norm = nn.BatchNorm1d(16)"},
    "a row that is 100 times the others": {"batch": "x[0] = x[0] * 100 ** (i == 13)"},
    "a loss that falls a million times": {
        "loss": "return F.mse_loss(out.float() * (1e-6 if i > 5 else 1), 0 * out.float())"
    },
    "a warm-up from 0": {"clip": "optimizer.param_groups[0]['lr'] = 1e-3 * min(1, i / 10)"},
    "a head that begins at 0": {"init": "nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)"},
    "a frozen teacher in a list": {
        "init": "self.teacher = [nn.Linear(8, 4).requires_grad_(False)]",
        "forward": f"{BODY}\nself.t = self.teacher[0](x.float()).detach()\n{HEAD}",
    },
    "a straight-through round": {"forward": f"{BODY}\nh = h + (h.round() - h).detach()\n{HEAD}"},
    "a small divisor that is meant": {"loss": "return F.cross_entropy(out.float() / 0.07, y)"},
    "a penalty of gradients": {
        "loss": "l = F.cross_entropy(out.float(), y)\ng, = torch.autograd.grad(l, out, create_graph=True)\n"
        "return l + 0.1 * g.float().square().sum()"
    },
    "a batch that is left out": {"batch": "if i == 7: x = x[:2]; y = y[:2]"},
    "a reward that grows": {"loss": "return -(F.log_softmax(out.float(), 1)[:, 0] * (1 + i)).mean()"},
    "logs of masked numbers": {"loss": "p = out.float().softmax(1)\nreturn -(p[p > 0].log().mean())"},
    "an embedding": {
        "init": "self.e = nn.Embedding(4, 8)",
        "forward": f"x = x + self.e((x[:, 0] > 0).long())\n{BODY}\n{HEAD}",
    },
    "checkpointing": {
        "forward": "from torch.utils.checkpoint import checkpoint\n"
        f"h = checkpoint(lambda x: F.relu(self.norm(self.body(x))), x, use_reentrant=False)\n{HEAD}"
    },
    "a loss near 0": {"loss": "return F.mse_loss(out.float(), 0.99 * out.float().detach())"},
    "a teacher that is held elsewhere": {
        "init": "self.teacher = [nn.Linear(8, 4)]",
        "forward": f"{BODY}\nwith torch.no_grad(): self.teacher[0](x.float())\n{HEAD}",
    },
    "Adam over lists": {
        "model": f"{TRAINED}\n_W = torch.optim.AdamW\ntorch.optim.AdamW = lambda params, lr: _W(params, lr, foreach=True)"
    },
    "an exponential average": {"clip": "AVG = [p.detach().clone().mul_(0.9) for p in model.parameters()]"},
}


def forked(folder, call):
    """Make a call in a fork of this process; return the printed text and the exit code."""
    path = Path(folder) / "printed"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.chdir(folder)
            code = call() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return path.read_text(errors="replace"), os.waitstatus_to_exitcode(status)


class Count(TorchDispatchMode):
    """Shares of the multiplications of matrix products, in float32 and of odd sizes, and numbers: in float64, and read."""

    def __init__(self):
        super().__init__()
        self.work, self.reads, self.float64 = Counter(), 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = args[-2:]
            work = 2 * a.numel() * b.shape[-1]
            is_odd = a.element_size() == 2 and any(size % 8 for size in (*a.shape[-2:], b.shape[-1]))
            self.work.update({"all": work, str(a.dtype): work, "odd": work * is_odd})
        self.reads += name == "_local_scalar_dense" and not in_optimizer()
        self.float64 += isinstance(out, torch.Tensor) and out.dtype is torch.float64 and out.dim() > 0
        return out

    def shares(self, iterations):
        all_work = max(1, self.work["all"])
        return {
            "float32": self.work["torch.float32"] / all_work,
            "odd": self.work["odd"] / all_work,
            "float64": self.float64 / iterations,
            "reads": self.reads / iterations,
        }


def in_optimizer():
    """Whether torch's own optimizer runs, which keeps counts as tensors."""
    return any(frame.filename.startswith(OPTIMIZERS) for frame in traceback.extract_stack())


def plain(folder, text, trouble):
    """Run a script without any tool; return whether it is healthy, and the printed text."""
    path = Path(folder) / "script.py"
    path.write_text(text)

    def call():
        with Count() if trouble.most else nullcontext() as count:
            runpy.run_path(str(path), run_name="__main__")
        print("counted", count.shares(trouble.iterations) if count else {})

    printed, code = forked(folder, call)
    rows = [line.split() for line in printed.splitlines() if line.startswith("iteration")]
    losses, scales = [float(row[2]) for row in rows], [float(row[3]) for row in rows]
    is_still = not all(a > b for a, b in zip(scales[-4:], scales[-3:]))
    is_finite = all(loss == loss and abs(loss) != float("inf") for loss in losses)
    jumps = any(loss > 100 * max(losses[:i]) for i, loss in enumerate(losses) if i and max(losses[:i]) > 0)
    moved = next((line.split() for line in printed.splitlines() if line.startswith("moved")), [])
    counted = ast.literal_eval(next((one[8:] for one in printed.splitlines() if one.startswith("counted ")), "{}"))
    is_quick = all(counted.get(name, 0) <= most for name, most in trouble.most.items())
    is_well = code == 0 and is_finite and not jumps and is_still and "weights True True" in printed
    return is_well and is_quick and (not trouble.moves or trouble.moves in moved), printed


def tool(folder, text, command):
    (Path(folder) / "script.py").write_text(text)
    printed, _ = forked(folder, lambda: ampkit_main([command, "script.py"]))
    return "\n".join(
        line for line in printed.splitlines() if not line.startswith(("iteration ", "weights ")) or ", row" in line
    )


def lines_with(words, text):
    return {number for number, line in enumerate(text.splitlines(), 1) if words in line}


def judge(folder, trouble, way):
    """Return ``right``, ``healthy`` if nothing is wrong in this way and nothing was reported, or the tool's mistake."""
    text = trouble.script(way, trouble.line)
    healthy, printed = plain(folder, text, trouble)
    said = tool(folder, text, trouble.tool)
    if not trouble.line:  # a healthy script, of which all tools are asked
        said += tool(folder, text, "check")
    if healthy:
        return ("healthy" if is_quiet(trouble, said) else "FALSE ALARM"), said
    lines = lines_with("# here", text)
    lines = {number - i for number in lines for i in range(trouble.line.count("\n") + 1)}
    lines |= lines_with(trouble.also[way], text) if way in trouble.also else set()
    wrong = []
    is_named = trouble.moves and re.search(rf"(not trained|mistake).*\b{re.escape(trouble.moves)}\b", said)
    if not (
        is_named
        or "LR = " in trouble.line
        or any(re.search(rf'script.py(:|", line ){number}\b', said) for number in lines)
    ):
        wrong.append("line")
    if trouble.kind not in said:
        wrong.append("verdict")
    if trouble.cure not in said:
        wrong.append("cure")
    if not plain(folder, trouble.script(trouble.cured_way or way, trouble.cured), trouble)[0]:
        wrong.append("NOT CURED")
    return ("wrong: " + ", ".join(wrong) if wrong else "right"), f"{said}\n--- plain\n{printed[-600:]}"


NOT_TRAINED = re.compile(r"^not trained.*", re.M)


def is_quiet(trouble, said):
    """Whether the tools report no trouble that is not there."""
    if trouble.tool == "record":
        return trouble.kind not in said
    if trouble.tool == "check":
        return "none seen" in said and trouble.moves not in "".join(NOT_TRAINED.findall(said))
    return "nothing found" in said and (trouble.line or "none seen" in said)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="those whose names have these words")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", metavar="FILE", help="write the table")
    parser.add_argument("--verbose", action="store_true", help="print what the tool says where it is wrong")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Advice as on a processor with instructions for lower precision: elsewhere float32 is the fastest.
    ampkit.insight.record.advice.computes_slowly_in = lambda dtype: False
    rows, wrong = [], 0
    cases = {**TROUBLES, **{f"healthy: {name}": Trouble("", "", "", **parts) for name, parts in HEALTHY.items()}}
    for name, trouble in cases.items():
        if not any(words in name for words in arguments.only):
            continue
        row = [name]
        for way in arguments.ways:
            with tempfile.TemporaryDirectory() as folder:
                verdict, said = judge(folder, trouble, way) if way in trouble.ways else ("-", "")
            if name.startswith("healthy") and verdict == "right":
                verdict = "UNHEALTHY"
            row.append(verdict)
            is_wrong = verdict not in ("right", "healthy", "-")
            wrong += is_wrong
            if is_wrong and arguments.verbose:
                print(f"=== {name}, {way}: {verdict}\n{said}", flush=True)
        rows.append(row)
        print("| " + " | ".join(row) + " |", flush=True)
    print(f"{wrong} wrong")
    if arguments.out:
        lines = [["", *arguments.ways], ["---"] * (1 + len(arguments.ways)), *rows]
        Path(arguments.out).write_text("\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
