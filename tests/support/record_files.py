"""Seeded record files: odd values and columns in every format, damage to healthy files, and entries that are no files.

The same seed gives the same file.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.mutations import mutation
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


ENCODINGS = ("utf-8",) * 12 + ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")


def structured(seed: int) -> tuple[str, bytes]:
    """Name and content of a file of JSON: a few records, most of them with something odd."""
    random_ = random.Random(f"records/{seed}")
    records = [_record(random_, number) for number in range(random_.choice((1, 2, 5, 9)))]
    if random_.random() < 0.1:
        records.insert(random_.randrange(len(records)), odd(random_))
    newline = random_.choice(["\n"] * 6 + ["\r\n", "\r", "\n\n \n", "\u2028"])
    if random_.random() < 0.5:
        name, text = f"{seed}.jsonl", newline.join(records) + random_.choice(["", newline])
    else:
        comma = random_.choice([","] * 12 + [",,", "", " ;"])
        inner = (comma + newline).join(records)
        name, text = (
            f"{seed}.json",
            random_.choice(["[{}]"] * 10 + ["[{}", "{}", "[{},]", "[{}] x", " [ {} ] "]).format(inner),
        )
    text = random_.choice([""] * 8 + [" " * 1000, "\n\n", "\x00", "\ufeff", "\x0c"]) + text
    encoding = random_.choice(ENCODINGS)
    errors = "surrogatepass" if encoding.startswith("utf") and random_.random() < 0.5 else "replace"
    return name, text.encode(encoding, errors)


def _record(random_: random.Random, number: int) -> str:
    fields = list(usual(random_, number).items())
    for _ in range(random_.choice((0, 0, 0, 1, 1, 2))):
        key = random_.choice(KEYS)
        match random_.randrange(6):
            case 0:
                fields = [pair for pair in fields if pair[0] != key]
            case 1:
                fields.append((key, odd(random_)))  # a second time, if it is there
            case _:
                fields = [(name, odd(random_) if name == key else value) for name, value in fields]
    if random_.random() < 0.1:
        random_.shuffle(fields)
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields) + "}"


def damaged(seed: int) -> tuple[str, bytes]:
    """Name and content of a healthy file with damaged bytes."""
    base, data = mutation(healthy(), seed)
    return f"{seed}-{base}", data


def good(number: int) -> dict[str, Any]:
    """A usable record."""
    return {
        "problem_id": number,
        "problem": f"What is shown in picture {number}?",
        "data_type": "video",
        "problem_type": "multiple choice",
        "options": ["A. a keyboard", "B. a piano"],
        "process": "",
        "solution": f"<answer>{'AB'[number % 2]}</answer>",
        "path": f"./{number}.mp4",
        "data_source": "fuzz",
    }


@functools.cache
def healthy() -> dict[str, bytes]:
    """Files of every format and way to be stored that is read."""
    import pyarrow
    import pyarrow.parquet

    records = [good(number) for number in range(12)]
    lines = "\n".join(json.dumps(record) for record in records)
    files = {
        "lines.jsonl": lines.encode(),
        "crlf.ndjson": lines.replace("\n", "\r\n").encode("utf-8-sig"),
        "array.json": json.dumps(records).encode(),
        "indented.json": json.dumps(records, indent=1).encode(),
    }
    table = pyarrow.Table.from_pylist(records)
    ways: dict[str, dict[str, Any]] = {
        "snappy": {"compression": "snappy"},
        "plain": {"compression": "none", "use_dictionary": False},
        "gzip": {"compression": "gzip", "data_page_version": "2.0"},
        "zstd": {"compression": "zstd", "row_group_size": 3},
        "brotli": {"compression": "brotli", "write_page_index": True},
        "checked": {"compression": "none", "write_page_checksum": True},
        "delta": {"use_dictionary": False, "column_encoding": {"problem": "DELTA_BYTE_ARRAY"}},
    }
    for name, options in ways.items():
        sink = io.BytesIO()
        pyarrow.parquet.write_table(table, sink, **options)
        files[f"{name}.parquet"] = sink.getvalue()
    return files


def cut_footers() -> list[tuple[str, bytes]]:
    """Parquet files cut near their end, and such whose footer states another length."""
    files = []
    for name, data in healthy().items():
        if name.endswith(".parquet"):
            files += [(f"cut{less}-{name}", data[:-less]) for less in (1, 4, 5, 8, 9, 100, len(data) - 4)]
            for length in (0, 1, 2**31 - 1, 2**32 - 1, len(data)):
                files.append((f"length{length}-{name}", data[:-8] + length.to_bytes(4, "little") + b"PAR1"))
    return files


def odd_entries(folder: Path) -> list[Path]:
    """Entries with the name of a data file that are none, and odd names; most exist."""
    text = json.dumps(good(1)).encode()
    for name in ("folder.jsonl", "folder.parquet"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "pipe.parquet")
    here = socket.socket(socket.AF_UNIX)
    descriptor = os.open(folder, os.O_RDONLY)
    here.bind(f"/proc/self/fd/{descriptor}/socket.json")  # the path of a socket may have 107 characters
    here.close()
    os.close(descriptor)
    links = {"zero.jsonl": "/dev/zero", "null.json": "/dev/null", "full.parquet": "/dev/full",
             "random.parquet": "/dev/urandom",
             "stdin.jsonl": "/proc/self/fd/0", "memory.jsonl": "/proc/self/mem", "memory.parquet": "/proc/self/mem",
             "dangling.json": "nowhere", "loop.parquet": "loop.parquet", "linked.jsonl": "plain.jsonl"}  # fmt: skip
    for name, target in links.items():
        (folder / name).symlink_to(target)
    odd_names = [b"caf\xe9.jsonl", b"caf\xe9.parquet", b"new\nline\x1b[31m.jsonl", b"\xc2\x9b2J.json",
                 "\u202egnp.jsonl".encode(),
                 b" .jsonl", b"-.jsonl", b"s3:bucket.parquet", b"a|b.jsonl", b"plain.jsonl", b"empty.json",
                 b"empty.jsonl",
                 b"empty.parquet", b"A.JSONL", b"x.json.gz", b"x.csv", b"x" * 249 + b".jsonl"]  # fmt: skip
    paths = [
        folder / name
        for name in (*links, "folder.jsonl", "folder.parquet", "pipe.jsonl", "pipe.parquet", "socket.json")
    ]
    for raw in odd_names:
        path = folder / os.fsdecode(raw)
        path.write_bytes(
            b"" if raw.startswith(b"empty") else healthy()["snappy.parquet"] if path.suffix == ".parquet" else text
        )
        paths.append(path)
    locked = folder / "locked.jsonl"
    locked.write_bytes(text)
    locked.chmod(0)
    never = [
        "x" * 300 + ".jsonl",
        "a\0.jsonl",
        "x/" * 3000 + "a.json",
        "\ud800.jsonl",
        "none.parquet",
        "linked.jsonl/a.jsonl",
        ".jsonl",
    ]
    return [*paths, locked, *(folder / name for name in never)]


def nested_values() -> bytes:
    """One line for each nested value, under every key."""
    records = [
        json.dumps(good(number) | {key: "X"}).replace('"X"', value)
        for number, (key, value) in enumerate((key, value) for key in KEYS for value in NESTED)
    ]
    return "\n".join(records).encode()


def columns(seed: int) -> tuple[str, bytes]:
    """Name and content of a Parquet file whose columns are of odd types."""
    import pyarrow
    import pyarrow.parquet

    random_ = random.Random(f"columns/{seed}")
    rows = random_.choice((1, 3, 40))
    table = pyarrow.Table.from_pylist([good(number) for number in range(rows)])
    for _ in range(random_.choice((1, 2, 3))):
        key = random_.choice((*KEYS, "extra"))
        column = random_.choice(_columns())(random_, rows)
        if key in table.column_names and random_.random() < 0.85:
            table = table.set_column(table.column_names.index(key), key, column)
        else:
            table = table.append_column(key, column)  # a second one of that name, if it is there
    sink = io.BytesIO()
    try:
        pyarrow.parquet.write_table(table, sink, compression=random_.choice(["none", "snappy", "zstd"]))
    except pyarrow.ArrowException:  # not all types are written
        return columns(seed + 1_000_000)
    return f"{seed}-columns.parquet", sink.getvalue()


@functools.cache
def _columns() -> list[Callable[[random.Random, int], Any]]:
    import pyarrow

    def of(kind: Any, *values: Any) -> Callable[[random.Random, int], Any]:
        return lambda random_, rows: pyarrow.array([random_.choice([*values, None]) for _ in range(rows)], kind)

    def broken_text(random_: random.Random, rows: int) -> Any:
        pieces = [random_.choice([b"caf\xe9", b"What?", b"\xff\xfe", b"<answer>A</answer>"]) for _ in range(rows)]
        offsets = pyarrow.array([sum(map(len, pieces[:index])) for index in range(rows + 1)], pyarrow.int32())
        return pyarrow.StringArray.from_buffers(rows, offsets.buffers()[1], pyarrow.py_buffer(b"".join(pieces)))

    whole = [text for text in TEXTS if text.isascii()]
    texts = of(pyarrow.string(), *whole, "<answer>A</answer>", "<answer>a piano</answer>")
    return [
        broken_text,
        texts,
        lambda random_, rows: texts(random_, rows).dictionary_encode(),
        of(pyarrow.large_string(), *whole),
        of(pyarrow.binary(), b"\xff", b"A"),
        of(pyarrow.list_(pyarrow.string()), *[row for row in OPTIONS if all(map(str.isprintable, row))]),
        of(pyarrow.list_(pyarrow.list_(pyarrow.string())), [["A. x"], ["B. y"]]),
        of(pyarrow.map_(pyarrow.string(), pyarrow.string()), [("a", "b"), ("a", "c")]),
        of(pyarrow.struct([("a", pyarrow.string()), ("b", pyarrow.int64())]), {"a": "A", "b": 1}),
        of(pyarrow.decimal128(38, 2), decimal.Decimal("1.50"), decimal.Decimal(10**35)),
        of(pyarrow.float64(), float("nan"), float("inf"), 8.0),
        of(pyarrow.int64(), 0, 8, -(2**63)),
        of(pyarrow.uint64(), 2**64 - 1),
        of(pyarrow.bool_(), True, False),
        of(pyarrow.date64(), datetime.date(2026, 1, 1)),
        lambda random_, rows: of(pyarrow.int64(), 2**62, -(2**60), 0)(random_, rows).cast(pyarrow.timestamp("us")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("ns", tz="Europe/Berlin")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("s", tz="+99:99")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("s", tz="../../etc/passwd")),
        of(pyarrow.duration("ns"), 1, 2**62),
        of(pyarrow.time64("ns"), 1),
        of(pyarrow.null()),
    ]
