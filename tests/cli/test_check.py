"""`ampkit check`: what it says of scripts that use float32, torch.autocast and ampkit, how it ends, and that torch is as it was."""

import re
import sys

import pytest
import torch

from ampkit.__main__ import main

MODEL = """
import sys, torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 130), nn.Linear(130, 64)
        self.gate = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 257)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

model = Model()
tokens = torch.arange(81).view(9, 9)
def loss_of(): return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
"""

FLOAT32 = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
prototypes = torch.zeros(257, 4)
print("arguments", sys.argv[1:])
for i in range(1000):
    optimizer.zero_grad()
    loss = loss_of() + (model(tokens) @ prototypes).mean()
    loss.backward()
    optimizer.step()
    print("iteration", i)
"""


@pytest.fixture
def check(tmp_path, capsys):
    """Check a script, which follows the model above; the exit code and the lines printed."""

    def run(script, *options, arguments=()):
        path = tmp_path / "script.py"
        path.write_text(MODEL + script)
        code = main(["check", *options, str(path), *arguments])
        return code, capsys.readouterr().out.splitlines()

    return run


#: A loop, which `check` ends.
LOOP = """
while True:
    optimizer.zero_grad()
    {loss}.backward()
    optimizer.step()
"""


def row(lines, title):
    (found,) = [line for line in lines if line.startswith(f"{title}  ")]
    return found.removeprefix(title).strip()


def test_a_float32_script_is_told_what_each_level_would_change(check):
    before = torch.autograd.backward, torch.autocast.__enter__, list(sys.path)
    code, lines = check(FLOAT32, arguments=["--lr", "3"])
    assert code == 0
    assert (torch.autograd.backward, torch.autocast.__enter__, list(sys.path)) == before
    assert lines[0] == "arguments ['--lr', '3']" and [line for line in lines if line.startswith("iteration")] == [
        f"iteration {i}" for i in range(3)
    ]
    # 257 * 64 + 3 * (64 + 64 + 64 * 130 + 130 + 130 * 64 + 64 + 64) + 64 * 257 + 257
    assert any("3 steps of AdamW; Model (84,231 parameters); the script uses float32." in line for line in lines)
    assert "float32" in row(lines, "O1") and "16.0" in row(lines, "O1") and "dynamic" in row(lines, "O1")
    # All but some hundreds of the parameters have 2 + 2 + 2 + 8 bytes, or 4 + 2 + 8; the others have 4 + 4 + 8.
    for level, weights in (("O2", "bfloat16 + 16-bit rest"), ("O5", "float32")):
        assert weights in row(lines, level) and "AdamW: one pass" in row(lines, level)
        assert "14.0" in row(lines, level)
    assert row(lines, "kept float32") == "at O2 3x a vector (layers.0-2); 3x a norm (layers.0-2.norm)"
    assert row(lines, "not cast") == "at O2, O3 and O5 matmul outside of every module's forward (3x)"
    # 4 + 2 + 2.03, and 2 more for 1.7%: 8.06; and 4 + 4 + 2.03 where nothing makes gradients narrow.
    assert row(lines, "O5, int8").split()[-2:] == ["8.1", "none"]
    assert row(lines, "no level").split()[-2:] == ["10.0", "none"]
    # Seven layers, in two forwards of three iterations.
    assert row(lines, "cast").startswith("to lower precision linear 42x, matmul 3x; to float32 layer_norm 18x")
    # A row goes through two forwards of 3 * 2 * 64 * 130 and 64 * 257 products, and 257 * 4: of 133,764 are 49,920 with each 130.
    assert row(lines, "shapes").split("; ") == [
        "N = 130 in layers.0-2.up: pad it to 136 (37% of the work)",
        "K = 130 in layers.0-2.down: pad it to 136 (37% of the work)",
        "N = 257 in head: pad it to 264 (25% of the work)",
        "K = 257 in __matmul__: pad it to 264 (0.77% of the work)",
    ]
    assert row(lines, "mistake") == "none seen"
    assert len(lines) - 4 <= 18


def test_small_matrices_are_named_where_o5_takes_what_o1_takes(check):
    """The 4,608 elements of one matrix, of 72 * 64 + 64 + 64 * 8 + 8, have gradients of 2 bytes: 89%."""
    model = "model = nn.Sequential(nn.Linear(72, 64), nn.Linear(64, 8)).bfloat16()"
    loss = LOOP.format(loss="model(torch.randn(8, 72).bfloat16()).sum()")
    _, lines = check(f"{model}\noptimizer = torch.optim.Adam(model.parameters())\n{loss}")
    assert row(lines, "gradients").startswith("at O5 2 bytes for 89% of the elements: for matrices with at least 4,096")
    # Weight, rest and gradient 2 each, and two moments of 1 byte.
    assert row(lines, "no level").split() == 'bfloat16 + 16-bit rest Adam(state_dtype="int8") 8.0 none'.split()


AUTOCAST = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled={scales})
while True:
    with torch.autocast("cpu", torch.{dtype}, enabled={enabled}):
        loss = loss_of()
    scaler.scale(loss).backward()
    {unscale}
    {clip}
    scaler.step(optimizer)
    scaler.update()
"""

CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


#: The dtype, whether a scaler scales, whether it unscales before the script clips or measures, and the mistake.
AUTOCASTS = [
    ("bfloat16", False, False, CLIP, "none seen"),
    ("float16", False, False, CLIP, "torch.autocast in float16, without a loss scale"),
    ("bfloat16", True, True, CLIP, "none seen"),
    ("bfloat16", True, False, CLIP, "clip_grad_norm_ before"),
    ("bfloat16", True, False, "nn.utils.get_total_norm([p.grad for p in model.parameters()])", "get_total_norm before"),
    ("bfloat16", True, False, "nn.utils.clip_grad_value_(model.parameters(), 1.0)", "clip_grad_value_ before"),
    ("bfloat16", True, False, "[p.grad.clamp_(-1, 1) for p in model.parameters()]", "clamp_ before"),
    ("bfloat16", True, False, "[p.grad.mul_(2.0) for p in model.parameters()]", "none seen"),
]


@pytest.mark.parametrize("dtype, scales, unscales, clip, mistake", AUTOCASTS)
def test_a_script_with_autocast(check, dtype, scales, unscales, clip, mistake):
    unscale = "scaler.unscale_(optimizer)" if unscales else "pass"
    script = AUTOCAST.format(enabled=True, clip=clip, dtype=dtype, scales=scales, unscale=unscale)
    code, lines = check(script, "--iterations", "2")
    uses = f"2 steps of SGD; Model (84,231 parameters); the script uses torch.autocast in {dtype}."
    assert any(uses in line for line in lines)
    expected = mistake.replace("before", "before GradScaler.unscale_")
    assert row(lines, "mistake").startswith(expected) and code == (mistake != "none seen")


