"""The pages: their blocks of Python run, in order, and print what the page says; their commands and links exist; the prose is read
once, in sentences of at most 25 words. The site's navigation and reference name what exists, all of it.
"""

import contextlib
import importlib.util
import io
import linecache
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

import ampkit.apex
from ampkit.insight.record import advice

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
# docs/make_*.py write these, and the changelog is a file of its own.
GENERATED = {"benchmarks.md", "changelog.md", "policy.md", "reliability.md"}
# ```language title="...", the form that both GitHub and MkDocs take.
FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def fences(page):
    """(language, title, body) of each block, in order."""
    text = page.read_text()
    found = [(match["language"], match["title"] or "", match["body"]) for match in FENCE.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), "a fence that is not understood"
    return found


def has_python(page):
    return any(language == "python" for language, _, _ in fences(page))


def ids(page):
    return str(page.relative_to(ROOT))


def assert_as_printed(printed, expected):
    """Assert the same words, and numbers within a tenth: the last digits of a loss depend on the processor."""
    assert NUMBER.sub("#", printed.strip()) == NUMBER.sub("#", expected.strip()), printed
    for mine, theirs in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        assert float(mine) == pytest.approx(float(theirs), rel=0.1), (printed, expected)


def printed_by(script, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(script, "script.py", "exec"), names)
    return out.getvalue()


def is_installed(package):
    """Whether a package is installed. Blocks titled "with PACKAGE" need theirs; blocks without a title run everywhere."""
    return not package or importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("page", [page for page in PAGES if has_python(page)], ids=ids)
def test_blocks_run_in_order_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    """Run a page's blocks as one script, whose lines ampkit quotes."""
    monkeypatch.chdir(tmp_path)  # some write checkpoints
    monkeypatch.delenv("AMPKIT_LOWER_PRECISION", raising=False)
    monkeypatch.setattr(advice, "computes_slowly_in", lambda dtype: False)  # as on the processor of the pages
    monkeypatch.setattr(torch, "compile", torch.compile)  # Lightning wraps it when it is imported
    names = {"__name__": "page"}
    printed, script = "", ""
    for language, title, body in fences(page):
        if language == "python" and not title.startswith("needs"):
            printed = None
            if is_installed(title.removeprefix("with ")):
                ahead = "\n" * len(script.splitlines())
                script += body
                linecache.cache["script.py"] = len(script), None, script.splitlines(keepends=True), "script.py"
                printed = printed_by(ahead + body, names)
        elif title.startswith("prints") and printed is not None:
            assert_as_printed(printed, body)
    linecache.cache.pop("script.py", None)
    ampkit.apex.uninstall()  # a page shows how to install it


def test_the_readme_begins_with_a_loop_and_its_two_lines():
    """Without the two lines the README's loop is plain torch, which prints what the page says of it."""
    (_, _, script), (_, _, with_them), (_, title, without) = fences(ROOT / "README.md")[:3]
    lines = [line for line in script.splitlines() if line.strip()]
    assert len(lines) <= 20 and [line for line in lines if "ampkit." in line] == [
        line for line in lines if re.search(r"# line [12]", line)
    ]
    assert "enabled=False in line 1" in title and with_them != without
    plain = script.replace("verbosity=0)  # line 1", "enabled=False)  # line 1")
    assert plain != script
    assert_as_printed(printed_by(plain, {"__name__": "page"}), without)


def test_pages_are_read_in_one_go():
    for name, most in {"README.md": 160, "CHANGELOG.md": 60}.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name
    assert (ROOT / "docs" / "limits.md").read_text().count("\n### ") <= 20


TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page):
    for language, _, body in fences(page):
        if language == "console":
            lines = body.replace("\\\n", " ").splitlines()
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=ids)
def test_commands_name_targets_and_files_that_exist(page):
    for command in commands(page):
        words = [word for word in shlex.split(command, comments=True) if "=" not in word or word.startswith("-")]
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS, command
        for word in words:
            if word.endswith(".py") and word not in ("script.py", "train.py"):
                assert (ROOT / word).exists() or (page.parent / word).exists(), command


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_a_sentence_stands_once():
    """Over all pages but the changelog, which tells the same as news; rows of tables and blocks of code may repeat."""
    seen = {}
    for page in [one for one in PAGES if one.parent.name in ("docs", ROOT.name) or one.name == "README.md"]:
        text = FENCE.sub("", page.read_text())
        prose = " ".join(line for line in text.splitlines() if not line.startswith(("|", "#", "- [")))
        for sentence in re.split(r"(?<=[.:!?])\s+", prose):
            if len(sentence.split()) > 7:
                assert seen.setdefault(sentence, page) is page, (sentence, seen[sentence], page)


