"""The pages: links lead somewhere, and what is made from rows is what the rows say today."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub names them: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_verb_has_a_page_that_the_readme_names():
    from twofour.cli.main import app

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(verbs) > 10
    for verb in verbs:
        assert (ROOT / "docs" / f"{verb}.md").exists(), verb
        assert f"(docs/{verb}.md)" in readme, verb


def test_tables_and_the_plot_of_speed_are_those_of_the_rows():
    made = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    assert made["page"]() == (ROOT / "docs" / "speed-tables.md").read_text(encoding="utf-8")
    assert made["plot"]() == (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
