"""The browser of questions in a real one: what is shown follows filters and keys, and hostile text does nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.browser import Browser, browser, needs_browser
from tests.support.eval_results import output, picture, question, strip, write_results
from vlm_pg.eval.report.page import write_eval_report

pytestmark = needs_browser

RIGHT, WRONG = (
    output("I see it. <answer>B</answer>"),
    output("<answer>A</answer>", "A", 0.0, note="not the gold letter"),
)
UNREAD = output("no idea", None, 0.0, note="no letter")
CUT_OFF = output("<think>and then", None, 0.0, cut_off=True)
# What would be seen if any of it ran or were markup: a mark on the window, a request, an element.
HOSTILE = (
    '</script><script>window.ran = 1</script><img src="https://evil.example/x.png" onerror="window.ran = 2">'
    "<b id=evil>\u202egnp.exe\x1b[2J <answer><i id=evil2>B</i></answer>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets: five questions of "order" and "count", and two of "count"."""
    folder = tmp_path_factory.mktemp("small")
    shown = strip(folder / "run", "1.jpg", picture(10))
    first = [
        (question("right", [RIGHT, RIGHT], text="Which comes first?"), shown),
        (question("wrong", [WRONG, WRONG]), None),
        (question("partly", [RIGHT, WRONG], category="count", details={"duration": "short"}), None),
        (question("unread", [UNREAD, CUT_OFF], category="count"), None),
        (question("bad", fault=("missing_media", "9.mp4 is not there")), None),
    ]
    second = [
        (question("x", [RIGHT], category="count", text="How many zebras?"), None),
        (question("y", [output("", None, None, counts=False)], category="count"), None),
    ]
    categories = {"by_category": {"count": {"accuracy": 0.5, "n": 2}, "order": {"accuracy": 0.5, "n": 2}}}
    figures = {name: {"accuracy": 0.5, "n": 4, **categories} for name in ("first", "second")}
    other = write_results(folder / "base", {"first": [(question("right", [WRONG]), None)]})
    return write_eval_report(write_results(folder / "run", {"first": first, "second": second}, figures), "", [other])


def ids(page: Browser) -> list[str]:
    """Ids of the questions in the list, by walking through it with the keyboard from its beginning."""
    page.read("document.querySelector('#list').focus()")
    page.press("Home")
    found = []
    for _ in range(page.read("document.querySelectorAll('.row').length")):
        found.append(selected(page))
        page.press("ArrowDown")
    return found


def selected(page: Browser) -> str:
    """Id of the question that is shown, when it is the one that is selected in the list."""
    page.wait(
        "(() => { const row = document.querySelector('.row[aria-selected=true]');"
        " const head = document.querySelector('.detail .head small');"
        " return row && head && head.textContent.startsWith(row.getAttribute('aria-posinset') + ' of'); })()"
    )
    return str(page.read("document.querySelector('.detail .head code').textContent"))


def text(page: Browser, selector: str) -> str:
    return str(page.read(f"document.querySelector({json.dumps(selector)}).textContent"))


