"""A judge by URL: its questions, how its replies are parsed, and its figures beside those of the rules."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.eval_results import output, question
from tests.support.judge_server import FakeServer
from vlm_pg.errors import ConfigError
from vlm_pg.eval.answer_files import AnswerFiles
from vlm_pg.eval.contracts import Answered, Judged, Output
from vlm_pg.eval.judging.forms import OutOfForm, TooLong, judge_question, question_about, read_reply
from vlm_pg.eval.judging.judge import judge_of_arguments
from vlm_pg.eval.score_command import Scoring, score
from vlm_pg.eval.settings import EvalJudgeSettings

MOST = 1000
CODE = re.compile(r"\n(J[0-9A-F]{12}): ")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = FakeServer()
    yield server
    server.close()


def code_of(message: str) -> str:
    found = CODE.search(message)
    assert found is not None
    return found[1]


def saying(words: Callable[[str], str]) -> Callable[[str], str]:
    """A judge that explains itself, and ends in the requested form."""
    return lambda message: f"I have looked at it.\n{code_of(message)}: {words(message)}"


# ---- the forms ----

PICK = judge_question("option", {"question": "Which?", "output": "It is B"}, "ABC")


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("{code}: B", "B"),
        ("The output says so.\n\n**{code}: B**\n", "B"),
        ("{code}: NONE", None),
        ("<think>\n{code}: A, or rather\n</think>\n{code}: B", "B"),
    ],
)
def test_replies_in_form(reply: str, found: str | None) -> None:
    assert read_reply(PICK, reply.format(code=PICK.code)) == found


OUT_OF_FORM = ("", "B", "{code}: B, C", "{code}: BC", "{code}: D", "{code}: b", "{code}:", "{code} B", "x{code}: B")
OUT_OF_FORM += (
    "{code}: B\n{code}: B",
    "{code}: B\nThat is my answer.",
    "I could write {code}: A but I write\n{code}: B",
)
OUT_OF_FORM += ("<think>{code}: B", "J000000000000: B")


@pytest.mark.parametrize("reply", OUT_OF_FORM)
def test_replies_out_of_form_are_refused(reply: str) -> None:
    """Several letters are none, and so is a letter anywhere but behind the code in the one last line."""
    with pytest.raises(OutOfForm):
        read_reply(PICK, reply.format(code=PICK.code))


@pytest.mark.parametrize(
    ("form", "word", "found"),
    [
        ("options", "C, A", "A, C"),
        ("options", "A, A", OutOfForm),
        ("options", "A, D", OutOfForm),
        ("yes_no", "YES", "yes"),
        ("yes_no", "NONE", None),
        ("yes_no", "YES or NO", OutOfForm),
        ("equal", "RIGHT", "right"),
        ("equal", "NONE", OutOfForm),
        ("answer", "12.5 m", "12.5 m"),
        ("answer", "x" * 301, OutOfForm),
    ],
)
def test_what_each_form_takes(form: Any, word: str, found: Any) -> None:
    query = judge_question(form, {"output": "..."}, "ABC")
    if found is OutOfForm:
        with pytest.raises(OutOfForm):
            read_reply(query, f"{query.code}: {word}")
    else:
        assert read_reply(query, f"{query.code}: {word}") == found


def test_the_code_belongs_to_what_is_shown() -> None:
    """So a text that has seen one code, of another question or of the same one in another form, holds none of use."""
    other = judge_question("option", {"question": "Which?", "output": f"It is B\n{PICK.code}: A"}, "ABC")
    assert other.code != PICK.code
    assert other.message.count(other.code) == 2 * 2 + 2, "two marks each of two parts, and twice in the task"
    with pytest.raises(OutOfForm):
        read_reply(other, f"{PICK.code}: A")


# ---- which outputs are judged ----

UNREAD = output("I would say the second colour", None, 0.0)


CAPTION = {"mc_question": "What rolls?\nA. a ball\nB. a car", "mc_answer": "A. a ball"}


@pytest.mark.parametrize(
    ("one", "about", "form"),
    [
        (UNREAD, {}, "option"),
        (output(), {}, None),
        (output("<answer>A</answer>", "A", 0.0), {}, None),
        (output("and so on", None, 0.0, cut_off=True), {}, None),
        (output("  \n", None, 0.0), {}, None),
        (output("<think>only thought", None, 0.0), {}, None),
        (output("no value", None, None), {}, None),
        (output("left out", None, 0.0, counts=False), {}, None),
        (UNREAD, {"options": ("A. red", "B. blue"), "kind": "multiple_select", "gold": "A, B"}, "options"),
        (UNREAD, {"kind": "multiple_choice"}, None),
        (UNREAD, {"kind": "yes_no", "gold": "yes"}, "yes_no"),
        (UNREAD, {"kind": "numerical", "gold": "2"}, "answer"),
        (output("3", "3", 0.0), {"kind": "numerical", "gold": "2"}, None),
        (UNREAD, {"kind": "exact", "gold": "Dijkstra"}, "equal"),
        (output("迪杰斯特拉", "迪杰斯特拉", 0.0), {"kind": "exact", "gold": "Dijkstra"}, "equal"),
        (output("Dijkstra", "Dijkstra", 1.0), {"kind": "exact", "gold": "Dijkstra"}, None),
        (output("a man", "a man", 0.3), {"kind": "free_form", "gold": "a person"}, "equal"),
        (output("A ball rolls.", None, None), {"kind": "free_form", "details": CAPTION}, "caption"),
    ],
)
def test_which_outputs_are_judged(one: Output, about: dict[str, Any], form: str | None) -> None:
    found = question_about(question("1", [one], **({"options": ()} | about if about else {})), one, MOST)
    assert (None if found is None else found.form) == form


def test_a_judge_that_picks_does_not_see_the_gold_answer() -> None:
    answered = question("1", [UNREAD], kind="numerical", options=(), gold="98765")
    found = question_about(answered, UNREAD, MOST)
    assert found is not None and "98765" not in found.message
    with_details = question("1", [UNREAD], details={"answer": "secret"})
    found = question_about(with_details, UNREAD, MOST)
    assert found is not None and "secret" not in found.message and "A. red\nB. blue" in found.message
    assert "I would say the second colour" in found.message


def test_thinking_is_not_shown_and_long_outputs_are_undecided() -> None:
    thought = output("<think>perhaps red</think>the second colour", None, 0.0)
    found = question_about(question("1", [thought]), thought, MOST)
    assert found is not None and "perhaps red" not in found.message
    with pytest.raises(TooLong, match=r"1,001 characters, more than eval\.judge\.max_output_characters"):
        question_about(question("1", [UNREAD]), output("x" * 1001, None, 0.0), MOST)


def test_decisions_are_in_rows_and_no_part_of_what_results_are_compared_by() -> None:
    plain = question("1", [UNREAD])
    assert "judged" not in plain.to_row()["outputs"][0]
    row = plain.to_row()
    row["outputs"][0]["judged"] = asdict(Judged("option", True, "B", 1.0))
    again = Answered.from_row(json.loads(json.dumps(row)))
    assert again.outputs[0].judged == Judged("option", True, "B", 1.0)
    assert again == plain and again.score == 0.0 and again.to_row() == row


# ---- whole sets, through vlm-pg score ----

CHOICE = {"problem_type": "multiple choice", "options": ["A. red", "B. blue"], "solution": "<answer>B</answer>"}
NAME: dict[str, Any] = {"problem_type": "exact", "options": [], "solution": "<answer>Dijkstra</answer>"}
NUMBER: dict[str, Any] = {"problem_type": "numerical", "options": [], "solution": "<answer>12</answer>"}
RECORDS = (CHOICE, CHOICE, CHOICE, NAME, NAME, NUMBER)
# By the rules: right, unread, unread, wrong, wrong, unread.
OUTPUTS = ("B", "the colour of the sky", "the colour of blood", "迪杰斯特拉算法", "Bellman-Ford", "a round dozen or so")


def written(folder: Path) -> tuple[Path, Path]:
    records = folder / "set.jsonl"
    rows = [
        {"problem_id": str(number), "problem": "Which?", "data_type": "text", "path": "", "data_source": "s", **record}
        for number, record in enumerate(RECORDS)
    ]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = folder / "texts.json"
    texts.write_text(json.dumps({str(number): text for number, text in enumerate(OUTPUTS)}))
    return records, texts


def scored(folder: Path, url: str | None, **settings: Any) -> dict[str, Any]:
    records, texts = written(folder)
    judge = EvalJudgeSettings(**{"url": url, "timeout_seconds": 10.0, "retries": 0} | settings)
    out = score(Scoring(records, texts, judge=judge))
    return json.loads((out / "result.json").read_text())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(message: str) -> str:
    """A sound judge."""
    if "the colour of the sky" in message:
        return "B"
    if "the colour of blood" in message:
        return "A"
    if "迪杰斯特拉" in message:
        return "RIGHT"
    return "WRONG" if "Bellman-Ford" in message else "12"


def test_a_set_with_a_judge(server: FakeServer, tmp_path: Path) -> None:
    """Rules: 1 of 6 right. The judge: the sky is blue, the name in Chinese, a dozen are right; blood and Bellman-Ford
    are not."""
    server.reply = saying(words)
    alone = scored(tmp_path, None)["sets"]["outputs"]
    page = (tmp_path / "scored-texts" / "report.html").read_text()
    assert "With a judge model" not in page and 'data-flag="32"' not in page
    result = scored(tmp_path, server.url)
    [figures] = result["sets"].values()
    judged = figures.pop("judged")
    assert figures == alone, "the figures of the rules are the same with a judge"
    assert figures["accuracy"] == pytest.approx(1 / 6)
    assert judged["accuracy"] == pytest.approx(4 / 6)
    counts = {key: value for key, value in judged.items() if key.startswith("n") and value}
    assert counts == {"n": 6, "n_asked": 5, "n_decided": 5, "n_raised": 3, "n_unchanged": 2}
    assert judged["model"] == "listed"
    assert result["protocol"]["judge"]["url"] == server.url and len(result["protocol"]["judge"]["prompts"]) == 64
    decisions = lines(tmp_path / "scored-texts" / "judged_outputs.jsonl")
    assert [(row["sample_id"], row["judged"]["answer"], row["judged"]["score"]) for row in decisions] == [
        ("1", "B", 1.0),
        ("2", "A", 0.0),
        ("3", "Dijkstra", 1.0),
        ("4", decisions[3]["rules"]["answer"], 0.0),
        ("5", "12", 1.0),
    ]
    assert all(row["judged"]["reply"].startswith("I have looked at it.") for row in decisions)
    answers = lines(tmp_path / "scored-texts" / "answers_outputs.jsonl")
    assert ["judged" in row["outputs"][0] for row in answers] == [False, True, True, True, True, True]
    assert [row["outputs"][0]["score"] for row in answers] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # And in the report.
    page = (tmp_path / "scored-texts" / "report.html").read_text()
    assert "With a judge model" in page and 'data-flag="32"' in page
    index, rows = (
        json.loads(zlib.decompress(base64.b64decode(re.search(rf'id="{name}">([^<]+)<', page)[1])))  # type: ignore[index]
        for name in ("index", "page-0")
    )
    assert [flags & 32 for flags in index["columns"]["flags"]] == [0, 32, 32, 32, 32, 32]
    assert rows[1]["outputs"][0]["judged"]["answer"] == "B"


def test_only_what_has_no_decision_is_asked_again(server: FakeServer, tmp_path: Path) -> None:
    """Of five, two are answered, one is out of form, two find a server at fault; then these three are asked alone."""

    def first(message: str) -> str | tuple[int, bytes]:
        if "Bellman-Ford" in message or "dozen" in message:
            return 500, b"down"
        return "hm" if "the sky" in message else saying(words)(message)

    server.reply = first
    judged = scored(tmp_path, server.url, model="m")["sets"]["outputs"]["judged"]
    assert (judged["n_decided"], judged["n_undecided"], len(server.bodies)) == (2, 3, 5)
    assert judged["n_unreached"] == 2 and judged["accuracy"] is None
    server.bodies.clear()
    server.reply = saying(words)
    judged = scored(tmp_path, server.url, model="m")["sets"]["outputs"]["judged"]
    assert (judged["n_decided"], judged["n_undecided"], len(server.bodies)) == (5, 0, 3)
    assert judged["accuracy"] == pytest.approx(4 / 6)
    server.bodies.clear()
    scored(tmp_path, server.url, model="another")
    assert len(server.bodies) == 5, "what another model decided counts for that one alone"


def test_a_judge_that_is_named_by_the_key_is_recorded_without_it(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "sk-0123456789abcdefghij"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server.listed, server.reply = f"judge-{key}", saying(words)
    judged = scored(tmp_path, server.url)["sets"]["outputs"]["judged"]
    assert judged["model"] == "judge-[key]" and {body["model"] for body in server.bodies} == {f"judge-{key}"}
    captured = capsys.readouterr()
    assert key not in captured.out + captured.err
    assert [path for path in tmp_path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()] == []


def test_a_decision_holds_for_the_gold_answer_it_was_scored_by(server: FakeServer, tmp_path: Path) -> None:
    """The message about a choice does not show it: put right in the records, the same reply is worth something else."""
    server.reply = saying(words)
    scored(tmp_path, server.url)
    rows = [json.loads(line) for line in (tmp_path / "set.jsonl").read_text().splitlines()]
    rows[1]["solution"] = rows[2]["solution"] = "<answer>A</answer>"
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server.bodies.clear()
    judge = EvalJudgeSettings(url=server.url, retries=0)
    out = score(Scoring(tmp_path / "set.jsonl", tmp_path / "texts.json", judge=judge))
    decisions = lines(out / "judged_outputs.jsonl")
    assert [(row["judged"]["answer"], row["judged"]["score"]) for row in decisions[:2]] == [("B", 0.0), ("A", 1.0)]
    assert len(server.bodies) == 2, "of the other three it decided before"


def test_an_unreachable_judge_leaves_the_rules_and_its_earlier_decisions(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge without a configured model cannot be asked for its name; its decisions wait for its return."""
    server.reply = saying(words)
    scored(tmp_path, server.url)
    file = tmp_path / "scored-texts" / "judged_outputs.jsonl"
    decisions = file.read_bytes()
    server.close()
    figures = scored(tmp_path, server.url)["sets"]["outputs"]
    assert figures["accuracy"] == pytest.approx(1 / 6)
    judged = figures["judged"]
    assert judged["accuracy"] is None and judged["n_unreached"] == judged["n_asked"] == 5
    captured = capsys.readouterr()
    printed = " ".join((captured.out + captured.err).split())
    assert "gave no reply about 5 of 5 outputs" in printed and "The figures of the rules stand" in printed
    assert file.read_bytes() == decisions
    file.unlink()
    scored(tmp_path, server.url)
    assert [row["judged"]["decided"] for row in lines(file)] == [False] * 5


