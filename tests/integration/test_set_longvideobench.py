"""LongVideoBench the whole way: both forms of its table, both forms of subtitles; asked; read, scored, averaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scored_sets import SILENT, PreparedSet, Scores, check_scores
from tests.support.tiny_media import mp4

pytestmark = pytest.mark.matrix

FIRST, SECOND, THIRD = "9PD3ciudpIE", "@someone-7240000000000000001", "mH9LdC7IFH8"
FOUR = ["a cat", "a dog", "a hen", "a cow"]


def row(number: str, choice: int, group: int, kind: str, **changes: Any) -> dict[str, Any]:
    name = number[:-2]
    asked = {"video_id": name, "question": f"What is seen in {number}?", "question_wo_referring_query": "What?"}
    asked |= {"candidates": FOUR, "correct_choice": choice, "position": [12], "level": "L1-Perception"}
    asked |= {"topic_category": "NP-News-Programs", "question_category": kind, "id": number, "duration": 10.0}
    asked |= {"video_path": f"{name}.mp4", "subtitle_path": f"{name}_en.json", "duration_group": group}
    return asked | {"starting_timestamp_for_subtitles": 0, "view_count": 4172} | changes


ROWS = [
    row(f"{FIRST}_0", 1, 15, "T2A", starting_timestamp_for_subtitles=100),
    row(f"{FIRST}_1", 0, 15, "T2A", starting_timestamp_for_subtitles=100, candidates=["a cat", "a dog"]),
    row(f"{SECOND}_0", 1, 60, "TOS", duration=40.0),
    row(f"{SECOND}_1", 2, 60, "SSS", duration=40.0, candidates=[*FOUR, "a ewe"]),
    row(f"{THIRD}_0", 3, 3600, "TOS", duration=300.0),
    row(f"{THIRD}_1", 0, 3600, "TOS", duration=300.0),
    row(f"{THIRD}_2", 4, 3600, "SSS", duration=300.0, candidates=[*FOUR, "a ewe"]),
    row(f"{THIRD}_3", 5, 3600, "SSS", duration=300.0),
]
# Of seconds 100 to 110 of its video; an end that is not given.
SAID = [
    {"start": "00:01:38.000", "end": "00:01:40.000", "line": "before"},
    {"start": "00:01:39.500", "end": "00:01:41.250", "line": "into it"},
    {"start": "00:01:44.600", "end": "00:01:46.100", "line": "amid it"},
]
TIMED = [{"timestamp": [0.0, 1.5], "text": "it"}, {"timestamp": [38.5, None], "text": "goes on"}]
MEDIA = {
    f"subtitles/{FIRST}_en.json": SAID,
    f"subtitles/{SECOND}_en.json": TIMED,
    f"videos/{FIRST}.mp4": mp4(1, seconds=10),
    f"videos/{SECOND}.mp4": mp4(2, seconds=40),
    # 300 seconds, of which at most 256 frames are shown.
    f"videos/{THIRD}.mp4": mp4(3, seconds=300),
}


def with_columns(row: dict[str, Any]) -> dict[str, Any]:
    """As the Parquet has options: five columns, filled up with "N/A"."""
    texts = [*row["candidates"], *["N/A"] * 5][:5]
    kept = {name: value for name, value in row.items() if name != "candidates"}
    return kept | {f"option{number}": text for number, text in enumerate(texts)}


FORMS = {
    "lvb_val.json": {"lvb_val.json": ROWS, **MEDIA},
    "Parquet": {"validation-00000-of-00001.parquet": [with_columns(row) for row in ROWS], **MEDIA},
}
# Question, output, what ours and lmms-eval's rule say: the first capital A to E, some lead-ins removed. An output
# without one gets an option by chance there; here it is drawn from SHA-256 of rule, question and output.
TABLE = [
    (f"{FIRST}_0", "Answer: B", ("B", 1), ("A", 0)),
    (f"{FIRST}_1", "The best answer is A.", ("A", 1), ("A", 1)),
    (f"{SECOND}_0", "It might be Carl's dog, so the answer is (B).", ("B", 1), ("C", 0)),
    (f"{SECOND}_1", "none", (None, 0), "drawn"),
    (f"{THIRD}_0", "I said B, but it is D.", (None, 0), ("B", 0)),
    (f"{THIRD}_1", "a dog", ("B", 0), "drawn"),
    (f"{THIRD}_2", None, SILENT, SILENT),
]
MEAN, NOTE = "mean over questions", f"1 of 7 questions have no output: '{THIRD}_2'."


def drawn(question: str, output: str, options: int) -> str:
    """The option that lmms-eval's rule gives an output without a letter, by the documented key."""
    import hashlib

    key = f"longvideobench/lmms\0{question}\0{output}".encode()
    return "ABCDE"[int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % options]


LETTERS = {f"{SECOND}_1": drawn(f"{SECOND}_1", "none", 5), f"{THIRD}_1": drawn(f"{THIRD}_1", "a dog", 4)}
LUCK = {f"{SECOND}_1": float(LETTERS[f"{SECOND}_1"] == "C"), f"{THIRD}_1": float(LETTERS[f"{THIRD}_1"] == "A")}


