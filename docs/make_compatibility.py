"""Make the table of what ran where on docs/compatibility.md, from the reports that make test leaves in build/reports.

$ make test TORCH=2.14.1
$ python docs/make_compatibility.py build/reports

A report is pytest's JUnit XML, under the name TORCH-WAY.xml. What it tells is kept in docs/what-ran.json, beside that of other
days: the last report of a version and a way counts. The table is a function of that file alone: a test compares them.
"""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT, PAGE = HERE / "what-ran.json", HERE / "compatibility.md"
WAYS = {
    "extension": "compiled kernels",
    "reference": "pure Python",
    "emulated": "CUDA kernels on the host",
    "ptx": "their PTX, interpreted",
}
BEGIN, END = "<!-- made by make_compatibility.py -->", "<!-- end -->"


def read(report: Path) -> dict:
    """The counts of a report: how many tests passed and failed, and the day."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    total, skipped, failures, errors = (int(suite.get(name)) for name in ("tests", "skipped", "failures", "errors"))
    failed = failures + errors
    return {"passed": total - skipped - failed, "failed": failed, "date": suite.get("timestamp")[:10]}


def gather(kept: dict, folder: Path) -> dict:
    """``kept``, {version of torch: {way: counts}}, with the reports in ``folder``."""
    for report in sorted(folder.glob("*-*.xml")):
        version, _, way = report.stem.rpartition("-")
        kept.setdefault(version, {})[way] = read(report)
    return kept


def table(kept: dict) -> str:
    def cell(counts):
        return "" if counts is None else f"{counts['passed']:,} passed, {counts['failed']} failed, {counts['date']}"

    rows = [["torch", *WAYS.values()], ["---"] * (len(WAYS) + 1)]
    for version in sorted(kept, key=lambda version: [int(part) for part in version.split(".")], reverse=True):
        rows.append([version, *(cell(kept[version].get(way)) for way in WAYS)])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page(text: str, kept: dict) -> str:
    """The page with its table replaced."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{table(kept)}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "reports", type=Path, nargs="?", help="a folder of reports; without one, the table is made again"
    )
    args = parser.parse_args()
    kept = json.loads(KEPT.read_text())
    if args.reports:
        kept = gather(kept, args.reports)
        KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(PAGE.read_text(), kept))
