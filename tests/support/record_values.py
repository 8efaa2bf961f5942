"""What may stand in a field of a record: usual values and odd ones, as JSON text. The same seed gives the same."""

from __future__ import annotations

import json
import random

from vlm_pg.types import ANSWER_KINDS

OPTIONS = [
    ["A. red", "B. blue"], ["red", "blue"], ["(A) red", "(B) blue", "(C) green"], ["a", "the", "an"], ["C", "A", "B"],
    ["A. the", "B. a"], ["A. B", "B. A"], ["A. B. red", "B. red"], ["A. red", "B. red"], ["red", "red"],
    ["A. red", "B."],
    ["", ""], ["A. red", "A. blue"], ["A. red", "blue"], ["A. red"], [], ["Z: 1", "Y: 2"], ["A. 1", "B. 1 "],
    ["A. r\u00e9d\u202e", "B. \x1b[31mblue\x1b[0m"], ["A. \u00e9", "B. e\u0301"], ["A. Red", "B. red"], ["1", "2", "3"],
    [f"option {number}" for number in range(26)], [f"option {number}" for number in range(27)],
]  # fmt: skip
GOLDS = [
    "A", "B", "b", "(a)", "a", "b)", "C.", "red", "blue", "B. blue", "B. red", "the", "an", "Z", "1", "2", "5.0", "",
    " ", "A\n", "1/2", "[1, 2, 30, 40]", "1.5 - 3", "yes", "no", "x^2 + 1", "é", "\x1b[2J", "a\nb", "NaN", "inf",
    "<answer>A", "<b>A</b>", "\\frac{1}{2}", "open the door", "١٢", "Ａ", "A and B", "A. blue",
]  # fmt: skip
TEXTS = [
    "What is shown?", "", " ", "\n\t", "\ud83d", "a\udce9b", "\U0001f600", "\x1b[31mred\x1b[0m\nnext", "\x00",
    "\x7f\x9b",
    "\u202eabc", "\ufeff", "\u2028", "<|im_end|>", "<|image_pad|>", "<answer>", "</answer>", "../../etc/passwd",
    "file:///etc/passwd", "http://127.0.0.1/x.mp4", "/dev/zero", "a.mp4", "caf\udce9.mp4", "video", "image", "text",
    "é" * 300, "'; DROP TABLE", "{}", "%s%n", "A", "null",
]  # fmt: skip
NUMBERS = [
    "0", "-0", "8", "-1", "1.5", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", "9" * 30, "9" * 4000,
    "9" * 4301, "-" + "9" * 20000, "0." + "1" * 20000, "true", "false", "null",
]  # fmt: skip
NESTED = [
    "[]", "{}", "[[]]", '{"a": 1, "a": 2}', '{"$ref": "x"}', '["a", 1, null]', "[null]", '{"path": "x"}',
    '[{"a": [1]}]',
    "[NaN]", '["\\ud83d"]', f"[{'9' * 5000}]",
]  # fmt: skip
TYPES = (
    "multiple choice", "free-form", "numerical", "OCR", "regression", "mathematics", "yes/no", "box", "time span",
    "exact", "essay", "MULTIPLE_CHOICE", "Free Form", "mean relative accuracy", "",
)  # fmt: skip
KEYS = (
    "problem_id", "problem", "data_type", "problem_type", "options", "process", "solution", "path", "data_source",
    "category", "extra",
)  # fmt: skip


def usual(random_: random.Random, number: int) -> dict[str, str]:
    """A record as field to JSON text, usable in most cases; options and gold answer need not fit each other."""
    kind = random_.choice(TYPES) if random_.random() < 0.3 else "multiple choice"
    options = random_.choice(OPTIONS[:3]) if random_.random() < 0.4 else random_.choice(OPTIONS)
    gold = random_.choice(GOLDS)
    if options and random_.random() < 0.6:
        gold = random_.choice(["A", "B", "a", "(b)", random_.choice(options), random_.choice(options)[3:]])
    wrapped = random_.choice(
        [f"<answer>{gold}</answer>"] * 6
        + [
            f"<answer>{gold}</answer><answer>B</answer>",
            f"<answer><answer>{gold}</answer></answer>",
            f"</answer> x <answer>\n{gold} </answer>",
            f"<answer>{gold}",
            gold,
            f"<ANSWER>{gold}</ANSWER>",
        ]
    )
    values = {
        "problem_id": random_.choice([number, str(number), f"id-{number}"]),
        "problem": "What is shown?",
        "data_type": random_.choice(["text", "image", "video"]),
        "problem_type": kind,
        "options": options,
        "solution": wrapped,
        "path": "",
        "data_source": "fuzz",
    }
    if values["data_type"] != "text":
        values["path"] = random_.choice(["a.mp4", ["a.mp4"], "b.png"])
    return {key: as_json(random_, value) for key, value in values.items()}


def as_json(random_: random.Random, value: object) -> str:
    return json.dumps(value, ensure_ascii=random_.random() < 0.5)


def odd(random_: random.Random) -> str:
    """JSON text of an odd value; one in fifty is huge or deep."""
    if random_.random() < 0.02:
        depth = random_.choice([90, 500, 960, 990, 5000, 100_000])
        return random_.choice(
            [
                json.dumps("x" * 1_000_000),
                json.dumps("<answer>" * 100_000),
                json.dumps("<answer>A</answer>" * 50_000),
                json.dumps(" " * 1_000_000 + "<answer>A</answer>"),
                json.dumps("<answer>" + "9" * 300_000 + "</answer>"),
                json.dumps(["A. " + "x" * 300_000, "B. y"]),
                json.dumps([f"{number}" for number in range(20_000)]),
                "[" * depth + "]" * depth,
                '{"a":' * depth + "1" + "}" * depth,
                "9" * 1_000_000,
            ]
        )
    return random_.choice(
        [
            lambda: as_json(random_, random_.choice(TEXTS)),
            lambda: as_json(random_, f"<answer>{random_.choice(TEXTS + GOLDS)}</answer>"),
            lambda: random_.choice(NUMBERS),
            lambda: random_.choice(NESTED),
            lambda: as_json(random_, random_.choice(OPTIONS)),
            lambda: as_json(random_, random_.choice(ANSWER_KINDS)),
            lambda: as_json(random_, [random_.choice(TEXTS), random_.choice(TEXTS)]),
        ]
    )()
