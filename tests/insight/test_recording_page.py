"""The page of a recording: it asks for nothing from elsewhere, shows the rows, and works in a browser, where there is one."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from helpers import ROOT, initialize_quietly
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
            with ampkit.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    ampkit.close()
    path = tmp_path_factory.mktemp("page") / "record.html"
    record.to_html(path)
    return record, path


class Reader(HTMLParser):
    """Tags with their attributes, in order; tags that are open; text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert tag == "rect" or self.open.pop() == tag, (tag, self.getpos())

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
    tables = re.findall(r"<tbody>(.*?)</tbody>", path.read_text(), re.DOTALL)
    assert [table.count("<tr") for table in tables] == [len(record.calls)]


IN_THE_BROWSER = """<script>
addEventListener("load", () => {
  const cell = (row, place) => row.cells[place].dataset.value ?? row.cells[place].textContent;
  const column = (table, place) => [...document.querySelectorAll(`#${table} tbody tr`)].map((row) => cell(row, place));
  const click = (table, place) => document.querySelectorAll(`#${table} th button`)[place].click();
  const found = {errors};
  click("calls", 1); found.flops = column("calls", 1).map(Number);
  click("calls", 1); found.upward = column("calls", 1).map(Number);
  click("calls", 5); found.functions = column("calls", 5).map((text) => text.split(" ")[0]);
  const input = document.querySelector("input"); input.value = "TANH"; input.dispatchEvent(new Event("input"));
  found.shown = [...document.querySelectorAll("#calls tbody tr")].filter((row) => !row.hidden).length;
  found.wide = document.documentElement.scrollWidth > innerWidth;
  found.requests = performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !name.startsWith("data:"));
  const out = document.createElement("pre"); out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
});
</script>"""


def in_chromium(path, folder):
    """What `IN_THE_BROWSER` finds in a copy of the page, and what Chromium logs of the console."""
    html = path.read_text()
    first = "<script>const errors = []; addEventListener('error', (event) => errors.push(event.message));</script>"
    copy = folder / "copy.html"
    copy.write_text(html.replace("<head>", f"<head>{first}").replace("</body>", f"{IN_THE_BROWSER}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    command = [shutil.which("chromium"), *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(found), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_tables_sort_and_filter(page, tmp_path):
    """In Chromium; where it is not on the PATH, the parts that the script of the page uses are there."""
    record, path = page
    if shutil.which("chromium") is None:
        heads = re.findall(r"<th[^>]*><button>([^<]*)</button></th>", path.read_text())
        assert heads[:4] == ["Time", "FLOPs", "Cast", "Calls"]
        assert path.read_text().count("data-value=") >= 5 * len(record.calls)
        return
    found, console = in_chromium(path, tmp_path)
    assert console == [] and found["errors"] == [] and found["requests"] == [] and not found["wide"]
    flops = sorted(row.flops for row in record.calls)
    assert found["upward"] == flops and found["flops"] == flops[::-1]
    assert found["functions"] == sorted((row.function for row in record.calls), key=str.lower)
    assert found["shown"] == sum("tanh" in f"{row.function} {row.reason}" for row in record.calls)


FINE_TUNING = """
import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
sizes = dict(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
model = BertForSequenceClassification(BertConfig(**sizes)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for step in range(10):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=torch.randint(1000, (4, 32)), labels=torch.randint(2, (4,))).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def an_apex_script(folder):
    return ["--device", "cpu", ROOT / "tests" / "apex" / "scripts" / "gan.py", "--iterations", "9"], "conv_transpose2d"


def the_imagenet_example(folder):
    make = [sys.executable, ROOT / "examples" / "imagenet" / "make_digits.py", folder / "digits"]
    subprocess.run(make, check=True, capture_output=True)
    options = ["--b", "8", "--image-size", "32", "--augment", "none", "--opt-level", "O1", "--workers", "0"]
    return [ROOT / "examples" / "imagenet" / "main_amp.py", *options, folder / "digits"], "batch_norm"


def a_loop_of_transformers(folder):
    pytest.importorskip("transformers")  # comes with `make clients`
    (folder / "fine_tuning.py").write_text(FINE_TUNING)
    return [folder / "fine_tuning.py"], "scaled_dot_product_attention"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [an_apex_script, the_imagenet_example, a_loop_of_transformers], ids=lambda f: f.__name__
)
def test_pages_of_real_scripts_work(script, tmp_path):
    arguments, function = script(tmp_path)
    command = [sys.executable, "-m", "ampkit", "record", "--html", "record.html", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3 iterations: " in done.stdout and function in done.stdout
    Reader((tmp_path / "record.html").read_text())
    if shutil.which("chromium") is not None:
        found, console = in_chromium(tmp_path / "record.html", tmp_path)
        assert console == [] and found["errors"] == [] and found["requests"] == [] and not found["wide"]
        assert found["upward"] == sorted(found["upward"])


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