def read_table() -> list[tuple[Any, ...]]:
    """The table with what was drawn."""
    return [
        (question, output, ours, (LETTERS[question], LUCK[question]) if rule == "drawn" else rule)
        for question, output, ours, rule in TABLE
    ]


SCORES = [
    # 1, 1; 1, 0; 0, 0.
    Scores(
        "longvideobench/lmms",
        "ours",
        "ours",
        3 / 6,
        {MEAN: 3 / 6},
        {"total": 7, "scored": 6, "no_output": 1, "unparsed": 2},
        {
            "duration_group": {"15": (1, 2), "60": (1 / 2, 2), "3600": (0, 2)},
            "question_category": {"SSS": (0, 1), "T2A": (1, 2), "TOS": (1 / 3, 3)},
        },
        [NOTE],
    ),
    # 0, 1; 0, drawn; 0, drawn.
    Scores(
        "longvideobench/lmms",
        "published",
        "longvideobench/lmms",
        (1 + sum(LUCK.values())) / 6,
        {MEAN: (1 + sum(LUCK.values())) / 6},
        {"total": 7, "scored": 6, "no_output": 1},
        {"duration_group": {"15": (1 / 2, 2), "60": (LUCK[f"{SECOND}_1"] / 2, 2), "3600": (LUCK[f"{THIRD}_1"] / 2, 2)}},
        [NOTE],
    ),
]


@pytest.fixture(scope="module", params=FORMS)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreparedSet:
    return PreparedSet(tmp_path_factory.mktemp("longvideobench"), "longvideobench", FORMS[request.param])


def test_rows_become_records_with_their_subtitles(prepared: PreparedSet) -> None:
    assert list(prepared.samples) == [question for question, *_ in TABLE]
    assert prepared.refused == {f"{THIRD}_3": "answer_not_in_options"}
    options = {name: len(sample.options) for name, sample in prepared.samples.items()}
    assert list(options.values()) == [4, 2, 4, 5, 4, 4, 5]
    assert prepared.samples[f"{SECOND}_1"].answer == "C"
    # Relative to the clip; the one without an end is shown to the clip's.
    said = {name: _told(prepared, f"{name}_0") for name in (FIRST, SECOND)}
    assert "00:00:00.000 --> 00:00:01.250\ninto it" in said[FIRST] and "before" not in said[FIRST]
    assert "00:00:04.600 --> 00:00:06.100\namid it" in said[FIRST]
    assert said[SECOND].endswith("00:00:38.500 --> 00:00:40.000\ngoes on\n")
    assert prepared.report["without_subtitles"] == 3


def _told(prepared: PreparedSet, question: str) -> str:
    path = prepared.samples[question].media[0].subtitles
    assert path is not None
    return (Path(prepared.report["media_root"]) / path).read_text()


def test_words_and_frames(prepared: PreparedSet) -> None:
    """One frame a second, at most 256."""
    asked = prepared.prompts("longvideobench/official")
    choices = "A. a cat\nB. a dog\nC. a hen\nD. a cow"
    assert asked[f"{FIRST}_0"]["user"] == (
        f"Question: What is seen in {FIRST}_0?\n{choices}\nAnswer with the option's letter from the given choices "
        "directly."
    )
    assert asked[f"{FIRST}_1"]["user"].count("\n") == 3
    # 10 of 20 frames, 19 / 9 apart: 0, 2.11, 4.22, 6.33, 8.44, 10.56, 12.67, 14.78, 16.89, 19 rounded, in halves.
    assert asked[f"{FIRST}_0"]["media"][0]["frame_seconds"] == [0, 1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5]
    assert len(asked[f"{SECOND}_0"]["media"][0]["frame_seconds"]) == 40
    assert len(asked[f"{THIRD}_0"]["media"][0]["frame_seconds"]) == 256
    plain = prepared.prompts("longvideobench/lmms")[f"{SECOND}_0"]
    assert plain["user"].startswith(f"What is seen in {SECOND}_0?\nA. a cat\n")
    assert plain["settings"]["max_new_tokens"] == 32 and len(plain["media"][0]["frame_seconds"]) == 32


def test_subtitles_at_the_frames_where_a_protocol_of_ones_own_shows_them(prepared: PreparedSet, tmp_path: Path) -> None:
    """Frames of the first clip stand at 0, 1, ..., 4, 5.5 s: one is within each of its subtitles."""
    own = tmp_path / "own.yaml"
    own.write_text(
        "base: longvideobench/official\nsource: made up\nsubtitles: at_frames\n"
        'templates: {multiple_choice: "[[{subtitles}\\n]]{question}\\n{options}"}\n'
    )
    asked = prepared.prompts(str(own))
    assert asked[f"{FIRST}_0"]["user"].startswith(f"into it\namid it\nWhat is seen in {FIRST}_0?\nA. a cat\n")
    assert asked[f"{SECOND}_0"]["user"].startswith("it\ngoes on\nWhat is seen")
    assert asked[f"{THIRD}_0"]["user"].startswith("What is seen")


@pytest.mark.parametrize("place", range(2), ids=["ours", "lmms"])
def test_outputs_are_read_scored_and_averaged(prepared: PreparedSet, place: int) -> None:
    check_scores(prepared, read_table(), place, SCORES[place])
