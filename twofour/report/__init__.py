"""One self-contained page about one or several models: the verdict first, then all that was measured.

    documents.py   the JSON that verbs leave, recognised by its verb
    subject.py     one model: its directory and the documents about it
    verdict.py     the sentence
    speed.py, accuracy.py, making.py   the sections, as tables, figures and gaps (content.py)
    plots.py, scales.py                SVG
    html.py, markdown.py               the page
    page.py        all of it together

The room and its verb have the same name, so the module itself can be called: `twofour.report([…])`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        from twofour.report.page import report

        return report(*arguments, **named)


sys.modules[__name__].__class__ = _Verb
