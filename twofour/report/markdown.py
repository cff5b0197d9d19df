"""A page as markdown: the same sentences, and for every figure the table behind it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twofour.report.content import Figure, Item, Missing, Page, Passage, Step, Table

_SPECIAL = re.compile(r"([\\`*_\[\]<>|])")


def render_markdown(page: Page) -> str:
    lines = [f"# {plain(page.title)}", ""]
    for _, sentence in page.verdicts:
        lines += [f"**{plain(sentence)}**", ""]
    lines += _table(page.facts)
    for section in page.sections:
        lines += ["", f"## {plain(section.title)}", ""]
        for item in section.items:
            lines += [*_item(item), ""]
    lines += ["---", "", plain(page.made)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def plain(text: str) -> str:
    """Text that markdown shows as it is, on one line.

    >>> plain("a*b|<i>")
    'a\\\\*b\\\\|\\\\<i\\\\>'
    """
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Text as code, whatever backticks it has."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if longest else ""
    return f"{fence}{room}{' '.join(text.split())}{room}{fence}"


def _item(item: Item) -> list[str]:
    if isinstance(item, Table):
        return _table(item)
    if isinstance(item, Figure):
        return [f"### {plain(item.title)}", "", plain(item.caption), "", *_table(item.table)]
    if isinstance(item, Missing):
        return [f"**Not measured** for {plain(item.model)}: {plain(item.what)}. {code(item.command)}"]
    if isinstance(item, Passage):
        fence = "`" * (max((len(run) for run in re.findall("`+", item.text)), default=0) + 3)
        return [plain(item.title), "", fence, item.text, fence]
    if isinstance(item, Step):
        return [f"**{plain(item.title)}** {code(item.command)} ({plain(item.about)})"]
    return [plain(item)]


def _table(table: Table) -> list[str]:
    def line(cells: Sequence[str], *, head: bool = False) -> str:
        shown = [
            code(cell).replace("|", "\\|") if column in table.code and not head else plain(cell)
            for column, cell in zip(table.columns, cells, strict=True)
        ]
        return f"| {' | '.join(shown)} |"

    left = [number == 0 or column in table.words for number, column in enumerate(table.columns)]
    rule = f"|{'|'.join('---' if words else '---:' for words in left)}|"
    return [
        f"*{plain(table.title)}*",
        "",
        line(table.columns, head=True),
        rule,
        *(line(row) for row in table.rows),
    ]
