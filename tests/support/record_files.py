"""Seeded record files: structured oddities in every format, damage to healthy files, and what is no file at all."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

from tests.support.mutations import mutation
from tests.support.record_values import KEYS, NESTED, odd, usual

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
    """What stands under the name of a data file and is none, and names that are odd; most exist."""
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
