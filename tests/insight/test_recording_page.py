"""The page of a recording: it loads nothing from elsewhere, and shows the source with the rows of each line."""

import re
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from helpers import ROOT, backward, initialize_quietly, python
from torch import nn

import ampkit


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 30)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x) + self.bias))  # 1 < 2 & 3


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch.manual_seed(0)
    model, optimizer = initialize_quietly(
        Net(), lambda params: torch.optim.Adam(params, 1e-3), "O1", patch_torch_functions_type=torch.bfloat16
    )
    with ampkit.recording() as record:
        for _ in range(3):
            loss = model(torch.randn(8, 16)).float().square().mean()
            backward(loss, optimizer)
            optimizer.step()
    ampkit.close()
    path = tmp_path_factory.mktemp("page") / "record.html"
    record.to_html(path)
    return record, path


class Reader(HTMLParser):
    """A parser of tags with their attributes, in order; tags that are open; text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.text.append(data)


def test_it_is_whole_and_asks_for_nothing_from_elsewhere(page):
    html = page[1].read_text()
    reader = Reader(html)
    assert reader.open == []
    for tag, attributes in reader.tags:
        for name in ("src", "href", "srcset", "data", "action"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\s*\(", html)
    assert "prefers-color-scheme: dark" in html
    assert str(ROOT) not in html  # a page is shown to others: it names files, and no folder of this machine


def test_it_shows_the_rows_and_the_source(page):
    record, path = page
    text = re.sub(r"\s+", " ", " ".join(Reader(path.read_text()).text))
    assert "return self.head(torch.tanh(self.body(x) + self.bias)) # 1 < 2 & 3" in text
    assert "float32: promoted by parameter 'bias'" in text
    assert "N = 30 is no multiple of 8" in text and "pad it to 32" in text
    assert path.read_text().count("<li><b>") == sum(row.line > 0 for row in record.calls)
    assert text.count("⋮") == 1  # the model's line, and the lines of the loop


def an_apex_script(folder):
    return ["--device", "cpu", ROOT / "tests" / "apex" / "scripts" / "classify.py", "--opt-level", "O1"], "conv2d"


def the_imagenet_example(folder):
    python(ROOT / "examples" / "imagenet" / "make_digits.py", folder / "digits")
    options = ["--b", "8", "--image-size", "32", "--augment", "none", "--opt-level", "O1", "--workers", "0"]
    return [ROOT / "examples" / "imagenet" / "main_amp.py", *options, folder / "digits"], "batch_norm"


@pytest.mark.slow
@pytest.mark.parametrize("script", [an_apex_script, the_imagenet_example], ids=lambda f: f.__name__)
def test_pages_of_real_scripts_work(script, tmp_path):
    arguments, function = script(tmp_path)
    done = python("-m", "ampkit", "record", "--html", "record.html", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 iterations: " in done.stdout and function in done.stdout
    assert Reader((tmp_path / "record.html").read_text()).open == []


def test_without_jinja2_it_says_what_to_install(page, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="pip install jinja2"):
        page[0].to_html(tmp_path / "page.html")


def test_the_example_of_the_docs_is_of_its_script():
    lines = (ROOT / "docs" / "recording_example.py").read_text().splitlines()
    html = (ROOT / "docs" / "recording-example.html").read_text()
    shown = re.findall(r'<td class="at code">(\d+)</td>.*?<pre>(.*?)</pre>', html, re.DOTALL)
    assert len(shown) > 20
    for number, text in shown:
        assert lines[int(number) - 1] == unescape(text)