@pytest.mark.parametrize(
    "begin", ["", 'import ampkit; ampkit.initialize(model, optimizer, opt_level="O0", verbosity=0)']
)
def test_casts_of_the_scripts_own_are_told(check, begin):
    """A script casts by itself, where neither a level nor torch.autocast does."""
    own = "F.linear(model.embedding(tokens).half(), model.head.weight.half()).float().mean()"
    code, lines = check(f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{begin}\n" + LOOP.format(loss=own))
    uses = "ampkit at O0" if begin else "float32"
    words = f"{uses}, with casts of its own: products in float16"
    assert any(f"the script uses {words}." in line for line in lines)
    assert row(lines, "mistake").startswith(f"{words}, without a loss scale") and code == 1


def test_a_schedule_that_reaches_0_is_told_and_a_warm_up_that_begins_there_is_not(check):
    for rates, words in (
        ("1e-3, 5e-4, 0.0", "the learning rate is 0 at the last of these steps"),
        ("0.0, 1e-4, 1e-3", ""),
    ):
        script = FLOAT32.replace(
            "    optimizer.step()", f"    optimizer.param_groups[0]['lr'] = [{rates}][i]\n    optimizer.step()"
        )
        text = "\n".join(check(script)[1])
        assert (words in text) if words else ("the learning rate is 0" not in text)


AMPKIT = """
import ampkit
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
model, optimizer = ampkit.initialize(model, optimizer, opt_level="{level}", verbosity=0)
while True:
    optimizer.zero_grad()
    {backward}
    optimizer.step()
"""
BLOCK = "with ampkit.scale_loss(loss_of(), optimizer) as scaled: scaled.backward()"


def test_a_script_with_ampkit_is_told_of_its_mistakes_and_its_model_is_given_back(check):
    code, lines = check(AMPKIT.format(level="O2", backward=BLOCK))
    assert code == 0 and any("the script uses ampkit at O2." in line for line in lines)
    goes_on = "ampkit.close()\nwhile True: loss_of().backward(); optimizer.step()\n"
    code, lines = check(AMPKIT.format(level="O2", backward=f"{BLOCK}\n    optimizer.step(); break") + goes_on)
    assert code == 0 and any("the script uses ampkit at O2." in line for line in lines)
    assert "Adam: over float32 copies (amsgrad=True)" in row(lines, "O2")
    assert "Adam: its own" in row(lines, "O1")
    code, lines = check(AMPKIT.format(level="O2", backward="loss_of().backward()"))
    assert code == 1
    assert row(lines, "mistake").startswith("Adam.step() uses gradients of a backward pass that ran outside of every")
    import ampkit

    assert ampkit.current_session() is None


TWO_LAYERS = """
import copy
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(9, 6)
def loss_of(): return (net(x).float() - 1).square().mean()
"""
#: Scripts that take no step, and the words about their use, with the bytes of their weights.
WITHOUT_STEPS = {
    "net.bfloat16()(x.bfloat16())": "weights in bfloat16",
    "net.half()(x.half())": "weights in float16",
    "net.requires_grad_(False).bfloat16()(x.bfloat16())": "weights in bfloat16",
    "net.double()(x.double())": "weights in float64",
    "net(x)": "float32",
}
TWO_OPTIMIZERS = """
critic = nn.Linear(64, 1)
first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, model))
while True:
    critic(torch.ones(1, 64)).sum().backward(); first.step()
    loss_of().backward(); second.step()
"""
#: A script, and patterns of lines, whose columns are taken for one space.
SAID = {
    "regions that switch casts off": (
        AUTOCAST.format(dtype="bfloat16", scales=False, enabled=False, unscale="pass", clip=CLIP),
        [r"not cast linear inside torch\.autocast\(enabled=False\) \(21x\)$"],
    ),
    # 2 for weights and 2 for gradients; SGD without momentum has no state. O1 has 4 and 4.
    "weights that train in lower precision": (
        "optimizer = torch.optim.SGD(model.bfloat16().parameters(), lr=0.1)\n" + LOOP.format(loss="loss_of()"),
        [
            r"mistake SGD updates weights in bfloat16",
            r"as it is bfloat16 SGD: its .*4\.0",
            r"O1 .* 8\.0 ",
            r"O2 .* 6\.0 ",
        ],
    ),
    "a GAN ends when both optimizers have stepped": (TWO_OPTIMIZERS, [".*3 steps of SGD, 3 steps of SGD; "]),
    "an optimizer never steps": ("while True:\n    loss_of()\n", [".*no optimizer stepped; Model"]),
    **{
        line: (f"{TWO_LAYERS}\n{line}\n", [rf".*the script uses {uses}\.", f"as it is {uses.split()[-1]} none$"])
        for line, uses in WITHOUT_STEPS.items()
    },
}


@pytest.mark.parametrize("case", SAID)
def test_a_script_is_told(check, case):
    script, patterns = SAID[case]
    code, lines = check(script)
    assert code == any(pattern.startswith("mistake") for pattern in patterns)
    said = [" ".join(line.split()) for line in lines]
    assert [pattern for pattern in patterns if not any(re.match(pattern, line) for line in said)] == [], lines


def test_exceptions_and_exit_codes_are_the_scripts(check, capsys):
    with pytest.raises(ZeroDivisionError):
        check("loss_of()\n1 / 0\n")
    printed = capsys.readouterr().out
    assert "no optimizer stepped; Model (84,231 parameters)" in printed and "O5 " in printed
    with pytest.raises(SystemExit) as exited:
        check("sys.exit(7)\n")
    assert exited.value.code == 7
    code, lines = check("loss_of()\nsys.exit()\n")
    assert code == 0 and row(lines, "mistake") == "none seen"
    assert main(["check", "nowhere.py"]) == 2 and "nowhere.py" in capsys.readouterr().err
    assert main(["check", "--iterations", "0", "nowhere.py"]) == 2 and "at least 1" in capsys.readouterr().err


MOVES = {
    "float32 copies of its own": """
net.bfloat16()
x = x.bfloat16()
copies = [param.detach().float().requires_grad_() for param in net.parameters()]
optimizer = torch.optim.SGD(copies, lr=0.1)
for _ in range(9):
    net.zero_grad()
    loss_of().backward()
    for own, param in zip(copies, net.parameters()):
        own.grad = param.grad.float()
    optimizer.step()
    with torch.no_grad():
        for own, param in zip(copies, net.parameters()):
            param.copy_(own)
""",
    "a teacher that is averaged": """
teacher = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(9):
    with torch.no_grad():
        target = teacher(x)
    optimizer.zero_grad()
    (loss_of() + (net(x) - target).square().mean()).backward()
    optimizer.step()
    with torch.no_grad():
        for own, param in zip(teacher.parameters(), net.parameters()):
            own.lerp_(param, 0.1)
""",
    "a model that makes targets and stays": """
target_of = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters())
"""
    + LOOP.format(loss="(net(x) - target_of(x).detach() - 1).square().mean()"),
}


@pytest.mark.parametrize("script", MOVES)
def test_weights_that_move_or_are_not_to_are_not_said_to_stand_still(check, script):
    code, lines = check(TWO_LAYERS + MOVES[script])
    assert code == 0 and not [line for line in lines if line.startswith("not trained")]


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_steps_that_a_grad_scaler_has_skipped_lose_no_updates(check, optimizer, is_fused):
    script = f"""
gate, extra = nn.Parameter(torch.zeros(2)), nn.Linear(6, 2)  # which has a gradient when the gate has moved
params, scaler = [*net.parameters(), gate, *extra.parameters()], torch.amp.GradScaler("cpu")
optimizer = torch.optim.{optimizer}(params, 1e-3, fused={is_fused})
for _ in range(9):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of() * 1e4 + (gate * extra(x)).mean()  # the first term fits at no scale of the first nine
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    code, lines = check(TWO_LAYERS + script)
    assert code == 0 and row(lines, "mistake") == "none seen" and row(lines, "not cast") == "none"
    assert not [line for line in lines if line.startswith("not trained")]


def test_copies_that_are_not_written_back_are_told(check):
    stays = MOVES["float32 copies of its own"].replace("param.copy_(own)", "pass")
    _, lines = check(TWO_LAYERS + stays)
    assert "no optimizer that stepped holds them" in row(lines, "not trained")
    assert row(lines, "as it is").split()[-1] == "?"  # the optimizer holds other tensors than the model


#: Objects made between the optimizer and the loop; for each "not trained" line the parameters, and words of the reason.
STANDING = {
    "a parameter of its own that is not used": (
        "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]})",
        {"a parameter of shape (3,)": "no model has it, only the optimizer"},
    ),
    "a parameter of its own that is used": (
        "own = nn.Parameter(torch.ones(3)); optimizer.add_param_group({'params': [own]}); x = lambda: xs * own.prod()",
        {},
    ),
    "a layer that is not called": (
        "net.forward = lambda x: net[1](net[0](x))",
        {"2.bias, 2.weight": "the loss does not use them"},
    ),
}


@pytest.mark.parametrize("case", STANDING)
def test_what_only_the_optimizer_has_is_told_from_what_no_gradient_reaches(check, case):
    line, expected = STANDING[case]
    script = f"{TWO_LAYERS}xs, x = x, lambda: xs\noptimizer = torch.optim.Adam(net.parameters())\n{line}\n"
    code, lines = check(script + LOOP.format(loss="(net(x()) - 1).square().mean()"))
    found = [line.removeprefix("not trained").strip() for line in lines if line.startswith("not trained")]
    assert {line.partition(":")[0] for line in found} == set(expected), lines
    assert all(words in next(line for line in found if line.startswith(names)) for names, words in expected.items())
    assert code == 0 and row(lines, "mistake") == "none seen" + ", but see what is not trained" * bool(expected)


def test_weights_in_float64_are_said_to_be_so(check):
    code, lines = check(TWO_LAYERS + "net.double()\nx = x.double()\n" + MOVES["a model that makes targets and stays"])
    assert code == 0 and any("the script uses weights in float64." in line for line in lines)
    assert row(lines, "as it is").split()[0] == "float64" and "call model.float() first" in row(lines, "levels")
    assert not any(line.startswith(("O2 ", "no level ")) for line in lines)  # initialize refuses it
    assert row(lines, "shapes") == "no matrix product that a level casts"
    assert row(lines, "as it is").split()[-1] == "32.0"  # weight, gradient and two moments of 8 bytes each


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_no_shape_is_advised_for_products_that_no_level_casts(check, dtype):
    """A layer with 7 inputs has this dtype; a layer with 9 beside it is in float32."""
    _, lines = check(f"""
model, beside = nn.Linear(7, 8, dtype=torch.{dtype}), nn.Linear(9, 16)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(8, 7).to(torch.{dtype})).abs().sum().backward()
    beside(torch.randn(8, 9))
    optimizer.step()
