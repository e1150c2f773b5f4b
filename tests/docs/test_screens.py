"""Each page of the site in a browser, at three widths, light and dark: nothing is cut off, and no drawing has words outside of it.

Where no browser is on the PATH (Debian's chromium for one), or no mkdocs, the tests are skipped and say so. With ``SCREENS=1`` set,
``build/screens/`` gets a picture of each page, to look at.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape

import pytest
from helpers import ROOT

WIDTHS = (1400, 800, 390)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser on the PATH")

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

# A page of frames, which becomes what a script finds in each of them.
FRAMES = """<script>
const frames = SOURCES.map((src) => Object.assign(document.createElement("iframe"), {src, width: WIDTH, height: 900}));
document.documentElement.append(...frames);
addEventListener("load", () => { document.title = JSON.stringify(frames.map((one) => one.contentWindow.eval(SCRIPT))); });
</script>"""


def found_in(paths, script, folder, width=1400, dark=False):
    """Return {path: what the script finds there}, of paths where it finds something."""
    values = {"SOURCES": [path.as_uri() for path in paths], "WIDTH": width, "SCRIPT": script}
    page = re.sub("SOURCES|WIDTH|SCRIPT", lambda name: json.dumps(values[name[0]]), FRAMES)
    (folder / "frames.html").write_text(page)
    printed = browse(folder / "frames.html", folder, dark, "--dump-dom", "--allow-file-access-from-files")
    (title,) = re.findall("<title>(.*?)</title>", printed, re.DOTALL)
    return {str(path): found for path, found in zip(paths, json.loads(unescape(title)), strict=True) if found}


def take_pictures(pages, site, width, dark, profile):
    folder = ROOT / "build" / "screens"
    folder.mkdir(parents=True, exist_ok=True)
    for path in pages:
        name = str(path.relative_to(site).with_suffix("")).replace("/index", "").replace("/", "-")
        picture = folder / f"{name}-{width}-{'dark' if dark else 'light'}.png"
        browse(path, profile, dark, f"--window-size={width},2400", f"--screenshot={picture}")


def browse(path, profile, dark, *more):
    """Return what Chromium prints for a page."""
    options = (
        "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage --virtual-time-budget=60000"
    )
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [BROWSER, *options.split(), theme, f"--user-data-dir={profile}", *more, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs builds the site: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_is_cut_off(site, width, dark, tmp_path):
    pages = sorted(site.rglob("*.html"))
    if os.environ.get("SCREENS"):
        take_pictures(pages, site, width, dark, tmp_path)
    assert found_in(pages, CUT_OFF, tmp_path, width, dark) == {}


@pytest.mark.slow
def test_examples_of_docstrings_are_code(site):
    reference = (site / "api" / "index.html").read_text()
    assert '<span class="gp">&gt;&gt;&gt; </span>' in reference and "<blockquote>" not in reference


def test_words_of_a_drawing_stand_inside_of_it(tmp_path):
    assert found_in(sorted((ROOT / "docs").glob("*.svg")), OUTSIDE, tmp_path) == {}


def test_the_checks_can_fail(tmp_path):
    wide, drawing = tmp_path / "wide.html", tmp_path / "drawing.svg"
    wide.write_text('<body><div style="width: 600px">words</div></body>')
    drawing.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="20"><text x="80" y="9">words</text></svg>'
    )
    assert found_in([wide], CUT_OFF, tmp_path, 390) == {str(wide): ["words", "the page scrolls sideways"]}
    assert found_in([wide], CUT_OFF, tmp_path, 800) == {}
    assert found_in([drawing], OUTSIDE, tmp_path) == {str(drawing): ["words"]}