# Prose

LONGEST = 25

BLOCK = re.compile(r"^```.*?^```$|<picture>.*?</picture>", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"([-*]|\d+\.)\s+")
# Lines of no prose: tables, headings, HTML, drop-ins of the site, pictures.
OTHER = ("|", "#", "<", ":::", "--8<--", "![", "[![", "    ")


def paragraphs(text):
    """The words of each paragraph and each item of a list, without code, tables and pictures."""
    words = []
    for line in [*BLOCK.sub("", text).splitlines(), ""]:
        item = ITEM.match(line.strip())
        if words and (item or not line.strip() or line.startswith(OTHER[:-1])):
            yield " ".join(words)
            words = []
        if item:
            words = [line.strip()[item.end() :]]
        elif line.strip() and (words or not line.startswith(OTHER)):
            words.append(line.strip())


def sentences(text):
    """Yield the sentences of a text. Code between backticks counts as a word, a link as its text."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", paragraph))
        yield from re.split(r"(?<=[.:!?])[)*\"]*\s+", plain)


def too_long(text):
    return [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"], ids=ids)
def test_no_sentence_has_more_than_25_words(page):
    assert too_long(page.read_text()) == []


def test_code_links_and_items_count_as_a_reader_counts_them():
    words = "word " * 24
    counted = [f"{words}end.", "- " + words + "\n- " + words, "`" + words * 2 + "`", f"| {words * 2}|"]
    counted += [f"[text]({'a/' * 40}) and more", f"```python\n{words * 2}\n```"]
    assert [too_long(text) for text in counted] == [[]] * len(counted)
    assert [len(too_long(text)) for text in (words + "an end.", words + "\n" + words)] == [1, 1]


def test_the_pages_together_can_be_read():
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    written = {name: count for name, count in words.items() if name not in GENERATED}
    assert sum(written.values()) <= 23_000, written
    assert words["architecture.md"] <= 1_800


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_code_is_no_wider_than_github_and_the_site_show(page):
    """The README's code and output, and the code of the pages: the site breaks lines of output."""
    most, kind = (90, "") if page.name == "README.md" else (100, "```python")
    blocks = [block for block in BLOCK.findall(page.read_text()) if block.startswith(kind)]
    assert [line for block in blocks for line in block.splitlines()[1:] if len(line) > most] == []


# The site


def test_each_page_is_in_the_navigation_once():
    listed = re.findall(r":\s+([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_reference_has_every_public_name():
    named = set(re.findall(r"^::: ampkit\.(?:api\.)?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    errors = {name for name in ampkit.__all__ if name.endswith("Error") or name == "RefusedOperation"}
    assert named == set(ampkit.__all__) - errors - {"optimizers", "parallel"} | {"errors"}


def test_the_frameworks_of_the_compatibility_page_are_those_that_are_tested():
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|$", (DOCS / "compatibility.md").read_text(), re.MULTILINE))
    pins = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert len(rows) == 5 and rows.items() <= pins.items()


def test_the_citation_names_this_version():
    assert f"\nversion: {ampkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture
def in_words():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    return lambda markdown: hooks.on_page_markdown(markdown, page, None, None)


def test_a_link_out_of_the_pages_becomes_its_path(in_words):
    assert in_words("see [the build](../setup.py).") == "see the build (`setup.py`)."
    assert in_words("[limits](limits.md), [x](https://example.org)") == "[limits](limits.md), [x](https://example.org)"
    with pytest.raises(FileNotFoundError, match=r"page\.md links to nothing\.py"):
        in_words("[x](../nothing.py)")


def test_a_picture_for_light_and_dark_pages_follows_the_switch_of_the_site(in_words):
    page = '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="b.svg">\n  <img src="a.svg" alt="words">\n</picture>'
    assert in_words(page) == "![words](a.svg#only-light)\n![words](b.svg#only-dark)"
