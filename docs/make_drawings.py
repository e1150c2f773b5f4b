"""Writes the drawings of docs/how-it-works.md, each for light and for dark pages: ``python docs/make_drawings.py``.

A drawing is a column 460 units wide, so that a screen of 390 pixels shows its words at ten pixels.
``tests/docs/test_generated_pages.py`` keeps the files current.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH = 460
LINE = 17  # from one line of words to the next
COLOURS = {
    "": {
        "ink": "#1f2430",
        "soft": "#5b6270",
        "plain": "#ffffff",
        "script": "#e8f0fe",
        "cast": "#fff3d6",
        "float32": "#e4f5e6",
    },
    "-dark": {
        "ink": "#e6e8ee",
        "soft": "#a3abbb",
        "plain": "#22262f",
        "script": "#1f3050",
        "cast": "#463a17",
        "float32": "#1d3d26",
    },
}


class Drawing:
    """Boxes of words and arrows between them, in the colours of one theme."""

    def __init__(self, theme: str) -> None:
        self.colours = COLOURS[theme]
        self.parts: list[str] = []
        self.height = 0

    def words(
        self, x: float, y: float, text: str, anchor: str = "middle", colour: str = "ink", weight: str = "400"
    ) -> None:
        fill = self.colours[colour]
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{escape(text)}</text>'
        )

    def box(self, y: float, *lines: str, kind: str = "plain", x: float = 0, width: float = WIDTH) -> float:
        """Draw a box with its top at ``y``, the first line bold. Return its lower edge."""
        height = LINE * len(lines) + 13
        self.parts.append(
            f'<rect x="{x + 1:g}" y="{y:g}" width="{width - 2:g}" height="{height}" rx="6" '
            f'fill="{self.colours[kind]}" stroke="{self.colours["soft"]}"/>'
        )
        for row, text in enumerate(lines):
            if 6.9 * len(text) > width:
                raise ValueError(f"{text!r} is too long for a box of {width}")
            self.words(x + width / 2, y + 20 + LINE * row, text, weight="400" if row else "600")
        self.height = max(self.height, int(y + height) + 2)
        return y + height

    def arrow(self, *points: tuple[float, float], label: str = "", dashed: bool = False) -> None:
        """Draw a line through the points, with a head at the last; ``label`` stands right of its first piece."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colours["soft"]}" '
            f'stroke-width="1.5"{dash} marker-end="url(#head)"/>'
        )
        if label:
            (x, y), (_, below) = points[:2]
            self.words(x + 10, (y + below) / 2 + 4, label, "start", "soft")

    def down(self, y: float, label: str = "", length: float = 30, x: float = WIDTH / 2, dashed: bool = False) -> float:
        """Draw an arrow downwards from ``y``. Return where it ends."""
        self.arrow((x, y), (x, y + length - 2), label=label, dashed=dashed)
        return y + length

    def svg(self, title: str) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{self.colours["soft"]}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'font-family="system-ui, sans-serif" font-size="13" role="img">\n<title>{escape(title)}</title>\n'
            f"<defs>{head}</defs>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def call(d: Drawing) -> None:
    """A call of F.linear at O1, O2 or O5."""
    y = d.box(1, "F.linear(x, weight, bias)", "in your script, or in a module of torch", kind="script")
    y = d.down(y)
    off = y
    y = d.box(y, "wrapper: are casts on?", "torch.autocast's state, in this thread", width=290)
    d.box(off, "off", "F.linear, uncast", x=325, width=135)
    d.arrow((290, off + 23), (323, off + 23))
    y = d.down(y, "on", x=145)
    y = d.box(y, "row of the tables: lower precision", kind="cast")
    top, third = y + 30, WIDTH / 3
    below = top
    for column, lines in enumerate(
        (
            ("x", "float32 -> bfloat16", "layers that share it", "share the cast"),
            ("weight", "O1, O5: from the", "cache, or cast anew", "O2: stored so"),
            ("bias", "like the weight", "", ""),
        )
    ):
        d.arrow((third * (column + 0.5), y), (third * (column + 0.5), top - 2))
        below = d.box(top, *lines, kind="cast", x=third * column + 2, width=third - 4)
        d.arrow((third * (column + 0.5), below), (third * (column + 0.5), below + 28))
    y = d.box(below + 30, "torch's F.linear, in bfloat16", "returns bfloat16", kind="cast")
    y = d.down(y, "backward", dashed=True)
    y = d.box(y, "gradients in bfloat16", kind="cast")
    y = d.down(y, "converted at the weight")
    d.box(y, "weight.grad, float32", "O5: a large matrix's as it is, until a script reads it", kind="float32")


