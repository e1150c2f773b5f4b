"""The tables of docs/convergence.md are those of the results, and a cell is what one computes on paper."""

import importlib.util
import json

from helpers import ROOT

spec = importlib.util.spec_from_file_location("make_convergence", ROOT / "docs" / "make_convergence.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_the_page_shows_the_results():
    text = make.PAGE.read_text()
    assert make.page(text) == text, "run docs/make_convergence.py"


def test_distances_are_taken_at_the_same_seed(tmp_path, monkeypatch):
    runs = [("float32", 0, 1.0), ("O5", 1, 2.5), ("float32", 1, 2.0), ("O5", 0, 1.25)]
    lines = [json.dumps({"run": ["learn", name, seed, 800], "result": {"value": value}}) for name, seed, value in runs]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, lines[0].replace("learn", "go on")]))
    monkeypatch.setattr(make, "RESULTS", tmp_path)
    column = make.Column("loss", "results.jsonl", "learn", 3)
    found = make.values(column)
    assert make.cell(column, "float32", found) == "1.500 ± 0.707"
    assert make.cell(column, "O5", found) == "+0.375 ± 0.177"
    assert make.cell(column, "O1", found) == ""
