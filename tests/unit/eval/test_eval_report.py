"""The report of an evaluation shows what the results folders hold, stays within its size, and executes none of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.eval_results import output, picture, question, strip, write_results
from vlm_pg.errors import ConfigError
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.report.embed import Room, flags_of, marks_of, outcome_of
from vlm_pg.eval.report.page import comparison_rows, write_eval_report
from vlm_pg.eval.report.results import Mark

HOSTILE = '</script><script>alert(1)</script><img src="https://evil.example/x.png" onerror=alert(2)>\x1b[2J\u202e\u2028'
HOSTILE += "\ud800"  # half a character
RIGHT, WRONG = output(), output("<answer>A</answer>", "A", 0.0)
UNREAD = output("no idea", None, 0.0, note="no letter")
CUT_OFF = output("<think>and then", None, 0.0, cut_off=True)


class Page(HTMLParser):
    """Elements with their attributes, and what stands in elements that carry data; checks that tags are balanced."""

    VOID = frozenset(("meta", "img", "br", "input", "link", "line", "circle", "path"))

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "script" and self._open[-1][1]:
            self.data[self._open[-1][1]] = self.data.get(self._open[-1][1], "") + data

    def unpacked(self, name: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self.data[name])))

    def questions(self) -> list[dict[str, Any]]:
        """All questions, each with its columns of the index."""
        columns = self.unpacked("index")["columns"]
        pages = [
            one for name in sorted(self.data, key=_number) if name.startswith("page-") for one in self.unpacked(name)
        ]
        assert all(len(column) == len(pages) for column in columns.values())
        return [one | {key: columns[key][index] for key in columns} for index, one in enumerate(pages)]

    def pictures(self) -> list[str]:
        names = [name for name in sorted(self.data, key=_number) if name.startswith("frames-")]
        return [one for name in names for one in json.loads(self.data[name])]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2]) if "-" in name else -1


def figures(**more: Any) -> dict[str, Any]:
    return {"accuracy": 0.625, "standard_error": 0.02, "n": 8, "n_total": 9, "n_bad_media": 1, "n_unparsed": 3, **more}


def test_figures_protocol_and_answers_are_shown(tmp_path: Path) -> None:
    by_category = {"order": {"accuracy": 0.75, "n": 4, "standard_error": 0.1}, "count": {"accuracy": 0.5, "n": 4}}
    rates = {"pass_at_k": {"1": 0.25, "4": 0.875}, "majority_at_k": {"4": 0.375}}
    folder = write_results(
        tmp_path / "eval-a",
        {
            "seen": [
                (question("1", [RIGHT, WRONG, UNREAD, CUT_OFF], details={"duration": "short"}), None),
                (question("2", fault=("missing_media", "9.mp4 is not there")), None),
            ]
        },
        {"seen": figures(by_category=by_category, **rates, reader="mvbench/lmms", notes=["questions of <6> are here"])},
        {"checkpoint": "runs/a/checkpoints/step-000100", "media": {"max_frames": 64}},
    )
    path = write_eval_report(folder, "Long video")
    assert path == folder / "report.html"
    html = path.read_text("utf-8")
    for words in (
        "<h1>Long video</h1>", "62.5\u202f%", "± 2.0", "n = 8", "75.0\u202f% <small>± 10.0</small>", "87.5\u202f%",
        "37.5\u202f%", "k = 4", "media.max_frames", "<td>64</td>", "runs/a/checkpoints/step-000100",
        # the whisker of 0.75 ± 0.1
        'left:65.00%;width:20.00%', "<td>mvbench/lmms</td>", "seen: questions of &lt;6&gt; are here",
    ):  # fmt: skip
        assert words in html, words
    one, bad = Page(path).questions()
    assert bad["fault"] == ["missing_media", "9.mp4 is not there"]
    assert [output["answer"] for output in one["outputs"]] == ["B", "A", None, None]
    assert [output["score"] for output in one["outputs"]] == [1.0, 0.0, 0.0, 0.0]
    assert one["outputs"][2]["note"] == "no letter"
    assert [output["cut_off"] for output in one["outputs"]] == [False, False, False, True]
    assert one["details"] == [["duration", "short"]]
    assert one["gold_at"] == [1] and one["score"] == 0.25 and one["marks"] == "A000"


@pytest.mark.parametrize(
    ("outputs", "outcome", "flags", "marks"),
    [
        ([WRONG], 0, 0, "0"),
        ([WRONG, UNREAD], 0, 1 + 2, "00"),
        ([RIGHT, WRONG], 1, 2, "A0"),
        ([output(answer="[1, 2]", score=0.55)], 1, 0, "5"),
        ([RIGHT, RIGHT], 2, 0, "AA"),
        ([RIGHT, output(cut_off=True)], 2, 4, "AA"),
        ([output(score=None)], 3, 0, "-"),
        ([RIGHT, output("", None, 0.0, counts=False)], 2, 1 + 2, "A-"),
        ([], 3, 8, ""),
    ],
)
def test_outcome_flags_and_squares_of_a_question(outputs: list[Any], outcome: int, flags: int, marks: str) -> None:
    """Wrong 0, partly right 1, right 2, no value 3; unparsed 1 + disagreeing 2 + truncated 4 + bad media 8."""
    one = question("1", outputs, fault=None if outputs else ("missing_media", "9.mp4"))
    assert (outcome_of(one), flags_of(one), marks_of(one)) == (outcome, flags, marks)


def test_untrusted_text_is_data_and_never_markup(tmp_path: Path) -> None:
    def report(folder: Path, text: str) -> Page:
        evil = output(text, text, 1.0, note=text)
        same = dict.fromkeys(("text", "gold", "category", "cluster"), text)
        one = question(text, [evil, evil], options=[text], details={text: [text]}, **same)
        bad = question("2", fault=(text, text))
        entry = figures(by_category={text: {"accuracy": 0.5, "n": 1}})
        protocol = {"checkpoint": "step-000001", text: {text: text}}
        shown = {"frames": [text], "seconds": [text, 1.0]}
        write_results(folder, {"seen": [(one, shown), (bad, None)]}, {"seen": entry, text: entry}, protocol)
        beside = [folder.with_name(f"{folder.name}-{name}") for name in ("other", "later")]
        other = write_results(beside[0], {"seen": [(one, None)]}, {"seen": entry}, protocol)
        later = write_results(beside[1], {}, {text: figures()}, {"checkpoint": "step-000002"})
        return Page(write_eval_report(folder, text, [other], [later]))

    clean, hostile = report(tmp_path / "clean", "plain"), report(tmp_path / "evil", HOSTILE)
    html = (tmp_path / "evil" / "report.html").read_text("utf-8")
    assert not re.search("<script>alert|<img|\x1b|\u202e", html)
    assert [tag for tag, _ in hostile.elements if tag not in ("path", "circle")] == [
        tag for tag, _ in clean.elements if tag not in ("path", "circle")
    ]
    assert not any(key.startswith("on") for _, attributes in hostile.elements for key in attributes)
    runnable = [attributes for tag, attributes in hostile.elements if tag == "script" and "type" not in attributes]
    assert len(runnable) == 2  # our own, whose hashes the policy names
    # The page loads nothing, and its policy would not let it.
    loading = ("src", "href", "srcset", "data", "action", "poster")
    sources = [value for _, found in hostile.elements for key, value in found.items() if key in loading and value]
    assert sources and all(source.startswith("#") for source in sources)
    policy = next(str(found["content"]) for _, found in hostile.elements if "http-equiv" in found)
    scripts = r"script-src( 'sha256-[\w+/=]{44}'){2}"
    assert re.fullmatch(rf"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {scripts}", policy)
    first = hostile.questions()[0]
    words = json.dumps(first, ensure_ascii=False)
    assert "</script>" in first["question"][0]
    assert "\x1b" not in words and "\u202e" not in words


def test_texts_are_cut_until_all_questions_fit(tmp_path: Path) -> None:
    """Twenty outputs that hardly compress, about 2,000 characters each, and room for less than half of that."""

    def noise(seed: int) -> str:
        return "".join(hashlib.sha256(f"{seed} {part}".encode()).hexdigest() for part in range(32))[:2000]

    rows = [(question(str(seed), [output(noise(seed))]), None) for seed in range(20)]
    folder = write_results(tmp_path / "a", {"seen": rows})
    whole = Page(write_eval_report(folder))
    assert all(len(one["outputs"][0]["text"]) == 1 for one in whole.questions())
    size = len(whole.data["page-0"])
    path = write_eval_report(folder, room=Room(text=size - 1, lengths=(8000, 1000, 10)))
    cut = Page(path).questions()
    assert len(cut) == 20
    assert [one["outputs"][0]["text"] for one in cut] == [
        [noise(seed)[:500], 1000, noise(seed)[-500:]] for seed in range(20)
    ]
    assert "Of texts longer than 1,000 characters only beginning and end are shown" in path.read_text("utf-8")


def test_what_has_no_room_at_all_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [(question(str(index), [RIGHT]), None) for index in range(450)]
    folder = write_results(tmp_path / "a", {"seen": rows})
    whole = Page(write_eval_report(folder))
    assert len(whole.questions()) == 450
    first_two = len(whole.data["page-0"]) + len(whole.data["page-1"])
    for room in (Room(text=first_two, lengths=(8000,)), Room(questions=400)):
        path = write_eval_report(folder, room=room)
        ids = [one["id"] for one in Page(path).questions()]
        assert ids == [str(index) for index in range(400)]
        html = path.read_text("utf-8")
        assert "The first 400 of 450 questions can be looked at here" in html
        assert "only beginning and end" not in html


def test_strips_of_frames_are_small(tmp_path: Path) -> None:
    small = picture(1)
    folder = tmp_path / "a"
    shown = [strip(folder, "0.jpg", small), strip(folder, "1.png", picture(200, (1600, 130), "PNG"))]
    rows = [(question(str(index), [RIGHT]), of_one) for index, of_one in enumerate(shown)]
    page = Page(write_eval_report(write_results(folder, {"seen": rows})))
    pictures = [base64.b64decode(one) for one in page.pictures()]
    assert pictures[0] == small
    assert pictures[1].startswith(b"\xff\xd8\xff") and len(pictures[1]) < 8000
    assert [one["strip"] for one in page.questions()] == [{"at": [0, 0], "why": ""}, {"at": [0, 1], "why": ""}]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ("../secret.jpg", "the picture ../secret.jpg lies outside the folder a"),
        ("gone.jpg", "the picture gone.jpg is not there"),
        ("answers_seen.jsonl", "cannot identify image file"),
    ],
)
def test_a_strip_that_cannot_be_used_is_named(tmp_path: Path, frame: str, words: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(picture(1))
    rows = [(question("1", [RIGHT]), {"frames": [frame], "seconds": [0.0]})]
    page = Page(write_eval_report(write_results(tmp_path / "a", {"seen": rows})))
    (one,) = page.questions()
    assert one["strip"]["at"] is None and words in one["strip"]["why"]
    assert page.pictures() == []


def framed(folder: Path, name: str, right: bool = True) -> tuple[Answered, dict[str, Any]]:
    shown = strip(folder, f"{name}.jpg", picture(sum(name.encode())))
    return question(name, [RIGHT if right else WRONG]), shown


def test_strips_beyond_the_room_are_left_out_those_of_wrong_answers_last(tmp_path: Path) -> None:
    """Six questions, and room for four strips."""
    folder = tmp_path / "a"
    write_results(folder, {"seen": [framed(folder, str(n), right=n < 3) for n in range(6)]})
    longest = max(map(len, Page(write_eval_report(folder)).pictures()))
    path = write_eval_report(folder, room=Room(frames=4 * longest))
    html, shown = path.read_text("utf-8"), {one["id"]: one["strip"] for one in Page(path).questions()}
    assert [name for name, one in shown.items() if one["at"]] == ["0", "3", "4", "5"]
    assert shown["1"]["why"] == "left out to keep this file small"
    assert "Frames of 4 of 6 questions are shown; those of 2 are left out" in html
    # Sets share the room: of the first one's twenty strips two are shown, and the second one's.
    folder = tmp_path / "b"
    sets = {"first": [framed(folder, str(n)) for n in range(20)], "second": [framed(folder, "x")]}
    write_results(folder, sets)
    longest = max(map(len, Page(write_eval_report(folder)).pictures()))
    shown_sets = Page(write_eval_report(folder, room=Room(frames=4 * longest))).questions()
    assert sum(bool(one["strip"]["at"]) for one in shown_sets) == 3 and shown_sets[-1]["strip"]["at"]


def test_paired_difference_and_its_clustered_error() -> None:
    """d = (1, 0, -1, 1) with mean 1/4; clusters v: 1 + 0 - 2/4 = 1/2 and w: -1 + 1 - 2/4 = -1/2; sqrt(2 * 1/2) / 4."""
    ours = [Mark(1.0, "v"), Mark(0.0, "v"), Mark(0.0, "w"), Mark(1.0, "w"), Mark(None, "w")]
    theirs = [Mark(0.0, "v"), Mark(0.0, "v"), Mark(1.0, "w"), Mark(0.0, "w"), Mark(1.0, "w")]
    marks = [{"seen": {str(number): mark for number, mark in enumerate(each)}} for each in (ours, theirs)]
    assert comparison_rows(marks[0], [("other", marks[1])]) == [
        ["seen", "other", "4", "+25.0 points", "25.0", "2", "1"]
    ]
    assert comparison_rows({"seen": {"1": Mark(None, "v")}}, [("other", {"seen": {"1": Mark(1.0, "v")}})]) == []


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    ours = [(question("1", [RIGHT]), None), (question("2", [WRONG], cluster="2"), None)]
    theirs = [(question("1", [WRONG]), None), (question("3", [WRONG]), None)]
    shared = {"checkpoint": "a", "temperature": 0}
    first = write_results(tmp_path / "a" / "eval", {"seen": ours}, {"seen": figures()}, shared | {"max_tokens": 512})
    lower = {"seen": figures(accuracy=0.25)}
    other = write_results(tmp_path / "b" / "eval", {"seen": theirs}, lower, shared | {"max_tokens": 1024})
    path = write_eval_report(first, "", [other])
    html = path.read_text("utf-8")
    assert "a/eval" in html and "b/eval" in html
    assert "62.5\u202f%" in html and "25.0\u202f%" in html
    assert "+100.0 points" in html  # of the one question that both have
    assert '<tr class="differs"><td><code>max_tokens</code></td><td>512</td><td>1024</td></tr>' in html
    assert "<tr><td><code>temperature</code></td><td>0</td><td>0</td></tr>" in html
    assert [(one["id"], one["flags"] & 16, one["others"]) for one in Page(path).questions()] == [
        ("1", 16, [0.0]), ("2", 0, [None]),
    ]  # fmt: skip


def test_checkpoints_make_a_curve_in_order_of_their_steps(tmp_path: Path) -> None:
    folders = [
        write_results(tmp_path / str(step), {}, {"seen": figures(accuracy=share)}, {"checkpoint": f"r/step-{step:06d}"})
        for step, share in ((300, 0.75), (100, 0.25), (200, 0.5))
    ]
    html = write_eval_report(folders[0], "", checkpoints=folders[1:]).read_text("utf-8")
    assert '"steps":[100,200,300],"values":[0.25,0.5,0.75]' in html
    with pytest.raises(ConfigError, match="are both of step 100"):
        write_eval_report(folders[0], "", checkpoints=[folders[1], folders[1]])
    unnamed = write_results(tmp_path / "x", {}, {"seen": figures()}, {"checkpoint": "assets/tiny"})
    with pytest.raises(ConfigError, match=r"name no training step: .* is 'assets/tiny'"):
        write_eval_report(folders[0], "", checkpoints=[unnamed])


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "a", {"seen": [(question("1", [RIGHT]), None)]})
    (folder / "answers_seen.part-0.jsonl").write_text("{}\n")  # of an evaluation that goes on
    with (folder / "answers_seen.jsonl").open("a") as file:
        file.write('{"half a li\n{"sample_id": "2"}\n')
    (folder / "result.json").write_text("{")
    path = write_eval_report(folder)
    html = path.read_text("utf-8")
    assert "result.json cannot be read" in html
    assert "answers_seen.jsonl: 2 line(s) are no question with its answers and were left out." in html
    assert [one["id"] for one in Page(path).questions()] == ["1"]
    (folder / "answers_seen.jsonl").unlink()
    with pytest.raises(ConfigError, match="is no folder of results"):
        write_eval_report(folder)
    with pytest.raises(ConfigError, match=r"6 folders are given for comparison. At most 5"):
        write_eval_report(folder, "", [folder] * 6)
