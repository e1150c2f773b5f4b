"""Examples in docstrings (``>>> ...``) as code of the reference (mkdocs.yml, mkdocstrings); Markdown takes them for quotations."""

import re
from typing import Any

import griffe

# From a line that begins so to the next blank line.
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
