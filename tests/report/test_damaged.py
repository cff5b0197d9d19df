"""One value anywhere in a model's documents replaced by another: a page, or a sentence, never a traceback."""

import json
import random
import shutil

import pytest

from twofour.errors import InputError
from twofour.report.page import report

from .html_reader import Reader
from .models_to_report import measured_model

GONE = object()
JUNK = (
    GONE,
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "<b>&",
    [],
    {},
    [[]],
    {"p50": "x"},
)
ROUNDS = 100


def leaves(content, path=()):
    """Every place in a document, containers too."""
    if path:
        yield path
    inside = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in inside:
        yield from leaves(value, (*path, key))


def damage(content, path, value):
    for key in path[:-1]:
        content = content[key]
    if value is GONE:
        del content[path[-1]]
    else:
        content[path[-1]] = value


@pytest.mark.parametrize("seed", range(2))
def test_damaged_values(tmp_path, seed):
    chance = random.Random(seed)
    whole = measured_model(tmp_path / "model", blocks=1)
    files = sorted([*whole.glob("*.json"), *whole.glob("reports/*.json")])
    shown = 0
    for _ in range(ROUNDS):
        file = chance.choice(files)
        before = file.read_text()
        content = json.loads(before)
        # By depth first, or rows, of which there are most, would be all that is ever damaged.
        places = list(leaves(content))
        depth = chance.choice(sorted({len(path) for path in places}))
        path = chance.choice([p for p in places if len(p) == depth])
        junk = chance.choice(JUNK)
        damage(content, path, junk)
        file.write_text(json.dumps(content))
        try:
            report([whole], tmp_path / "page.html")
            page = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
            assert page.faults == []
            shown += 1
        except InputError:
            pass
        except Exception as error:
            raise AssertionError(f"{file.name}: {path} = {junk!r}") from error
        file.write_text(before)
    assert shown > ROUNDS / 2
    shutil.rmtree(whole)
