"""The page in a real browser: it renders, fits a phone, prints, and can be read and reached by everyone."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from twofour.report.page import report

from .browser import CHROMIUM, Browser
from .models_to_report import layer_names, products, recorded_model, score, whole_model, write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

PROBES = Path(__file__).with_name("probes.js").read_text()


def ask(browser, question):
    return browser.run(f"{PROBES}.{question}")


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two models, one known in every respect, one in few, with long names."""
    base = tmp_path_factory.mktemp("page")
    known = whole_model(base / "Llama-3-8B-Instruct-24-packed")
    other = recorded_model(
        base / "another-model-with-a-name-that-does-not-end-soon-and-has-no-spaces", layer_names()
    )
    write(other / "reports" / "eval.json", score(other.name, 14.0, data="a-text-with-a-long-name" * 3))
    write(other / "reports" / "bench.json", products())
    report([known, other], base / "page.html")
    return base / "page.html"


def test_renders_without_complaints(browser, page):
    browser.open(page)
    assert browser.complaints == []
    assert ask(browser, "plots().length") >= 25
    assert browser.run("document.querySelectorAll('h2').length") == 12
    # Were the style sheet refused, all of the above would still hold.
    assert browser.run("getComputedStyle(document.querySelector('.bar')).fill") == "rgb(118, 125, 133)"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_needs_scrolling_sideways(browser, page, width):
    browser.open(page, width=width)
    for opened in ("false", "true"):
        browser.run(f"document.querySelectorAll('details').forEach(d => d.open = {opened})")
        assert browser.run("innerWidth") == width
        assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [390, 1000])
def test_plots_can_be_read(browser, page, width):
    browser.open(page, width=width)
    assert ask(browser, "cutOff()") == []
    assert ask(browser, "smallestText()") >= 10.0
    assert browser.run("parseFloat(getComputedStyle(document.body).fontSize)") >= 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_contrast(browser, page, scheme, media):
    browser.open(page, scheme=scheme, media=media)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(22, 24, 27)") == (scheme == "dark" and media == "screen")
    found = ask(browser, "contrasts()")
    assert len(found["texts"]) > 300
    assert found["texts"][0][0] >= 4.5, found["texts"][:3]
    assert found["marks"][0][0] >= 3.0, found["marks"][:3]


def test_everything_is_reached_by_keyboard(browser, page):
    browser.open(page)
    reached = []
    for _ in range(120):
        browser.press("Tab")
        reached.append(
            browser.run(
                "(e => `${e.tagName.toLowerCase()}.${e.getAttribute('class')}`)(document.activeElement)"
            )
        )
    assert reached[0] == "a.skip"
    assert {"a.null", "svg.null", "summary.null", "div.scroll"} <= set(reached)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert browser.run(outline) == "solid"  # one sees where one is
    browser.run("document.querySelector('summary').focus()")
    browser(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        text="\r",
        windowsVirtualKeyCode=13,
    )
    assert browser.run("document.querySelector('details').open") is True


def test_names_for_those_who_do_not_see(browser, page):
    browser.open(page)
    tree = browser("Accessibility.getFullAXTree")["nodes"]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    pictures = [name for role, name in roles if role in ("image", "img", "graphics-document")]
    assert len(pictures) >= 25
    assert all(pictures)
    assert any(role == "main" for role, _ in roles)
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_prints(browser, page):
    browser.open(page)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 3 <= pages <= 30
    browser.open(page, width=700, media="print")  # about what a sheet of A4 is wide
    assert browser.run("document.documentElement.scrollWidth") <= 700
    assert ask(browser, "cutOff()") == []
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
