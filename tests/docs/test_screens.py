"""Each page of the site in a browser, at three widths, light and dark: nothing is cut off, and no drawing has words outside of it.

Where no browser is on the PATH (Debian's chromium for one), or no mkdocs, the tests are skipped and say so. With ``SCREENS=1`` set,
``build/screens/`` gets a picture of each page, to look at.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
browser = importlib.util.module_from_spec(spec)
spec.loader.exec_module(browser)

WIDTHS = (1400, 800, 390)
PICTURES = ROOT / "build" / "screens"

# Elements beyond the page where nothing scrolls them, and at the width of a desk, code and tables that scroll.
CUT_OFF = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (element) => {
    for (let one = element.parentElement; one && one !== document.body; one = one.parentElement)
      if (getComputedStyle(one).overflowX !== "visible") return true;
    return false;
  };
  const beyond = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > width + 1 && getComputedStyle(element).visibility !== "hidden" && !scrolls(element);
  };
  const words = (element) => (element.alt || element.textContent).trim().slice(0, 60);
  const found = [...document.querySelectorAll("body *")].filter(beyond).map(words);
  if (document.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  if (width > 1220)
    for (const element of document.querySelectorAll("article pre code, article .md-typeset__scrollwrap"))
      if (element.scrollWidth > element.clientWidth + 1) found.push("scrolls: " + words(element));
  for (const image of document.images) if (!image.complete || !image.naturalWidth) found.push("not shown: " + image.src);
  return found;
})()"""

# Words of a drawing that stand outside of its frame.
OUTSIDE = """[...document.querySelectorAll("text")].filter((text) => {
  const box = text.getBoundingClientRect(), frame = document.documentElement.getBoundingClientRect();
  return box.left < frame.left - 1 || box.top < frame.top - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
}).map((text) => text.textContent)"""


@pytest.fixture(scope="module")
def page():
    path = browser.found()
    if path is None:
        pytest.skip(f"no browser on the PATH: none of {', '.join(browser.NAMES)}")
    with browser.Browser(path) as started:
        yield started


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs builds the site: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


def cut_off(page, site, width, dark):
    """Return {name of the page: what is cut off}."""
    page.show(width, dark)
    pages = {}
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site).with_suffix("")).replace("/index", "").replace("/", "-")
        page.open(path.as_uri())
        pages[name] = page.evaluate(CUT_OFF)
        if os.environ.get("SCREENS"):
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.picture(PICTURES / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    return {name: what for name, what in pages.items() if what}


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_cut_off(page, site, width, dark):
    assert cut_off(page, site, width, dark) == {}


@pytest.mark.slow
def test_examples_of_docstrings_are_code(site):
    reference = (site / "api" / "index.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span>' in reference and "<blockquote>" not in reference


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.stem)
def test_words_of_a_drawing_stand_inside_of_it(page, drawing):
    page.show(1400, dark=False)
    page.open(drawing.as_uri())
    assert page.evaluate(OUTSIDE) == []
