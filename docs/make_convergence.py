"""Make the tables of docs/convergence.md from the results of benchmarks/convergence in benchmarks/results.

$ python docs/make_convergence.py

The tables are a function of the results: a test compares them. The first row has float32's values, the others distances from it
at the same seed: mean and standard deviation over the seeds.
"""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE.parent / "benchmarks" / "results", HERE / "convergence.md"
BEGIN, END = "<!-- {}, made by make_convergence.py -->", "<!-- end of {} -->"


class Column(NamedTuple):
    title: str
    file: str
    stage: str
    digits: int


def results(task: str) -> str:
    return f"2026-11-29-convergence-{task}.jsonl"


TABLES = {
    "text": [
        Column("King James Bible, loss", results("bible"), "learn", 4),
        Column("then another translation, loss", results("bible"), "go on", 5),
        Column("verses found, %", results("verses"), "fine-tune", 2),
    ],
    "images and signals": [
        Column("MNIST, %", results("mnist"), "CNN", 2),
        *(Column(f"MNIST-1D, {model}, %", results("mnist1d"), model, 2) for model in ("logistic", "MLP", "CNN", "GRU")),
    ],
}
ROWS = {
    "float32": "float32",
    "torch.autocast": "torch.autocast",
    "O1": "O1",
    "O2": "O2",
    "O5": "O5",
    "O5, int8 moments": "O5, moments in 8 bits",
    "ampkit.optimizers.AdamW, int8 moments": "bfloat16 model, ampkit's AdamW, moments in 8 bits",
    "torch.optim.AdamW in bfloat16": "bfloat16 model, torch's AdamW",
}


def values(column: Column) -> dict[str, dict[int, float]]:
    """{precision: {seed: value}} of a column, of the seeds that every precision was trained from."""
    by_precision: dict[str, dict[int, float]] = {}
    file = RESULTS / column.file
    for line in file.read_text().splitlines() if file.exists() else []:
        run = json.loads(line)
        stage, precision, seed, _ = run["run"]
        if stage == column.stage:
            by_precision.setdefault(precision, {})[seed] = run["result"]["value"]
    everywhere = set.intersection(*map(set, by_precision.values())) if by_precision else set()
    return {name: {seed: of[seed] for seed in sorted(everywhere)} for name, of in by_precision.items()}


def cell(column: Column, precision: str, found: dict[str, dict[int, float]]) -> str:
    if precision not in found:
        return ""
    seeds, first = found[precision], found["float32"]
    shown = list(seeds.values()) if precision == "float32" else [value - first[seed] for seed, value in seeds.items()]
    sign = "" if precision == "float32" else "+"
    mean, deviation = statistics.mean(shown), statistics.stdev(shown)
    return f"{mean:{sign}z.{column.digits}f} ± {deviation:.{column.digits}f}"


def table(columns: list[Column]) -> str:
    by_column = [values(column) for column in columns]
    titles = [f"{column.title}; {len(its.get('float32', ()))} seeds" for column, its in zip(columns, by_column)]
    rows = [["", *titles], ["---"] * (1 + len(columns))]
    for precision, name in ROWS.items():
        cells = [cell(column, precision, its) for column, its in zip(columns, by_column, strict=True)]
        if any(cells):
            rows.append([name, *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page(text: str) -> str:
    for name, columns in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        text = f"{text.split(begin)[0]}{begin}\n\n{table(columns)}\n{end}{text.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
