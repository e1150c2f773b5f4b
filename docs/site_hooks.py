"""What MkDocs does to a page before it is rendered (mkdocs.yml, hooks).

Pages link to files of the repository outside of docs/, which are no pages of the site: such a link becomes the path in words.
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    def in_words(match: re.Match) -> str:
        text, path = match.groups()
        if not (DOCS.parent / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {path}, which does not exist")
        return f"{text}" if text.strip("`") == path else f"{text} (`{path}`)"

    return OUTSIDE.sub(in_words, markdown)
