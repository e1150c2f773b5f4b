"""The checks for a machine with a GPU: `make gpu` builds there, runs the tests for CUDA, NVIDIA's checkers and the benchmarks.

    make gpu                          everything
    make gpu PART=tests               one of build, tests, sanitizer, bench
    make gpu RESULTS=some/folder      where the results go; benchmarks/results if nothing is said

Results are written as they come, to <date>-<card>.md; a name that ends in .md is taken as it is. A step that has passed is not run
again for the same file, so that the same command continues a part that was interrupted.
"""

import argparse
import contextlib
import datetime
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124
PYTEST = "python -m pytest -q -m cuda"
IN_PROCESSES = " --numprocesses 4 --dist worksteal" if importlib.util.find_spec("xdist") else ""
# Names of tests with small shapes, of our kernels alone: a checker slows them down by a hundred.
SMALL = {
    "test_kernels.py": "layouts or slice or wherever_the_value_hides and first or update_scale",
    "test_step_kernels.py": "layouts or found_inf_forbids_every_write",
    "test_moments.py": "skipped_step or not_contiguous or sgd_without_momentum",
    "test_split.py": "lie_as_they_like or others_in_one_call or operators_convert",
}


@dataclass
class Step:
    """A command, as one would type it in the checkout."""

    name: str
    command: str
    limit: float = 600.0  # seconds
    environment: dict[str, str] = field(default_factory=dict)
    always: bool = False  # whether it runs although it has passed


def test_files() -> list[str]:
    """The test files in which a test asks for a GPU, by the mark or by the fixture ``device``."""
    asks = re.compile(r"mark\.cuda\b|^def test_.*\bdevice\b|^    .*\bdevice, monkeypatch\b", re.MULTILINE)
    files = (ROOT / "tests").glob("*/test_*.py")
    return sorted(str(path.relative_to(ROOT / "tests")) for path in files if asks.search(path.read_text()))


# Without our kernels their tests are skipped, which would look like success.
LOADED = Step(
    "loaded",
    "python -c 'from ampkit import kernels; import sys; k = kernels.implementation(); print(k); "
    'k.cuda or sys.exit("the CUDA kernels are not there: make gpu PART=build")\'',
    always=True,
)