def texts(page: Browser, selector: str) -> list[str]:
    return list(page.read(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"))


def choose(page: Browser, selector: str, option: str) -> None:
    page.read(
        f"(() => {{ const field = document.querySelector('{selector}');"
        f" field.value = [...field.options].find((one) => one.text === '{option}').value;"
        " field.dispatchEvent(new Event('change')); })()"
    )


def test_filters_leave_the_questions_they_name(page: Browser, small: Path) -> None:
    """Outcomes (wrong 0, partly right 1, right 2, no value 3) are joined, flags must all be met."""
    page.open(small)
    assert ids(page) == ["right", "wrong", "partly", "unread", "bad", "x", "y"]
    for buttons, left in (
        (["outcome='0'"], ["wrong", "unread"]),
        (["outcome='2'"], ["right", "x"]),
        (["outcome='3'"], ["bad", "y"]),
        (["outcome='0'", "outcome='1'"], ["wrong", "partly", "unread"]),
        (["flag='1'"], ["unread", "y"]),
        (["flag='2'"], ["partly"]),
        (["flag='8'"], ["bad"]),
        (["flag='16'"], ["right"]),
        (["flag='1'", "flag='4'"], ["unread"]),
        (["outcome='1'", "flag='4'"], []),
    ):
        for button in buttons:
            page.click(f"[data-{button}]")
            assert page.read(f"document.querySelector(\"[data-{button}]\").getAttribute('aria-pressed')") == "true"
        assert text(page, "#found") == f"{len(left)} of 7 questions", buttons
        assert ids(page) == left, buttons
        page.click("#clear")
        assert text(page, "#found") == "7 of 7 questions"


def test_sets_and_categories_leave_theirs_and_count_anew(page: Browser, small: Path) -> None:
    page.open(small)
    assert texts(page, "#category option") == ["All categories", "order", "count"]
    choose(page, "#set", "second")
    assert ids(page) == ["x", "y"]
    assert texts(page, "#category option") == ["All categories", "count"]
    assert text(page, "[data-outcome='0'] b") == "0" and text(page, "[data-outcome='2'] b") == "1"
    choose(page, "#set", "All sets")
    choose(page, "#category", "count")
    assert ids(page) == ["partly", "unread", "x", "y"]
    # A category among the figures leads to its questions.
    page.read("document.querySelector('a[data-set=first][data-category=order]').click()")
    assert ids(page) == ["right", "wrong", "bad"]


def test_search_looks_at_questions_outputs_and_notes(page: Browser, small: Path) -> None:
    page.open(small)
    for words, left in (
        ("ZEBRA", ["x"]),
        ("i see it", ["right", "partly", "x"]),
        ("no letter", ["unread"]),
        ("which colour", ["wrong", "partly", "unread", "bad", "y"]),
        ("short", ["partly"]),
    ):
        page.read("document.querySelector('#search').value = ''")
        page.click("#search")
        page.write(words)
        page.wait(f"document.querySelector('#found').textContent === '{len(left)} of 7 questions'")
        assert ids(page) == left
    page.press("Escape")
    assert page.read("document.activeElement.id") == "list"
    page.press("/")
    assert page.read("document.activeElement.id") == "search"
    page.write("nowhere")
    page.wait("document.querySelector('.detail .empty') !== null")
    assert text(page, ".detail .empty") == "No question holds these words."


def test_a_question_shows_its_frames_outputs_and_how_they_were_read(page: Browser, small: Path) -> None:
    page.open(small)
    assert selected(page) == "right"
    page.wait("[...document.querySelectorAll('.frames img')].every((image) => image.naturalWidth === 64)")
    assert page.read("document.querySelectorAll('.frames img').length") == 1
    assert texts(page, ".options .gold") == ["B. blue"]
    assert texts(page, ".response pre") == ["I see it. <answer>B</answer>"] * 2
    assert texts(page, ".response .answer") == ["B", "B"]
    assert "score100 % over 2 outputs" in texts(page, ".facts div")
    assert "score in base0 %" in texts(page, ".facts div")
    page.press("j")
    page.press("j")
    page.press("j")
    assert selected(page) == "unread"
    assert texts(page, ".response:nth-child(1) .chip") == ["#1", "no answer read", "score 0", "12 tok", "no letter"]
    assert texts(page, ".response:nth-child(2) .chip") == ["#2", "no answer read", "score 0", "truncated", "12 tok"]
    page.press("k")
    page.press("k")
    assert selected(page) == "wrong"
    assert texts(page, ".response:nth-child(1) .chip")[1:3] == ["read A", "score 0"]
    page.read("document.querySelector('#list').focus()")
    page.press("End")
    assert "not counted" in texts(page, ".response .chip")
    page.press("ArrowUp")
    page.press("ArrowUp")
    assert selected(page) == "bad"
    assert text(page, ".detail .absent") == "This question could not be asked (missing_media): 9.mp4 is not there"


def test_of_many_questions_only_those_in_view_are_drawn(page: Browser, tmp_path: Path) -> None:
    """450 questions lie on three pages of data; the last is reached with one key and found by search."""
    rows = [(question(f"q{index}", [output(f"thought {index} <answer>B</answer>")]), None) for index in range(450)]
    page.open(write_eval_report(write_results(tmp_path / "run", {"seen": rows})))
    assert text(page, "#found") == "450 of 450 questions"
    assert 0 < page.read("document.querySelectorAll('.row').length") < 40
    page.read("document.querySelector('#list').focus()")
    page.press("End")
    page.wait("document.querySelector('.detail .head code').textContent === 'q449'")
    assert texts(page, ".response pre") == ["thought 449 <answer>B</answer>"]
    assert page.read("document.querySelectorAll('.row').length") < 40
    page.click("#search")
    page.write("thought 301")
    page.wait("document.querySelector('#found').textContent === '1 of 450 questions'")
    assert ids(page) == ["q301"]


def test_hostile_text_is_shown_and_does_nothing(page: Browser, tmp_path: Path) -> None:
    evil = output(HOSTILE, HOSTILE, 1.0, note=HOSTILE)
    evil_question = question(
        HOSTILE, [evil, WRONG], text=HOSTILE, options=[HOSTILE], gold=HOSTILE, category=HOSTILE, cluster=HOSTILE,
        details={HOSTILE: HOSTILE},
    )  # fmt: skip
    bad = question("bad", fault=(HOSTILE, HOSTILE), category=HOSTILE)
    shown = strip(tmp_path / "run", "1.jpg", b"\xff\xd8\xff" + HOSTILE.encode())
    entry = {"accuracy": 0.5, "n": 1, "by_category": {HOSTILE: {"accuracy": 0.5, "n": 1}}}
    folder = write_results(
        tmp_path / "run",
        {"seen": [(evil_question, shown), (bad, None)]},
        {"seen": entry, HOSTILE: entry},
        {HOSTILE: HOSTILE},
    )
    path = write_eval_report(folder, HOSTILE)
    page.open(path)
    page.wait("document.querySelectorAll('.response').length === 2")
    # Every word of it is there, with control characters as signs.
    seen = HOSTILE.replace("\u202e", "\ufffd").replace("\x1b", "\u241b")
    assert texts(page, ".response pre")[0] == seen
    assert texts(page, ".options li") == [seen]
    page.press("j")
    page.wait("document.querySelector('.detail .absent') !== null")
    assert seen in text(page, ".detail .absent")
    page.press("k")
    page.click("#search")
    page.write("gnp.exe")
    page.wait("document.querySelector('#found').textContent === '2 of 2 questions'")
    assert page.read("typeof window.ran") == "undefined"
    assert page.read("document.querySelectorAll('#evil, #evil2, [onerror], img[src^=http]').length") == 0
    outside = [address for address in page.requests if address != path.resolve().as_uri() and address[:5] != "data:"]
    assert outside == []
    assert page.complaints == []


def test_the_policy_stops_what_text_alone_could_not(page: Browser, small: Path) -> None:
    """Even a script or picture that were put into the page by a mistake of ours would neither run nor be asked for."""
    page.open(small)
    page.read(
        "(() => { const script = document.createElement('script'); script.textContent = 'window.ran = 3';"
        " const image = new Image(); image.src = 'https://evil.example/x.png';"
        " document.body.append(script, image); })()"
    )
    page.wait("document.images[document.images.length - 1].complete")
    assert page.read("typeof window.ran") == "undefined"
    assert "https://evil.example/x.png" not in page.requests


def test_labels_of_the_axis_do_not_overlap_on_a_phone(page: Browser, small: Path, tmp_path: Path) -> None:
    """And nothing reaches beyond the window."""
    width = 360
    page.open(small)
    page.picture(tmp_path / "page.png", width)
    try:
        edges = page.read(
            "[...document.querySelector('.axis-labels').children].map(label => label.getBoundingClientRect())"
            ".map(box => [box.left, box.right])"
        )
        assert [round(left - right, 1) for (_, right), (left, _) in pairwise(edges) if left < right + 4] == []
        assert page.read("document.documentElement.scrollWidth") == width
    finally:
        page.picture(tmp_path / "page.png")