""")
    assert row(lines, "shapes").startswith("K = 9 in linear: pad it to 16 (100% of the work)")


def test_a_lazy_module_that_was_never_called_has_no_part_in_figures(check):
    script = """
class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.never, self.norm = net, nn.LazyLinear(3), nn.LazyBatchNorm1d()
    def forward(self, x):
        return self.net(x)
model = Holds()
optimizer = torch.optim.AdamW(model.parameters())
"""
    code, lines = check(TWO_LAYERS + script + LOOP.format(loss="(model(x) - 1).square().mean()"))
    assert code == 0 and any("Holds (56 parameters)" in line for line in lines)  # 6 * 6 + 6 + 6 * 2 + 2
    assert row(lines, "as it is").split()[-1] == "16.0"
    assert "never.bias, never.weight, norm.bias, norm.weight: no gradient reaches them" in row(lines, "not trained")


@pytest.mark.parametrize("rate, names", [("1e-4", ""), ("1e-12", "0.weight, 1.weight, 3.weight")])
def test_a_bias_that_a_norm_subtracts_is_not_said_to_stand_still(check, rate, names):
    """Its gradient is rounding alone, and its updates vanish at any rate: only matrices are told of."""
    script = f"""
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(9, 6)
optimizer = torch.optim.SGD(net.parameters(), {rate})
"""
    _, lines = check(script + LOOP.format(loss="(net(x) - 1).square().sum()"))
    found = [line.removeprefix("not trained").strip() for line in lines if line.startswith("not trained")]
    assert [line.partition(":")[0] for line in found] == [names] * bool(names), lines
    assert all("raise the learning rate" in line for line in found)


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_frozen_weights_have_neither_gradients_nor_moments(check, dtype, width):
    """A frozen layer counts by its weights alone, a trained one by weight, gradient and two moments of 4 bytes; each is 16 * 16."""
    script = f"""
frozen, net = nn.Linear(16, 16, bias=False, dtype=torch.{dtype}).requires_grad_(False), nn.Linear(16, 16, bias=False)
net.frozen = frozen
optimizer = torch.optim.AdamW(net.parameters())
"""
    _, lines = check(script + LOOP.format(loss=f"net(frozen(torch.ones(8, 16, dtype=torch.{dtype})).float()).sum()"))
    assert row(lines, "as it is").split()[-1] == f"{(width + 16) / 2:.1f}"
    assert row(lines, "no level").split()[-2] == f"{(width + 8 + 2 + 4 / 128) / 2:.1f}"
    uses = "float32" + ", beside weights in bfloat16" * (dtype == "bfloat16")
    assert any(f"the script uses {uses}." in line for line in lines)
