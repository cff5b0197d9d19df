"""What verbs print shows names as they are: rich would take brackets in them for its markup."""

import re
import shlex
from pathlib import Path

import pytest

import twofour.cli
from twofour.cli import output

#: Ends a style that was never begun, which rich refuses; begins one; and would be shown as an emoji.
NAMES = ("[/x]", "q[bold]", "a:car:b", "back\\")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(capsys, name):
    output.say("Made ", output.bold(name), f" of {name}")
    output.note((name, "red"))
    output.table(name, (name, "b"), [(name, 1)])
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == f"Made {name} of {name}"
    assert shown.err == f"{name}\n"
    assert shown.out.count(name) == 5


def test_a_command_can_be_pasted(capsys):
    output.say("Next: ", output.shell("check", Path("my [model]")))
    line = capsys.readouterr().out.removeprefix("Next: ")
    assert shlex.split(line) == ["twofour", "check", "my [model]"]


def test_markup_is_written_in_help_only():
    """One place speaks to rich, and it takes no markup; typer's help does."""
    for file in Path(twofour.cli.__file__).parent.glob("*.py"):
        code = file.read_text(encoding="utf-8")
        assert file.name == "output.py" or not re.search(r"^\s*(from|import) rich", code, re.M), file.name
        marked = [line for line in code.splitlines() if "[/]" in line and "Example: [bold]" not in line]
        assert not marked, (file.name, marked)


def test_verbs_in_directories_with_brackets(twofour, dense, tmp_path):
    (tmp_path / "[").mkdir()
    made, packed = tmp_path / "[" / "x]", tmp_path / "p[int4]"
    ran = twofour("prune", dense, made)
    assert ran.status == 0
    assert f"by magnitude: {made}\n" in ran.out
    ran = twofour("pack", made, packed)
    assert f": {packed}\n" in ran.out
    assert f"Next: twofour check '{packed}'," in ran.out
    ran = twofour("check", packed)
    assert ran.status == 0
    assert f"\n{packed}: packed," in ran.out
