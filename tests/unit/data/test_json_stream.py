"""JSON read through a moving window: what ``json`` reads at once, wherever the window's edges fall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_pg.data import json_stream
from vlm_pg.data.files import read_raw
from vlm_pg.data.json_stream import read_elements, read_lines, read_members
from vlm_pg.errors import ConfigError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@pytest.fixture(params=[1, 7])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_stream, "_CHUNK", request.param)
    return request.param


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(VALUES, max_size=5),
    members=st.dictionaries(st.text(), VALUES, max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    size=st.sampled_from([1, 2, 5, 31, 1 << 20]),
)
def test_any_text_is_read_as_by_json(
    values: list[Any], members: dict[str, Any], indent: int | None, ascii_only: bool, size: int, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_CHUNK", size)
        for whole in (values, members):
            text = json.dumps(whole, indent=indent, ensure_ascii=ascii_only)
            path.write_text(text, encoding="utf-8", errors="surrogatepass")
            if isinstance(whole, list):
                assert [value for _, value in read_elements(path)] == whole
            else:
                assert {name: value for _, name, value in read_members(path)} == whole


def test_lines_are_those_the_values_begin_on(tmp_path: Path, chunk: int) -> None:
    (tmp_path / "a.json").write_text('\n[\n1, "a\\nb"\n,\n\n{"c":\n[2]},\n3.5\n]\n')
    assert list(read_elements(tmp_path / "a.json")) == [(3, 1), (3, "a\nb"), (6, {"c": [2]}), (8, 3.5)]
    (tmp_path / "b.json").write_text('{\n"x":\n1,\n\n"y": {\n"z": 2}}')
    assert list(read_members(tmp_path / "b.json")) == [(2, "x", 1), (5, "y", {"z": 2})]
    (tmp_path / "c.jsonl").write_text('{"x": 1}\n\n 2\n')
    assert list(read_lines(tmp_path / "c.jsonl")) == [(1, {"x": 1}), (3, 2)]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("[1\n, 2", 2, "a record must be followed by"),
        ("[1\n,\n,2]", 3, "does not parse as JSON"),
        ("[1\n 2]", 2, "a record must be followed by"),
        ("[1]\n\n x", 3, "goes on after the end of the array"),
        ('[{"a": 1},\n{"a"\n: tru}]', 3, "does not parse as JSON"),
        ('[1,\n"abc\n', 2, "does not parse as JSON"),
        ("\n{}", 2, "begins with"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path: Path, chunk: int, text: str, line: int, problem: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"a\.json:{line}: .*{problem}"):
        list(read_elements(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "text", ['{"a": 1, }', '{"a" 1}', "{1: 2}", '{"a": 1} {}', '{"a": 1', "[]", '{"a": 1 "b": 2}', '{"a":}']
)
def test_damaged_objects_are_refused(tmp_path: Path, chunk: int, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json:1"):
        list(read_members(tmp_path / "a.json"))


def test_a_damage_early_in_a_long_file_is_noticed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", 100)
    (tmp_path / "a.json").write_text("[" + "1," * 200 + "x," + "1," * 100_000 + "1]")
    reads: list[int] = []
    original = json_stream._Text._read_on
    monkeypatch.setattr(json_stream._Text, "_read_on", lambda self: reads.append(1) or original(self))
    with pytest.raises(ConfigError, match="does not parse"):
        list(read_elements(tmp_path / "a.json"))
    assert len(reads) < 20


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_text_in_another_encoding_is_called_so(encoding: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('[{"a": 1}]\n'.encode(encoding))
    with pytest.raises(ConfigError, match=r"the file is text in UTF-16 or UTF-32\..* Write the file again as UTF-8\."):
        list(read_raw(tmp_path / name))


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: the file is not UTF-8 text .* Correct that line\."):
        list(read_raw(tmp_path / "a.jsonl"))
