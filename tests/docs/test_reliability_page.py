"""docs/reliability.md shows the last full soak, which attacked every promise and broke none."""

import importlib.util
import json

from helpers import ROOT
from soak.__main__ import GROUPS

DOCS = ROOT / "docs"
spec = importlib.util.spec_from_file_location("make_reliability", DOCS / "make_reliability.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
RESULTS = json.loads(make.RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert make.PAGE.read_text() == make.page(RESULTS), "run docs/make_reliability.py"


def test_every_promise_was_attacked_and_none_was_broken():
    assert set(make.GROUPS) == set(GROUPS)
    promises = [promise.name for promises in GROUPS.values() for promise in promises]
    assert [row["name"] for row in RESULTS["rows"]] == promises
    for row in RESULTS["rows"]:
        assert row["attacks"] > 0 and row["violations"] == [], row["name"]