SWITCHES = {"AMPKIT_BUILD_EXT": "1", "AMPKIT_CUDA": "1"}
REQUIRED = {"AMPKIT_EXTENSION": "require"}
PARTS: dict[str, list[Step]] = {
    "build": [
        Step("build", "python setup.py --quiet build_ext --inplace", 3600.0, SWITCHES, always=True),
        LOADED,
    ],
    "tests": [
        LOADED,
        # Several processes: most of the time goes into Python.
        *(
            Step(f"tests of {file}", f"{PYTEST}{IN_PROCESSES} tests/{file}", environment=REQUIRED)
            for file in test_files()
        ),
        *(
            Step(f"recipe {name}", f"python examples/recipes/{name}.py")
            for name in ("cuda_graph", "data_parallel", "ddp_devices")
        ),
    ],
    "sanitizer": [
        LOADED,
        *(
            Step(
                f"{tool} on {file}",
                f"compute-sanitizer --tool {tool} --error-exitcode 9 {PYTEST} tests/kernels/{file} "
                f"-k {shlex.quote(f'not reference and ({names})')}",
                environment={**REQUIRED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            )
            for tool in ("memcheck", "racecheck")
            for file, names in SMALL.items()
        ),
    ],
    "bench": [
        LOADED,
        Step("bench_kernels", "python benchmarks/bench_kernels.py --device cuda"),
        Step("bench_optimizer_step", "python benchmarks/bench_optimizer_step.py --device cuda"),
        *(
            Step(f"bench of {model}", f"python benchmarks/bench.py --device cuda --only {model} --minutes 1.5")
            for model in ("gpt2", "resnet50", "bert", "lstm", "dcgan", "mlp")
        ),
        Step("quantized_sine", "python examples/quantized_sine/quantized_sine.py --out build/quantized_sine"),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="", choices=["", *PARTS])
    parser.add_argument("--results", default="")
    arguments = parser.parse_args()
    card, capability = card_here()
    parts = [arguments.part] if arguments.part else list(PARTS)
    if card is None:
        return without_a_gpu()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", capability)
    results = Results(results_file(arguments.results, card), card)
    outcomes = [run_part(part, results) for part in parts]
    print(f"make gpu: results are in {results.path}")
    return 0 if all(outcomes) else 1


def card_here() -> tuple[str | None, str]:
    """The name of the GPU and its capability, such as '9.0'; None and '' without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None, ""
    return torch.cuda.get_device_name(0), ".".join(map(str, torch.cuda.get_device_capability(0)))


def without_a_gpu() -> int:
    import torch

    cuda = f"torch {torch.__version__} was built " + ("with" if torch.version.cuda else "without") + " CUDA"
    print(f"make gpu: there is no GPU here, and {cuda}; make cuda-build compiles without one", file=sys.stderr)
    return 1


def results_file(wish: str, card: str) -> Path:
    path = Path(wish or ROOT / "benchmarks" / "results")
    if path.suffix == ".md":
        return path
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return path / f"{datetime.date.today()}-{name}.md"


class Results:
    """The file of results, with a section for each step. Steps that it says have passed are not run again."""

    def __init__(self, path: Path, card: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(f"# {datetime.date.today()}, {card}\n\n{description()}\n")

    def has_passed(self, step: Step) -> bool:
        return f"\n## {step.name}: passed" in self.path.read_text()

    def add(self, step: Step, status: int, printed: str, seconds: float) -> None:
        outcome = "passed" if status == 0 else f"failed with status {status}"
        text = end_of(printed, 200)
        with open(self.path, "a") as file:
            file.write(f"\n## {step.name}: {outcome} in {seconds:.0f} s\n\n`{step.command}`\n\n```\n{text}\n```\n")


def description() -> str:
    import torch

    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs, commit {commit}."


def end_of(printed: str, count: int) -> str:
    """The last lines, and the compilers' error messages before them, since much output may follow an error."""
    lines = printed.strip().splitlines()
    errors = [line for line in lines[:-count] if re.search(r"\berror\b", line)]
    return "\n".join([*errors[:20], *lines[-count:]])


def run_part(part: str, results: Results) -> bool:
    """Run the steps of a part that have not passed; return whether all of them have passed now."""
    passed = True
    for step in PARTS[part]:
        if not step.always and results.has_passed(step):
            print(f"make gpu: {step.name} has passed before; without {results.path.name} it runs again")
            continue
        print(f"make gpu: {step.name} ...", flush=True)
        started = time.monotonic()
        status, printed = run_step(step)
        results.add(step, status, printed, time.monotonic() - started)
        print(end_of(printed, 60 if status else 3), flush=True)
        passed = passed and status == 0
        if status and step.always:  # what follows needs it
            return False
    return passed


def run_step(step: Step) -> tuple[int, str]:
    """Run a step; return its exit status and the printed text. pytest's 'nothing was collected' is no failure."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if home := os.environ.get("CUDA_HOME"):  # the nvcc on PATH may be a link, without compute-sanitizer beside it
        folders.append(str(Path(home) / "bin"))
    environment = {**os.environ, **step.environment, "PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT)}
    # A session of its own: its children end with it, or compilers would go on and write into the next build.
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
    process = subprocess.Popen(["bash", "-c", step.command], cwd=ROOT, env=environment, **how)
    try:
        printed, _ = process.communicate(timeout=step.limit)
    except subprocess.TimeoutExpired:
        _end(process)
        printed, _ = process.communicate()
        return TIMED_OUT, f"{printed}\nended after {step.limit:.0f} s"
    except BaseException:
        _end(process)
        raise
    nothing_collected = "pytest" in step.command and process.returncode == 5
    return 0 if nothing_collected else process.returncode, printed


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
