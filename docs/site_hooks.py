"""Changes of a page before MkDocs renders it (mkdocs.yml, hooks).

Pages link to files of the repository outside of docs/, which are no pages of the site: such a link becomes the path in words. A
picture for light and dark pages follows the switch of the site, where GitHub goes by the browser.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")

PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img src="([^"]+)" alt="([^"]*)">\s*</picture>')


def on_page_markdown(markdown: str, page, config, files) -> str:
    def in_words(match: re.Match) -> str:
        text, path = match.groups()
        if not (DOCS.parent / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        return f"{text}" if text.strip("`") == path else f"{text} (`{path}`)"

    markdown = PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", markdown)
    return OUTSIDE.sub(in_words, markdown)
