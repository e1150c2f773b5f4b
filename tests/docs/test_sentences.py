"""Prose is read once: sentences of at most 25 words, a bound on all pages together, and code as wide as GitHub shows it."""

import re

import pytest
from helpers import ROOT

DOCS = ROOT / "docs"
# docs/make_*.py write these, and the changelog is a file of its own.
GENERATED = {"benchmarks.md", "changelog.md", "policy.md", "reliability.md"}
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
LONGEST = 25

FENCE = re.compile(r"^```.*?^```$|<picture>.*?</picture>", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"([-*]|\d+\.)\s+")
# Lines of no prose: tables, headings, HTML, drop-ins of the site, pictures.
OTHER = ("|", "#", "<", ":::", "--8<--", "![", "[![", "    ")


def paragraphs(text):
    """The words of each paragraph and each item of a list, without code, tables and pictures."""
    words = []
    for line in [*FENCE.sub("", text).splitlines(), ""]:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_more_than_25_words(page):
    assert too_long(page.read_text()) == []


@pytest.mark.parametrize(
    "text, count",
    [
        ("word " * 25 + "end.", 1),
        ("word " * 24 + "end.", 0),
        ("word " * 20 + "end. " + "word " * 20 + "end.", 0),
        ("word " * 20 + "\n" + "word " * 20, 1),
        ("- " + "word " * 20 + "\n- " + "word " * 20, 0),
        ("- " + "word " * 20 + "\n  " + "word " * 20, 1),
        ("`" + "word " * 40 + "`", 0),
        ("[text](" + "a/" * 40 + ") and more", 0),
        ("| " + "word " * 40 + " |", 0),
        ("```python\n" + "word " * 40 + "\n```", 0),
        ('<picture>\n  <img alt="' + "word " * 40 + '">\n</picture>', 0),
    ],
)
def test_the_count_is_that_of_a_reader(text, count):
    assert len(too_long(text)) == count


def test_the_pages_together_can_be_read():
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    written = {name: count for name, count in words.items() if name not in GENERATED}
    assert sum(written.values()) <= 23_000, written
    assert words["architecture.md"] <= 1_800


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_code_is_no_wider_than_github_and_the_site_show(page):
    """The README's code and output, and the code of the pages: the site breaks lines of output."""
    most, kind = (90, "") if page.name == "README.md" else (100, "```python")
    blocks = [block for block in FENCE.findall(page.read_text()) if block.startswith(kind)]
    assert [line for block in blocks for line in block.splitlines()[1:] if len(line) > most] == []
