"""The drawings of docs/how-it-works.md are those of docs/make_drawings.py, and the page shows each for light and for dark."""

import importlib.util

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("make_drawings", ROOT / "docs" / "make_drawings.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_the_files_are_those_that_the_script_makes():
    for name, content in make.files().items():
        assert (ROOT / "docs" / name).read_text() == content, "run docs/make_drawings.py"


def test_the_page_shows_each_drawing_in_both_themes():
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    assert [name for name in make.files() if page.count(f'"{name}"') != 1] == []


def test_words_that_do_not_fit_into_their_box_are_an_error():
    with pytest.raises(ValueError, match="too long for a box of 100"):
        make.Drawing("").box(0, "more words than fit into it", width=100)
