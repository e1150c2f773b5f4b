"""``ampkit diagnose script.py``: stops at the culprit's line, with the figures of `ampkit.diagnose`."""

import subprocess
import sys
import textwrap

import pytest
from helpers import ROOT

MODEL = """
    import torch, ampkit
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

SCRIPTS = {
    "a loss": """
    for i in range(10):
        y = model(torch.ones(2, 4)).abs() * 0 + (3.0 - i)
        loss = y.log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", i)
    """,
    "a gradient that ruins the weights": """
    for i in range(10):
        loss = (model(torch.ones(2, 4)) * (i < 3)).abs().sqrt().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", i)
    """,
    "skips": """
    model, optimizer = ampkit.initialize(
        model, optimizer, opt_level="O1", patch_torch_functions_type=torch.float16, verbosity=0
    )
    for i in range(10):
        y = model(torch.ones(1, 4)).float() * 1e4
        optimizer.zero_grad()
        with ampkit.scale_loss(y.sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        print("step", i)
    """,
    "nothing": """
    for i in range(2):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        print("step", i)
    """,
}

# steps taken, exit code, what is printed
FOUND = {
    "a loss": (3, 1, ["log of zero", "line      script.py:8  loss = y.log().mean()", "of 2"]),
    "a gradient that ruins the weights": (4, 1, ["division by zero in backward", "script.py:7", "torch.Tensor.sqrt"]),
    "skips": (2, 1, ["overflow of the format in backward at loss scale", "script.py:10", "float16 ends at 65504"]),
    "nothing": (2, 0, ["nothing found in "]),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_stops_at_the_culprit(case, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(MODEL).lstrip() + textwrap.dedent(SCRIPTS[case]))
    done = subprocess.run(
        [sys.executable, "-m", "ampkit", "diagnose", tmp_path / "script.py"], cwd=ROOT, capture_output=True, text=True
    )
    steps, code, printed = FOUND[case]
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("step") == steps, done.stdout
    for part in printed:
        assert part in done.stdout, done.stdout
