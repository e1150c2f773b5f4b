"""Planted troubles, as strangers write them, and healthy scripts: what `ampkit diagnose` says of each, in six ways of training.

Whether a script is in trouble is read off a plain run, without ampkit's tools: a loss, or a weight, that is not finite, an
exception, weights that stand still, or a loss scale that falls in each of the last iterations. Then the tool has to name the
marked line, the kind and the cure, and the script with the cure in its place has to be healthy; where the plain run is healthy,
the tool has to find nothing.

    python benchmarks/troubles.py                     # all, some minutes on one core
    python benchmarks/troubles.py --only "log of p"   # troubles whose names have these words
    python benchmarks/troubles.py --out results.md    # writes the table too
"""

import argparse
import os
import re
import runpy
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # each run is a fork of this process: what it needs is imported here, once

import ampkit
import ampkit.insight.diagnose_script  # noqa: F401
from ampkit.__main__ import main as ampkit_main

#: How a script is set up, and what one iteration is.
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
        "model = model.bfloat16()\noptimizer = ampkit.optimizers.FusedAdam(model.parameters(), lr=LR)",
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
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
{setup}
for i in range({iterations}):
    x, y = batch(i)
    optimizer.zero_grad()
    {run}
    {step}
    if i == {iterations} - 4:
        before = [p.detach().clone() for p in model.parameters()]
    print("iteration", i, loss.item(), scaler.get_scale() if "scaler" in globals() else SCALE())
params = list(model.parameters())
print("weights", all(bool(p.isfinite().all()) for p in params), any(not p.equal(b) for p, b in zip(params, before)))
"""
SCALE = "lambda: ampkit.loss_scale(optimizer) if ampkit.current_session() is not None else 1.0"
AT = 13  # the iteration of faults that are of a batch: the loss scale has come down by then

BODY = "h = F.relu(self.norm(self.body(x)))"
HEAD = "return self.head(h)"
CE = "return F.cross_entropy(out.float(), y)"


@dataclass
class Trouble:
    """A script with ``line`` in the place of ``{here}`` in one of its parts; ``cured`` stands there in the cured one.

    ``kind`` and ``cure`` are words that the tool has to print, ``also``
    another line that may be named, by the way of training.
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
    ways: tuple = tuple(WAYS)

    def script(self, way, line):
        setup, run, step = WAYS[way]
        parts = {"forward": self.forward, "batch": self.batch, "loss": self.loss, "init": self.init, "run": run}
        parts |= {"step": step.replace("{clip}", self.clip), "lr": str(self.lr), "iterations": str(self.iterations)}
        parts |= {"setup": f"{setup}\nSCALE = {SCALE}"}
        text = SCRIPT.lstrip()
        for name, part in parts.items():
            text = re.sub(
                rf"^( *)(.*)\{{{name}\}}",
                lambda found, part=part: "\n".join(
                    found[1] + found[2] * (not i) + one for i, one in enumerate(part.split("\n"))
                ),
                text,
                flags=re.M,
            )
        return re.sub(
            r"^( *)(.*)\{here\}",
            lambda found: (
                "\n".join(found[1] + found[2] * (not i) + one for i, one in enumerate(line.split("\n"))) + "  # here"
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
        "eps inside of the square root",
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
        "ratio = (out.float() - out.float().detach() + bad).clamp(max=20).exp()",
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
        "a frozen model in another precision",
        "x.to(its dtype)",
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
}


def forked(folder, call):
    """What a call prints in a fork of this process, and its exit code."""
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


def plain(folder, text):
    """Whether a script is healthy, and what it printed, run without any tool."""
    path = Path(folder) / "script.py"
    path.write_text(text)

    def call():
        runpy.run_path(str(path), run_name="__main__")

    printed, code = forked(folder, call)
    rows = [line.split() for line in printed.splitlines() if line.startswith("iteration")]
    losses, scales = [float(row[2]) for row in rows], [float(row[3]) for row in rows]
    is_still = not all(a > b for a, b in zip(scales[-4:], scales[-3:]))
    is_finite = all(loss == loss and abs(loss) != float("inf") for loss in losses)
    return code == 0 and is_finite and is_still and "weights True True" in printed, printed


def tool(folder, text, command="diagnose"):
    (Path(folder) / "script.py").write_text(text)
    printed, _ = forked(folder, lambda: ampkit_main([command, "script.py"]))
    return "\n".join(
        line for line in printed.splitlines() if not line.startswith(("iteration ", "weights ")) or ", row" in line
    )


def lines_with(words, text):
    return {number for number, line in enumerate(text.splitlines(), 1) if words in line}


def judge(folder, trouble, way):
    """``right``, ``healthy`` where nothing is wrong in this way and nothing was found, or what the tool got wrong."""
    text = trouble.script(way, trouble.line)
    healthy, printed = plain(folder, text)
    said = tool(folder, text)
    if healthy:
        return ("healthy" if "nothing found" in said else "FALSE ALARM"), said
    lines = lines_with("# here", text)
    lines = {number - i for number in lines for i in range(trouble.line.count("\n") + 1)}
    lines |= lines_with(trouble.also[way], text) if way in trouble.also else set()
    wrong = []
    if not any(f"script.py:{number} " in said for number in lines):
        wrong.append("line")
    if trouble.kind not in said:
        wrong.append("verdict")
    if trouble.cure not in said:
        wrong.append("cure")
    if not plain(folder, trouble.script(way, trouble.cured))[0]:
        wrong.append("NOT CURED")
    return ("wrong: " + ", ".join(wrong) if wrong else "right"), f"{said}\n--- plain\n{printed[-600:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="those whose names have these words")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", metavar="FILE", help="write the table")
    parser.add_argument("--verbose", action="store_true", help="print what the tool says where it is wrong")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