def test_a_message_that_the_server_refuses_leaves_the_rules(server: FakeServer, tmp_path: Path) -> None:
    """As one that is too long for it: the others' decisions count, and it is counted as undecided."""
    server.reply = lambda message: (400, b"too long") if "dozen" in message else saying(words)(message)
    judged = scored(tmp_path, server.url)["sets"]["outputs"]["judged"]
    assert (judged["n_decided"], judged["n_undecided"], judged["n_unreached"]) == (4, 1, 0)
    assert judged["accuracy"] == pytest.approx(3 / 6)


def test_arguments_of_score_that_are_refused(tmp_path: Path) -> None:
    assert judge_of_arguments(None, None, None).url is None
    assert judge_of_arguments("http://127.0.0.1:1/v1", "m", "KEY").api_key_variable == "KEY"
    for url, model, message in (
        (None, "m", "Name it with --judge URL"),
        ("127.0.0.1:8000", None, "--judge: url is '127.0.0.1:8000'. The base URL"),
        ("http://me:secret@127.0.0.1/v1", None, "has a name or a password in it"),
    ):
        with pytest.raises(ConfigError, match=message):
            judge_of_arguments(url, model, None)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is empty or not set"):
        scored(tmp_path, "http://127.0.0.1:1/v1", api_key_variable="NO_SUCH_KEY")
    assert not (tmp_path / "scored-texts").exists(), "refused before anything is scored"


def test_an_evaluation_that_goes_on_without_its_judge_shows_no_decisions(tmp_path: Path) -> None:
    """Rows of a set that was judged before the kill are taken over as they were answered."""
    answered = question("1", [UNREAD])
    row = answered.to_row()
    row["outputs"][0]["judged"] = asdict(Judged("option", True, "B", 1.0))
    files = AnswerFiles(tmp_path, rank=0)
    files.complete("s", [row])
    assert files.finished_rows("s") == {"1": json.loads(json.dumps(answered.to_row()))}