def step(d: Drawing) -> None:
    """An iteration at O2, from the weights around to the weights."""
    left, width = 40, WIDTH - 40
    middle = left + width / 2
    first = y = d.box(1, "weights, bfloat16", kind="cast", x=left, width=width)
    y = d.down(y, "forward: calls are cast", x=middle)
    y = d.box(y, "loss * scale", x=left, width=width)
    y = d.down(y, "backward", x=middle)
    y = d.box(y, "p.grad, bfloat16", kind="cast", x=left, width=width)
    y = d.down(y, "end of the block", x=middle)
    check = y
    y = d.box(y, "p.grad / scale", "is each gradient finite?", x=left, width=240)
    d.box(check, "no", "skip, scale / 2", x=325, width=135)
    d.arrow((left + 240, check + 23), (323, check + 23))
    y = d.down(y, "yes: the step", x=left + 120)
    y = d.box(
        y, "weight + rest = float32", "updated by the optimizer, in one pass", kind="float32", x=left, width=width
    )
    bottom = y - 23
    d.arrow((left, bottom), (14, bottom), (14, first - 15), (left - 2, first - 15))
    d.words(left + width / 2, y + 18, "left: the upper half, rounded, is the new weight", colour="soft")
    d.height += 24


def scale(d: Drawing) -> None:
    """An iteration with a loss scale on a GPU: the host queues, the device computes."""
    half, right = 150, 164
    d.words(half / 2, 14, "host", weight="600")
    d.words(right + (WIDTH - right) / 2, 14, "device", weight="600")
    y = 24.0
    rows = (
        (("scale_loss(loss)", "queues"), ("scaled = loss * scale", "the scale is a tensor")),
        (("backward()", "queues"), ("gradients",)),
        (
            ("end of the block", "queues"),
            (
                "found_inf = a gradient is not finite?",
                "scale, counters <- f(found_inf)",
                "a copy of them to the host, an event",
            ),
        ),
        (("optimizer.step()", "queues"), ("weights <- step, unless found_inf",)),
        (("scale_loss, later", "logs the skip"), ("has the event passed?", "then the host reads the copy")),
    )
    for row, (host, device) in enumerate(rows):
        lower = d.box(y, *host, kind="script", width=half)
        below = d.box(y, *device, kind="float32" if row == 3 else "cast", x=right, width=WIDTH - right)
        ends = (half, y + 15), (right - 2, y + 15)
        d.arrow(*(reversed(ends) if row == 4 else ends), dashed=row == 4)
        y = max(lower, below) + 14


DRAWINGS: dict[str, tuple[Callable[[Drawing], None], str]] = {
    "how-call": (call, "A call: a wrapper casts the arguments by a row of the tables"),
    "how-step": (step, "A step at O2: weights in bfloat16, with a rest of 16 bits beside them"),
    "how-scale": (scale, "The loss scale: the host queues, the device decides"),
}


def files() -> dict[str, str]:
    """Return the content of each file, by name."""
    made = {}
    for name, (draw, title) in DRAWINGS.items():
        for theme in COLOURS:
            drawing = Drawing(theme)
            draw(drawing)
            made[f"{name}{theme}.svg"] = drawing.svg(title)
    return made


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content)
