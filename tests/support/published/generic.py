"""Data sets of nobody's form by maps of their fields: all ways to name an answer, and all parts of a medium."""

from __future__ import annotations

import datasets

from tests.support.published.case import Published, image, media, picture, stored, video
from vlm_pg.types import AnswerKind, MediaRef, Sample

MAP = ("--map", "{}/map.yaml", "{}")
KEYED = """
name: keyed
keyed_by: film
questions: items
files: {train: ["all.json"]}
fields:
  problem_id: id
  problem: {field: text, remove: ["<video>"]}
  data_type: {constant: video}
  problem_type: {field: kind, names: {one: multiple choice, several: multiple select}}
  options: choices
  answer: {field: right, given_as: index from 1}
  process: why
  path: {field: film, prefix: films/, suffix: .mp4}
  start: {field: clip.from}
  end: {field: clip.to}
  category: kind
"""
FILM = {
    "clip": {"from": 1.5, "to": "9"},
    "items": [
        {"id": "a", "text": "<video>\nWhich?", "kind": "one", "choices": ["red", "blue"], "right": 2, "why": "I saw."},
        {"id": "b", "text": "Which?", "kind": "several", "choices": ["x", "y", "z"], "right": [1, 3], "why": ""},
        {"id": "c", "text": "Which?", "kind": "one", "choices": ["red", "blue"], "right": 3, "why": ""},
        {"id": "d", "text": "Which?", "kind": "two", "choices": ["red", "blue"], "right": 1, "why": ""},
    ],
}
COLUMNS = """
name: columns
files: {train: ["rows.csv"]}
fields:
  problem_id: key
  problem: question
  data_type: {constant: video}
  problem_type: {constant: multiple choice}
  options: {columns: [a, b, c]}
  answer: {field: gold, given_as: letter}
  path: {field: video, suffix: .mkv}
  subtitles: {field: video, suffix: .srt}
"""
ROWS = """\
key,question,a,b,c,gold,video
1,Which?,red,blue,green,b.,clip
2,Which?,red,blue,,A,clip
3,Which?,red,blue,,C,clip
4,Which?,red,blue,green,A,gone
"""
SUBTITLES = """
name: columns
files: {train: ["rows.csv"]}
fields:
  problem_id: key
  problem: question
  data_type: {constant: video}
  problem_type: {constant: multiple choice}
  options: {columns: [a, b]}
  answer: gold
  path: video
  subtitles: texts
"""
SUBTITLED_ROWS = """\
key,question,a,b,gold,video,texts
1,Which?,red,blue,A,clip.mkv,clip.srt
2,Which?,red,blue,A,clip.mkv,gone.srt
3,Which?,red,blue,A,clip.mkv,../clip.srt
4,Which?,red,blue,A,clip.mkv,/etc/hosts.srt
5,Which?,red,blue,A,clip.mkv,http://a.example/clip.srt
6,Which?,red,blue,A,clip.mkv,clip.mkv
7,Which?,red,blue,A,clip.mkv,odd.srt
"""
OBJECTS = """
name: objects
file_is_row: true
files: {train: ["items/*/row.json"]}
fields:
  problem_id: n
  problem: question
  data_type: {constant: video}
  problem_type: {constant: multiple choice}
  options: {in_question: true}
  answer: {field: gold, given_as: text}
  path: {constant: clip.mkv}
  times: moments
"""
LINES = "Which?\nOptions:\nA. a dog\nB. a cat"
TAGGED = """
name: tagged
files: {train: ["data:train"]}
fields:
  problem: question
  data_type: {constant: image}
  problem_type: {constant: numerical}
  answer: {field: gold, given_as: tagged}
  process: gold
  path: pictures
"""
FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in ("question", "gold")} | {"pictures": datasets.List(datasets.Image())}
)
BLACK, RED = picture(0), picture(255)
PICTURES = [{"bytes": BLACK, "path": "a.png"}, {"bytes": RED, "path": "b.png"}]


def sample(
    name: str,
    ref: tuple[MediaRef, ...],
    options: str,
    answer: str,
    kind: AnswerKind = "multiple_choice",
    source: str = "columns",
    category: str = "",
    process: str = "",
) -> Sample:
    """``options``: with a "|" between them."""
    lettered = tuple(options.split("|")) if options else ()
    return Sample(name, "Which?", ref, lettered, answer, kind, source, category or source, process)


