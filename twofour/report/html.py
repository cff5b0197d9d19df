"""A page as one HTML file: style and plots inside, no script, nothing to fetch.

Everything that is text goes through jinja2's escaping; only the plots, which escape for themselves, and the
style sheet are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from twofour.report.content import Figure, Item, Missing, Page, Passage, Plot, Step, Table
from twofour.report.plots import key

TEMPLATES = Path(__file__).parent / "templates"

#: CSS pixels that plots are drawn for. The narrow one fits a phone of 390 with the page's margins.
WIDTHS = {"wide": 800, "narrow": 356}


def render_html(page: Page) -> str:
    environment = _environment()
    macros: Any = environment.get_template("items.html.j2").module
    numbers = count(1)

    def draw(plot: Plot, width: str) -> Markup:
        return Markup(plot.draw(WIDTHS[width], f"p{next(numbers)}"))

    shown: dict[type, Callable[[Any], Markup]] = {
        Table: macros.table,
        Figure: partial(macros.figure, draw=draw, key=lambda colour: Markup(key(colour))),
        Missing: macros.missing,
        Passage: macros.passage,
        Step: macros.step,
        str: macros.text,
    }

    def show(item: Item) -> Markup:
        return shown[type(item)](item)

    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    template = environment.get_template("page.html.j2")
    return template.render(page=page, style=style, table=macros.table, show=show) + "\n"


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
