"""Damaged folders of a data set are read or refused in words: the process that reads them survives all of them.

Arrow's own files say where each value lies, so damage may point anywhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_sets import png, records, saved_of_paths
from tests.support.mutations import damaged_payload, mutation
from tests.support.processes import ROOT

pytestmark = pytest.mark.matrix

ROWS = 120
# Reads the folder again and again, each time with another file in it; the answers are one line each.
READER = """
import json, resource, sys
from pathlib import Path
from vlm_pg.data.files import read_raw
from vlm_pg.data.fields import Unreadable
from vlm_pg.errors import ConfigError
import datasets  # its own memory is not the files'
folder, names = Path(sys.argv[1]), sys.argv[2:]
limit = 8 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name in names:
    (folder / "data.arrow").write_bytes((folder / name).read_bytes())
    try:
        rows = [row for _, row in read_raw(folder)]
        odd = sum(isinstance(value, Unreadable) for row in rows for value in row.values())
        answer = {"rows": len(rows), "odd": odd, "text": len(repr(rows))}
    except ConfigError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1500 and "data.arrow" in message, message
        answer = {"refused": message}
    print(json.dumps(answer), flush=True)
"""


def bases(folder: Path) -> dict[str, bytes]:
    """Healthy Arrow files: records, and rows with media, lists, numbers, times and missing values."""
    import datasets

    text = datasets.Value("string")
    plain = dict.fromkeys(("problem", "data_type", "problem_type", "process", "solution", "path", "data_source"), text)
    described = plain | {"problem_id": datasets.Value("int64"), "options": datasets.List(text)}
    media = described | {
        "image": datasets.Image(),
        "clips": datasets.List(datasets.Video()),
        "time": datasets.Value("timestamp[ms]"),
        "label": datasets.ClassLabel(names=["a", "b"]),
        "nested": {"a": datasets.List(text), "b": datasets.Value("float32")},
    }
    inside = {"bytes": png(3), "path": "a.png"}
    rows = [
        record
        | {"image": inside if number % 2 else None, "clips": [inside] * (number % 3), "label": number % 2}
        | {"nested": {"a": ["x", None], "b": 0.5}, "options": [f"é {number}"] * (number % 5)}
        | {"time": 1_700_000_000_000 + number}
        for number, record in enumerate(records(ROWS))
    ]
    made = {}
    for name, features, content in (("records", described, records(ROWS)), ("media", media, rows)):
        path = saved_of_paths(folder / name, content, datasets.Features(features))
        made[name] = (path / "data-00000-of-00001.arrow").read_bytes()
    return made


def read_damaged(folder: Path, seeds: range) -> list[dict[str, int | str]]:
    originals = bases(folder / "bases")
    work = folder / "work"
    work.mkdir()
    (work / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    names = [*originals]
    for name, data in originals.items():
        (work / name).write_bytes(data)
    for seed in seeds:
        data = originals["media"]
        data = mutation(originals, seed)[1] if seed % 2 else damaged_payload(data, f"folders/{seed}")
        (work / str(seed)).write_bytes(data)
        names.append(str(seed))
    done = subprocess.run(
        [sys.executable, "-c", READER, str(work), *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{names[len(answers)]}: {done.returncode} {done.stderr[-2000:]}"
    assert [answer["rows"] for answer in answers[:2]] == [ROWS, ROWS]
    return answers[2:]


@pytest.mark.parametrize("start", range(0, 6000, 500))
def test_damaged_files(start: int, tmp_path: Path) -> None:
    answers = read_damaged(tmp_path, range(start, start + 500))
    refused = sum("refused" in answer for answer in answers)
    assert len(answers) == 500 and refused > 60 and sum(answer.get("rows") == ROWS for answer in answers) > 60
    assert any(answer.get("odd") for answer in answers)
