"""Make docs/reliability.md of what the last full soak found.

$ make soak MINUTES=60 JSON=docs/reliability.json
$ python docs/make_reliability.py

The page is a function of the results alone: a test asks whether it is the one that they make.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "reliability.json", HERE / "reliability.md"

INTRODUCTION = """# How reliable

A training run is days of work. Whatever happens to it, ampkit trains exactly as it should, or stops with a message that says
what to do. Each table lists the promises, the attacks on them, their number in the last full run,
and how often a promise did not hold.

`make soak` runs attacks on your machine, longer with `MINUTES=60`. It prints each violation with the command that repeats
it:

```console
$ make soak MINUTES=10
```

"""
GROUPS = {
    "nonfinite": "inf, NaN, overflow and underflow",
    "interrupts": "Exceptions, signals, too little memory",
    "death": "Death, full disks, broken checkpoints",
    "processes": "Several processes",
    "threads": "Threads, forks, workers",
    "lifetimes": "Random lifetimes",
    "hostile": "Hostile input",
}
RUNS = """## How it is measured

`make soak` attacks small training runs, drawn at random. The model is a convolutional network with batch norm, a transformer as
Llama is built, or a GAN with two optimizers. The level is O0 to O5, in bfloat16 or float16. The optimizer is one of torch's (loops,
foreach, fused), FusedAdam or FusedSGD, also with moments in 8 bits. A step has one to three blocks, with or without clipping.
Each attempt is a separate process with a time limit, so that a crash and a hang are violations too. A run is compared
bit for bit with an undisturbed one, or with plain torch in float32. The code is in
[tests/soak](../tests/soak/__init__.py). In addition, `make test-all` runs the kernels for the CPU under ThreadSanitizer, and
those for CUDA, on the host, under AddressSanitizer.

"""
NOT_PROMISED = """## What is not promised

- **A forward pass leaves its running statistics** if they are finite, even if its step is skipped or an exception follows.
  As in plain torch, batch norm has counted the batch by then.
- **A signal in the first line of a cleanup function** may leave the thread in the middle of it: nothing in Python guards that
  line. `ampkit.close()` ends the session all the same, and a checkpoint continues the run.
- **An exception while an optimizer updates** leaves some weights updated and others not. The error says so; load a checkpoint.
- **`model.load_state_dict` is torch's.** It copies what fits before it raises for what does not.
- **Bits that flip in a record of a checkpoint** are found by its checksum, which torch.load does not look at.
  `examples/imagenet/checkpoint.py` does, by `zipfile.ZipFile(path).testzip()`. Bits that flip between records have no checksum,
  and may make torch read a tensor from another place of the file: if you do not trust disks, compare a digest of the file.
- **torch does not load in a sub-interpreter** (2.11 hangs in its import), so ampkit does not either. Python without a global
  lock is untried.
"""


def page(results: dict) -> str:
    about, rows = results["about"], results["rows"]
    if broken := [row["name"] for row in rows if row["violations"]]:
        raise SystemExit(f"The soak broke {', '.join(broken)}. Mend that, and run it again.")
    attacks = sum(row["attacks"] for row in rows)
    text = INTRODUCTION + (
        f"The last full run took {about['minutes']:.0f} minutes on {about['date']}, at commit `{about['commit']}`, with "
        f"{about['processes']} attempts at a time and seed {about['seed']}. It ran torch {about['torch']} and Python "
        f"{about['python']} on an {about['processor']}. It attacked {attacks:,} times; none of the attacks broke a promise.\n\n"
    )
    for group, title in GROUPS.items():
        rows_of_group = [row for row in rows if row["group"] == group]
        text += f"## {title}\n\n"
        text += "| promise | attacked by | attacks | broken |\n|---|---|--:|--:|\n"
        for row in rows_of_group:
            text += f"| {row['promise']} | {row['attack']} | {row['attacks']:,} | {len(row['violations'])} |\n"
        text += "\n" + growth(rows_of_group)
    return text + RUNS + NOT_PROMISED


def growth(rows: list[dict]) -> str:
    """A table of what was measured, each in the attempt where it grew most."""
    measured = {name: values for row in rows for name, values in row["measured"].items()}
    if not measured:
        return ""
    text = "What grew per round of four lifetimes, in the worst attempt:\n\n"
    text += "| | growth |\n|---|--:|\n"
    for name, values in measured.items():
        text += f"| {name} | {max(values):.2f} |\n"
    return text + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
