"""Any prepared set: without a protocol, by a protocol of one's own, with a reader and an aggregation of one's own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.support.processes import ROOT
from tests.support.published.case import Published, media
from tests.support.scored_sets import MODEL, Prepared, Scored, config_of, prepare, prompts, score
from vlm_pg.cli import main

MAP = """\
name: rooms
files: {eval: [rows.csv]}
fields:
  problem_id: n
  problem: question
  data_type: {constant: image}
  problem_type: {field: kind, names: {mc: multiple choice, number: numerical}}
  options: {columns: [a0, a1, a2]}
  answer: {field: gold, given_as: text}
  path: picture
  category: room
"""
ROWS = """\
n,question,kind,a0,a1,a2,gold,picture,room
1,What is it?,mc,a cup,a plate,a fork,a plate,1.png,kitchen
2,What lies there?,mc,a cup,a plate,a fork,a fork,2.png,kitchen
3,Where is it?,mc,here,there,nowhere,here,3.png,hall
4,Where is that?,mc,here,there,nowhere,there,4.png,hall
5,Where?,mc,here,there,nowhere,there,gone.png,hall
"""
CASE = Published(
    {"map.yaml": MAP, "rows.csv": ROWS, **media(*(f"{number}.png" for number in range(1, 5)))},
    arguments=("--map", "{}/map.yaml", "{}"),
    refused=[("rows.csv:6", "5", "missing_media")],
)
OUTPUTS = {
    "1": "The answer is (B).\nplate",
    "2": "It may be a cup. No: a fork.\nfork",
    "3": "B\nthere",
    "4": "I do not know.\n",
}
CODE = """
from vlm_pg.eval.contracts import Reading
from vlm_pg.eval.measures import figure_of
from vlm_pg.eval.tables import Table, grouped_by

class LastLine:
    "The last line is a word of the right option, and of no other."
    def __call__(self, sample, output, truncated):
        word = output.split("\\n")[-1].strip()
        if word == "broken":
            raise ValueError("a broken line")
        letters = [option[0] for option in sample.options if word and option.endswith(word)]
        letter = letters[0] if len(letters) == 1 else None
        return Reading(letter, float(letter == sample.answer))

def of_rooms(answered):
    "Mean of the rooms' means."
    rooms = {name: figure_of(each) for name, each in grouped_by(answered, lambda one: one.category).items()}
    values = [one.value for one in rooms.values() if one.value is not None]
    table = Table("mean of rooms", {"mean of rooms": figure_of(answered)}, {"room": rooms})
    table.notes.append(f"{len(values)} rooms")
    return table
"""


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare("generic", tmp_path_factory.mktemp("rooms"), CASE)


def readings(scored: Scored) -> dict[str, tuple[str | None, float]]:
    """Answer and score of each question's one output."""
    return {name: (line["outputs"][0]["answer"], line["outputs"][0]["score"]) for name, line in scored.answers.items()}


def own_protocol(folder: Path, **changes: object) -> str:
    """A YAML file; with the functions of CODE where ``changes`` name them."""
    (folder / "mine.py").write_text(CODE)
    whole = {"base": "nextqa/official", "source": "made up", "aggregation": "mean", "categories": []}
    whole |= {"templates": {"multiple_choice": "{question} Choose:\n{options}"}, "option_style": "(A) text"}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(whole | changes))
    return str(path)


@pytest.mark.matrix
def test_without_a_protocol_ours_reads_and_categories_are_averaged(rooms: Prepared, tmp_path: Path) -> None:
    scored = score(tmp_path, rooms.records, OUTPUTS | {"3": "A"})
    assert scored.row["reader"] == "ours" and readings(scored) == {
        "1": ("B", 1),
        "2": ("C", 1),
        "3": ("A", 1),
        "4": (None, 0),
    }
    assert scored.counts == {"total": 4, "scored": 4, "unparsed": 1} and scored.row["accuracy"] == 0.75
    by_room = {name: (one["accuracy"], one["n"]) for name, one in scored.row["by_category"].items()}
    assert by_room == {"kitchen": (1.0, 2), "hall": (0.5, 2)}


@pytest.mark.matrix
def test_a_protocol_of_one_s_own_asks_in_its_words(rooms: Prepared, tmp_path: Path) -> None:
    row = prompts(tmp_path, rooms, own_protocol(tmp_path))["2"]
    assert row["user"] == "What lies there? Choose:\n(A) a cup\n(B) a plate\n(C) a fork"
    assert (row["settings"]["protocol"], row["settings"]["max_new_tokens"]) == ("mine", 1024)


