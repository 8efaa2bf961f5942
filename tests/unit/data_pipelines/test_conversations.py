"""Maps of conversations and preference pairs: LLaVA's and OpenAI's form, real files through the command, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipelines import generic
from data_pipelines.engine.resume import Spool, Verdict
from data_pipelines.engine.splits import Repeats
from data_pipelines.generic import dataset_of
from tests.support.checking import Folder, record
from tests.support.pipeline_rows import check_odd_rows, one_row, parted, write_lines
from tests.support.tiny_media import write_media
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError
from vlm_pg.types import BadSample, MediaRef, Sample

PICTURE = (MediaRef("image", "a.png"),)
LLAVA = {"conversation": "conversations", "image": "image"}
PAIRS = {"problem": "q", "chosen": "c", "rejected": "r", "image": "image"}
TEXTS = ("<image>\nWhat is it?", "A cat.", "Which colour?", "Grey.")


def llava(*texts: str, **beside: Any) -> dict[str, Any]:
    roles = ("human", "gpt") * len(texts)
    turns = [{"from": role, "value": text} for role, text in zip(roles, texts, strict=False)]
    return {"image": "a.png", "conversations": turns} | beside


def pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"image": "a.png", "q": "What is it?", "c": chosen, "r": rejected}


def made(folder: Path, row: dict[str, Any], **fields: Any) -> Any:
    """What becomes of a row: a sample, or (reason, message)."""
    (folder / "map.yaml").write_text(yaml.safe_dump({"name": "talks", "fields": fields}))
    (one,) = one_row(dataset_of(folder / "map.yaml"), row)
    return (one.reason, one.message) if isinstance(one, BadSample) else replace(one, where="")


def sample(question: str, *turns: str, rejected: str = "", **changes: Any) -> Sample:
    made = Sample("rows-1", question, PICTURE, (), "", "free_form", "talks", "talks", turns=turns, rejected=rejected)
    return replace(made, **changes)


def test_the_maps_of_the_docstring(tmp_path: Path) -> None:
    first, second = (
        yaml.safe_load("    name:" + text.partition("\n\n")[0])
        for text in (generic.__doc__ or "").split("    name:")[2:]
    )
    coco = (MediaRef("image", "coco/a.png"),)
    assert made(tmp_path, llava(*TEXTS), **first["fields"]) == sample(*TEXTS, media=coco)
    row = {"question": "What?", "chosen": "A cat.", "rejected": "A dog.", "image": "a.png"}
    assert made(tmp_path, row, **second["fields"]) == sample("What?", "A cat.", rejected="A dog.")


def test_conversations_of_each_form(tmp_path: Path) -> None:
    expected = sample(*TEXTS)
    assert made(tmp_path, llava(*TEXTS), **LLAVA) == expected
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, TEXTS, strict=True)]
    assert made(tmp_path, {"image": "a.png", "conversations": turns}, **LLAVA) == expected
    turns[0]["content"] = [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]  # type: ignore[assignment]
    assert made(tmp_path, {"image": "a.png", "conversations": turns}, **LLAVA) == expected
    # a cell of a CSV file, and datasets' list of objects stored field by field
    assert made(tmp_path, {"image": "a.png", "conversations": json.dumps(turns)}, **LLAVA) == expected
    columns = {"from": ["human", "gpt"] * 2, "value": list(TEXTS)}
    assert made(tmp_path, {"image": "a.png", "conversations": columns}, **LLAVA) == expected


def test_a_video_that_is_marked_as_an_image(tmp_path: Path) -> None:
    """The mark is removed from the question alone; where it stays, it stands for no medium."""
    row, fields = {"video": "a.mp4", **llava(*TEXTS)}, {"video": "video"}
    removing = {"conversation": {"field": "conversations", "remove": ["<image>"]}}
    expected = sample("What is it?", *TEXTS[1:], media=(MediaRef("video", "a.mp4"),))
    assert made(tmp_path, row, **removing, **fields) == expected
    for some, text in ((LLAVA, "<image>\nWhat is it?"), (removing, "<image><image>\nWhat is it?")):
        reason, _ = made(tmp_path, row | llava(text, "A cat."), conversation=some["conversation"], **fields)
        assert reason == "media_mark_without_medium"


def test_preference_pairs_of_each_form(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    expected = sample("What is it?", "A cat.", rejected="A dog.")
    assert made(tmp_path, pair("A cat.", "A dog."), **PAIRS) == expected
    assert made(tmp_path, pair([turn], "A dog."), **PAIRS) == expected
    dialogue = llava("What is it?", "A dog.")["conversations"]
    assert made(tmp_path, pair(json.dumps([turn]), dialogue), **PAIRS) == expected
    # of a conversation, whole or without the response; of a question with its answer
    both = {"conversation": "conversations", "rejected": "r", "image": "image"}
    row = pair("A cat.", "A dog.") | llava(*TEXTS[:2])
    assert made(tmp_path, row, **both) == sample(*TEXTS[:2], rejected="A dog.")
    assert made(tmp_path, row | llava(TEXTS[0]), **both, chosen="c") == sample(*TEXTS[:2], rejected="A dog.")
    answered = PAIRS | {"chosen": None, "answer": "c", "problem_type": {"constant": "free-form"}}
    assert made(tmp_path, row, **answered) == sample("What is it?", rejected="A dog.", answer="A cat.")


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '[{"box": [1, 2]}]', '{"a": [1], "b": [1, 2]}', '{"from": "x"}'])
def test_a_response_may_be_json(tmp_path: Path, text: str) -> None:
    assert made(tmp_path, pair(text, "A dog."), **PAIRS) == sample("What is it?", text, rejected="A dog.")


TURN = {"from": "human", "value": "What?"}


@pytest.mark.parametrize(
    ("turns", "reason", "message"),
    [
        ([], "bad_conversation", "the roles of the turns are none. The user and the assistant in alternation"),
        ([TURN], "bad_conversation", "the roles of the turns are user. The user and the assistant in alternation, the"),
        ([TURN, TURN, *llava("a", "b")["conversations"]], "bad_conversation", "are user, user, user, assistant."),
        (llava("a", "b", "c")["conversations"], "bad_conversation", "are user, assistant, user. "),
        ([{"from": "system", "value": "Be brief."}, TURN], "bad_conversation", "(prompt.system sets a system message)"),
        ([TURN, {"from": "tool", "value": "3"}], "bad_conversation", "'conversations' has a turn of 'tool'. human or"),
        ([TURN, {"value": "3"}], "bad_conversation", "'conversations' has a turn of 'None'"),
        ([TURN, {"from": "gpt"}], "missing_field", "the row has no 'value' or 'content'. Text under that name is"),
        ([TURN, {"from": "gpt", "value": 3}], "wrong_type", "'value' or 'content' is a int. Text is expected"),
        ([TURN, {"from": "gpt", "content": [{"type": "audio"}]}], "wrong_type", "a part of a turn is of type 'audio'."),
        ([TURN, {"from": "gpt", "content": [{"type": "image"}]}], "media_in_later_turn", "'turns[0]' contains '<imag"),
        ([TURN, "A cat."], "wrong_type", "A list of turns with a role and a text each is expected. Correct the row"),
        ("What?", "wrong_type", "'conversations' is 'What?'. A list of turns"),
        ([TURN, {"from": "gpt", "value": " "}], "empty_turn", "'turns[0]' is empty. Text is expected"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_used(tmp_path: Path, turns: Any, reason: str, message: str) -> None:
    refused = made(tmp_path, {"image": "a.png", "conversations": turns}, **LLAVA)
    assert refused[0] == reason and message in refused[1]


@pytest.mark.parametrize(
    ("rejected", "reason", "message"),
    [
        (None, "missing_field", "the row has no 'r'. Text under that name is expected"),
        (3, "wrong_type", "'r' is a int. Text is expected"),
        ([], "bad_conversation", "the roles of the turns of 'r' are none. One of the assistant, or of the user and"),
        ([TURN], "bad_conversation", "the roles of the turns of 'r' are user. "),
        (llava(*TEXTS)["conversations"], "bad_conversation", "user, assistant, user, assistant. One of the assistant"),
        ("A cat. ", "equal_answers", "'rejected' is the chosen response. Another response is expected."),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be_used(tmp_path: Path, rejected: Any, reason: str, message: str) -> None:
    refused = made(tmp_path, pair("A cat.", rejected), **PAIRS)
    assert refused[0] == reason and message in refused[1]


def test_odd_rows_are_refused(tmp_path: Path) -> None:
    for row, fields in ((llava(*TEXTS), LLAVA), (pair([TURN], "A dog."), PAIRS), (pair("A", "B"), PAIRS)):
        (tmp_path / "map.yaml").write_text(yaml.safe_dump({"name": "talks", "fields": fields}))
        refused = dict(check_odd_rows(dataset_of(tmp_path / "map.yaml"), row))
        assert {f"without {name}" for name in row} <= set(refused)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAVA | {"problem": "q"}, "has problem beside conversation, which holds question and answers; leave it out"),
        (LLAVA | {"answer": "a"}, "has answer beside conversation"),
        (LLAVA | {"problem_type": "k"}, "has problem_type beside conversation"),
        (LLAVA | {"options": "o"}, "has options beside conversation"),
        ({"chosen": "c", "image": "image"}, "has no problem; give problem, problem_type and answer, problem and chos"),
        ({"problem": "q", "rejected": "r", "image": "image"}, "has no problem_type, answer; give"),
        (PAIRS | {"answer": "a"}, "has no problem_type; give"),
        ({"conversation": "c"}, "has no data_type; give it, or video and image for the paths of each"),
        (LLAVA | {"conversaton": "c"}, "fields.conversaton is not a known key. Did you mean fields.conversation?"),
    ],
)  # fmt: skip
def test_wrong_maps_are_clear_errors(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as got:
        made(tmp_path, {}, **fields)
    assert message in str(got.value)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_the_command_on_real_files(tmp_path: Path, media_dir: Path, form: str) -> None:
    """Pairs of one question are no repetition of it; a repeated conversation is. What refused.jsonl has, stays out."""
    write_media(tmp_path / "media/a.png")
    (tmp_path / "media/v.mov").write_bytes((media_dir / "video_90.mov").read_bytes())
    talks = [llava(*TEXTS), llava(*TEXTS), llava(*TEXTS[:2]), llava(*TEXTS[:3]), llava(*TEXTS[:2], image="b.png")]
    pairs = [pair("A cat.", "A dog."), pair("A cat.", "A cow."), pair("A cat.", "A cat.")]
    films = [{"video": "v.mov", **llava("<image>\nWhat is filmed?", "A keyboard.")}]
    film = {"conversation": {"field": "conversations", "remove": ["<image>"]}, "video": "video"}
    found = {}
    for name, rows, fields in (("talks", talks, LLAVA), ("pairs", pairs, PAIRS), ("films", films, film)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "fields": fields}))
        lines, out = write_lines(tmp_path / f"{name}.jsonl", rows), tmp_path / name
        arguments = ["--train", str(lines), "--media-root", str(tmp_path / "media"), "--out", str(out)]
        arguments += ["--format", form, "--workers", "0", "--eval-share", "0"]
        assert generic.main(["--map", str(tmp_path / f"{name}.yaml"), *arguments]) == 0
        kept, bad = read_records(Path(f"{out}:train") if form == "parquet" else out / "train.jsonl")
        refused = [json.loads(line)["reason"] for line in (out / "refused.jsonl").read_text().splitlines()]
        repeated = (out / "repeated.jsonl").read_text().splitlines()
        assert not bad and kept[0].turns[0] in (out / "summary.html").read_text()
        found[name] = [(one.turns, one.rejected) for one in kept], refused, len(repeated)
    assert found == {
        "talks": ([(TEXTS[1:], ""), (TEXTS[1:], ""), (TEXTS[1:2], "")], ["bad_conversation", "missing_media"], 1),
        "pairs": ([(("A cat.",), "A dog."), (("A cat.",), "A cow.")], ["equal_answers"], 0),
        "films": ([(("A keyboard.",), "")], [], 0),
    }


def test_a_table_of_conversations(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    turns = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": " What?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"image": "a.png", "conversations": turns}]), tmp_path / "rows.parquet"
    )
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({"name": "talks", "fields": LLAVA}))
    (one,), refused = parted(dataset_of(tmp_path / "map.yaml"), tmp_path / "rows.parquet")
    assert not refused and (one.question, one.turns, one.media) == ("<image> What?", ("A cat.",), PICTURE)


def test_turns_come_back_when_a_run_is_resumed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "a")
    verdicts = [Verdict("train", sample("What?", "A cat.", "Sure?", "Yes.")), Verdict("train", sample("What?", "A"))]
    spool.write(0, 2, verdicts)
    assert list(spool.verdicts(1)) == verdicts


def test_other_responses_are_no_repetition(tmp_path: Path, media_dir: Path) -> None:
    """Neither in a preparation nor in a check; a conversation without an answer contradicts none with one."""
    with Ledger() as ledger:
        repeats = Repeats(ledger)
        some = [sample("What?", "A"), sample("What?", "B"), sample("What?", "A", rejected="B"), sample("What?", "A")]
        assert [repeats.of(one, []) is None for one in some] == [True, True, True, False]
    talk = {"problem": "What?", "problem_type": "free-form", "options": [], "solution": None, "turns": ["A cat."]}
    others = [talk, talk | {"turns": ["A dog."]}, talk | {"rejected": "A dog."}, talk | {"rejected": "A cow."}]
    again = talk | {"solution": "<answer>a cat</answer>"}
    rows = [record(number, **one) for number, one in enumerate((*others, again), start=1)]
    supervised = {"steps": 1, "micro_batch_tokens": 40_000, "objective": "sft"}
    repeated = {"duplicate_question?": ["train.jsonl:5 5"]}
    assert Folder(tmp_path, media_dir).check(rows, training=supervised) == (0, repeated)
    code, found = Folder(tmp_path, media_dir).check(rows)
    assert code == 1 and len(found["no_gold_answer"]) == 4, "no response to them could be scored"
