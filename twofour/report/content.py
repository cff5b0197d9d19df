"""What a page says, before it is HTML or markdown: sections of tables, figures, texts and gaps.

A figure always carries the table behind it: that is what markdown shows, what a screen reader reads, and
where every value names its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twofour.report.plots import Bars, Scatter

Plot = Scatter | Bars


@dataclass(frozen=True)
class Table:
    """Columns after the first are figures, unless `words` names them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    code: Sequence[str] = ()  # columns of commands
    folded: bool = False  # long: shown when asked for
    models: bool = False  # columns are models, whose names may be of any length


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    plots: Sequence[Plot]
    table: Table
    legend: Sequence[tuple[int, str]] = ()  # colour, name
    small: bool = False  # plots stand side by side, each drawn narrow


@dataclass(frozen=True)
class Missing:
    """Something that was not measured, and the command that measures it."""

    model: str
    what: str
    command: str


@dataclass(frozen=True)
class Passage:
    """Words of a model, or a record: kept as they are."""

    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Step:
    """A command that was run, and when, with what, according to which file."""

    title: str
    command: str
    about: str


Item = Table | Figure | Missing | Passage | Step | str


@dataclass
class Section:
    id: str
    title: str
    items: list[Item] = field(default_factory=list)

    @property
    def missing(self) -> list[Missing]:
        return [item for item in self.items if isinstance(item, Missing)]


@dataclass
class Page:
    title: str
    verdicts: list[tuple[str, str]]  # model, sentence
    facts: Table
    sections: list[Section]
    made: str  # when, and by which version

    @property
    def missing(self) -> list[Missing]:
        return [gap for section in self.sections for gap in section.missing]

    def to_dict(self) -> dict[str, Any]:
        return {
            "models": [name for name, _ in self.verdicts],
            "verdicts": dict(self.verdicts),
            "sections": [section.id for section in self.sections],
            "missing": [vars(gap) for gap in self.missing],
        }