def test_a_reader_and_an_aggregation_of_one_s_own(rooms: Prepared, tmp_path: Path) -> None:
    functions = {"reader": f"{tmp_path}/mine.py:LastLine", "aggregation": f"{tmp_path}/mine.py:of_rooms"}
    protocol = own_protocol(tmp_path, **functions)
    scored = score(tmp_path, rooms.records, OUTPUTS, protocol)
    # plate is B and right, fork C and right, there B and wrong (A), and an empty last line is no answer.
    assert readings(scored) == {"1": ("B", 1), "2": ("C", 1), "3": ("B", 0), "4": (None, 0)}
    assert scored.row["reader"] == functions["reader"] and scored.row["rule"] == "Mean of the rooms' means"
    assert scored.group("room") == {"hall": (0.0, 2), "kitchen": (1.0, 2)} and scored.figures["mean of rooms"] == 0.5
    assert scored.row["notes"] == ["2 rooms"]
    result = json.loads((tmp_path / "scored-outputs" / "result.json").read_text())
    assert set(result["protocol"]["decides"]["functions"]) == set(functions.values())
    # Ours is there where it is asked for.
    assert score(tmp_path, rooms.records, OUTPUTS, protocol, "ours").row["reader"] == "ours"


def test_the_guide_s_example_works(rooms: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in their last line: 1 and 2 are right, 3 is wrong, 4 is empty."""
    guide = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    example = textwrap.dedent(
        guide.partition("    # rooms.yaml")[2].partition("\nAn answer of None")[0].partition("\n")[2]
    )
    settings, _, code = example.partition("# rooms.py")
    (tmp_path / "rooms.yaml").write_text(settings)
    (tmp_path / "rooms.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    outputs = {"1": "I see a plate.\nB", "2": "C", "3": "B", "4": ""}
    scored = score(tmp_path, rooms.records, outputs, "rooms.yaml")
    assert scored.group("room") == {"hall": (0.0, 2), "kitchen": (1.0, 2)}
    assert (scored.row["rule"], scored.row["accuracy"]) == ("Mean over questions, and by room", 0.5)
    assert scored.row["n_unparsed"] == 1 and scored.row["reader"] == "rooms.py:LastLine"
    assert prompts(tmp_path, rooms, "rooms.yaml")["1"]["user"] == "What is it?\nAnswer in your last line."


def test_a_reader_that_fails_ends_the_scoring_and_leaves_nothing(
    rooms: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = own_protocol(tmp_path, reader=f"{tmp_path}/mine.py:LastLine")
    (tmp_path / "o.json").write_text(json.dumps(OUTPUTS | {"4": "broken"}))
    assert main(["score", rooms.records, str(tmp_path / "o.json"), "--protocol", protocol]) == 2
    message = capsys.readouterr().err
    assert "mine.py:LastLine', raises ValueError: a broken line for question '4'" in message
    assert "A vlm_pg.eval.contracts.Reading is expected" in message
    assert not (tmp_path / "scored-o").exists()


@pytest.mark.matrix
def test_answers_read_by_another_text_of_the_function_are_not_added_to(
    rooms: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``vlm-pg eval`` reads with it, too; an evaluation that was cut off does not go on when its file has changed."""
    protocol = own_protocol(tmp_path, reader=f"{tmp_path}/mine.py:LastLine", max_new_tokens=2)
    config = ["eval", "--config", str(config_of(tmp_path, rooms, protocol, eval={"lmms_samples": True}))]
    assert main(config) == 0
    out = tmp_path / "runs" / f"eval-{Path(MODEL).name}"
    result = json.loads((out / "result.json").read_text())
    assert result["sets"]["mine"]["reader"].endswith("mine.py:LastLine")
    # As it stands before it is finished.
    (out / "protocol.json").write_text(json.dumps(result["protocol"]))
    (out / "result.json").unlink()
    (tmp_path / "mine.py").write_text(f"{CODE}\n# read otherwise\n")
    capsys.readouterr()
    assert main(config) == 2
    message = capsys.readouterr().err
    assert "holds an unfinished evaluation with another protocol: functions." in message


def test_samples_for_lmms_eval_count_the_questions_that_are_not_asked(tmp_path: Path) -> None:
    """The first record is of a type that the protocol has no words for, the second cannot be used: the third is 2."""
    choice = {"problem": "Which?", "data_type": "text", "options": ["A. x", "B. y"], "solution": "<answer>B</answer>"}
    number = {"problem": "1 + 1?", "data_type": "text", "problem_type": "numerical", "solution": "<answer>2</answer>"}
    rows = [
        number | {"problem_id": "number"},
        choice | {"problem_id": "bad", "problem_type": "multiple choice", "problem": ""},
        choice | {"problem_id": "choice", "problem_type": "multiple choice"},
    ]
    (tmp_path / "set.json").write_text(json.dumps(rows))
    made = Prepared(str(tmp_path / "set.json"), str(tmp_path))
    protocol = own_protocol(tmp_path, max_new_tokens=2)
    config = config_of(tmp_path, made, protocol, eval={"lmms_samples": True}, data={"max_bad_share": 1.0})
    assert main(["eval", "--config", str(config)]) == 0
    [line] = (tmp_path / "runs" / f"eval-{Path(MODEL).name}" / "lmms_samples_mine.jsonl").read_text().splitlines()
    assert (json.loads(line)["doc_id"], json.loads(line)["doc"]["id"]) == (2, "choice")