CUE = b"1\n00:00:00,500 --> 00:00:01,000\nHi\n"
CLIP = video("films/f.mp4", start=1.5, end=9.0)
SUBTITLED = video("clip.mkv", subtitles="clip.srt")
SHARD = "train-00000-of-00001.parquet"

CASES = {
    "an object of rows, several questions each, by number": Published(
        {"map.yaml": KEYED, "all.json": {"f": FILM, "g": {"clip": {"from": 0, "to": 1}}}, **media("films/f.mp4")},
        [
            sample("a", CLIP, "A. red|B. blue", "B", source="keyed", category="one", process="I saw."),
            sample("b", CLIP, "A. x|B. y|C. z", "A, C", "multiple_select", "keyed", "several"),
        ],
        refused=[
            ("all.json:1", "c", "answer_not_in_options"),
            ("all.json:1", "d", "unknown_value"),
            ("all.json:1, record 2", "all-1.2", "missing_field"),
        ],
        arguments=(*MAP, "--eval-share", "0"),
    ),
    "columns of a table, by letter, subtitles": Published(
        {"map.yaml": COLUMNS, "rows.csv": ROWS, **media("clip.mkv"), "clip.srt": CUE},
        [sample("1", SUBTITLED, "A. red|B. blue|C. green", "B"), sample("2", SUBTITLED, "A. red|B. blue", "A")],
        refused=[("rows.csv:4", "3", "answer_not_in_options"), ("rows.csv:5", "4", "missing_media")],
        arguments=(*MAP, "--eval-share", "0"),
    ),
    "subtitles that are not there, lie elsewhere, or are none": Published(
        {
            "map.yaml": SUBTITLES,
            "rows.csv": SUBTITLED_ROWS,
            **media("clip.mkv"),
            "clip.srt": CUE,
            "../clip.srt": CUE,
            "odd.srt": b"\xff\xfe\xff",
        },
        [sample("1", SUBTITLED, "A. red|B. blue", "A")],
        refused=[
            ("rows.csv:3", "2", "missing_media"),
            ("rows.csv:4", "3", "outside_root"),
            ("rows.csv:5", "4", "outside_root"),
            ("rows.csv:6", "5", "remote_media"),
            ("rows.csv:7", "6", "unsupported_media"),
            ("rows.csv:8", "7", "bad_subtitles"),
        ],
        arguments=(*MAP, "--eval-share", "0"),
    ),
    "one object a file, by text, moments": Published(
        {
            "map.yaml": OBJECTS,
            "items/1/row.json": {"n": 1, "question": LINES, "gold": "a cat", "moments": [0.5, 2]},
            "items/2/row.json": {"n": 2, "question": LINES, "gold": "a bird", "moments": [0.5]},
            "items/3/row.json": {"n": 3, "question": LINES, "gold": "a dog", "moments": [2, 0.5]},
            **media("clip.mkv"),
        },
        [sample("1", video("clip.mkv", times=(0.5, 2.0)), "A. a dog|B. a cat", "B", source="objects")],
        refused=[("row.json:1", "2", "answer_not_in_options"), ("row.json:1", "3", "bad_clip")],
        arguments=(*MAP, "--eval-share", "0"),
    ),
    "media inside rows, tagged": Published(
        {
            "map.yaml": TAGGED,
            f"data/{SHARD}": (
                [
                    {"question": "Which?", "gold": "It is <answer>7</answer>", "pictures": PICTURES},
                    {"question": "Which?", "gold": "It is <answer>seven</answer>", "pictures": PICTURES[:1]},
                ],
                FEATURES,
            ),
        },
        [
            sample(
                "data-train-1",
                (*image(stored(BLACK)), *image(stored(RED))),
                "",
                "7",
                "numerical",
                "tagged",
                process="It is <answer>7</answer>",
            )
        ],
        refused=[(f"{SHARD}:2", "data-train-2", "unscorable_gold_answer")],
        arguments=(*MAP, "--eval-share", "0"),
        unpacked=[BLACK, RED],
    ),
}
