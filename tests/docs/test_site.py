"""The site: what its navigation and its reference name exists, all of it, and links out of docs/ become words."""

import importlib.util
import re
from types import SimpleNamespace

import pytest
from helpers import ROOT

import ampkit

DOCS = ROOT / "docs"


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
