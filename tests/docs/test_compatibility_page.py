"""The table of what ran where is made of reports of pytest, and the page shows what is kept of them."""

import importlib.util
import json

from helpers import ROOT

spec = importlib.util.spec_from_file_location("make_compatibility", ROOT / "docs" / "make_compatibility.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

REPORT = (
    '<testsuites><testsuite name="pytest" tests="{}" failures="{}" errors="{}" skipped="{}" '
    'timestamp="2026-01-{}T10:00:00"/></testsuites>'
)


def test_the_page_shows_what_is_kept():
    text = make.PAGE.read_text()
    assert make.page(text, json.loads(make.KEPT.read_text())) == text, "run docs/make_compatibility.py"


def test_the_last_report_of_a_version_and_a_way_counts(tmp_path):
    kept = {"2.9.0": {"extension": {"passed": 1, "failed": 0, "date": "2025-01-01"}}}
    for day, counts in (("01", (9, 9, 0, 0)), ("02", (1234, 2, 1, 30))):
        (tmp_path / "2.10.1-extension.xml").write_text(REPORT.format(*counts, day))
        kept = make.gather(kept, tmp_path)
    assert kept["2.10.1"] == {"extension": {"passed": 1201, "failed": 3, "date": "2026-01-02"}}
    newest, oldest = make.table(kept).splitlines()[2:]  # by number, not as text
    assert newest.startswith("| 2.10.1 | 1,201 passed, 3 failed, 2026-01-02 |  |")
    assert oldest.startswith("| 2.9.0 | 1 passed, 0 failed, 2025-01-01 |")
