"""Parquet files whose columns are of odd types, from a seed."""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import random
from collections.abc import Callable
from typing import Any

from tests.support.record_files import good
from tests.support.record_values import KEYS, OPTIONS, TEXTS


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
        offsets = [sum(map(len, pieces[:index])) for index in range(rows + 1)]
        places = pyarrow.array(offsets, pyarrow.int32()).buffers()[1]
        return pyarrow.StringArray.from_buffers(rows, places, pyarrow.py_buffer(b"".join(pieces)))

    whole = [text for text in TEXTS if text.isascii()]
    texts = of(pyarrow.string(), *whole, "<answer>A</answer>", "<answer>a piano</answer>")
    days = of(pyarrow.date64(), datetime.date(2026, 1, 1))
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
        days,
        lambda random_, rows: of(pyarrow.int64(), 2**62, -(2**60), 0)(random_, rows).cast(pyarrow.timestamp("us")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("ns", tz="Europe/Berlin")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("s", tz="+99:99")),
        lambda random_, rows: of(pyarrow.int64(), 1)(random_, rows).cast(pyarrow.timestamp("s", tz="../../etc/passwd")),
        of(pyarrow.duration("ns"), 1, 2**62),
        of(pyarrow.time64("ns"), 1),
        of(pyarrow.null()),
    ]
