"""A set that is there already: what it lacks is said, and whether its files are as this program wrote them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from data_pipelines import gsm8k
from data_pipelines.engine import report
from data_pipelines.engine.output_folder import digest_of, program, write_manifest
from vlm_pg.data.files import read_raw
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a set of 30 questions, ten without a gold answer, that was prepared."""
    rows = ({"question": f"How much is {n}?", "answer": f"#### {n}" if n % 3 else "none"} for n in range(30))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--train", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--eval-share", "0"]
    arguments += ["--format", "jsonl"]
    assert gsm8k.main(arguments) == 0
    return arguments


def test_what_was_refused_is_said_and_how_to_try_again(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert gsm8k.main(arguments) == 0
    first, refused, advice = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/out is already prepared: 20 for training, 0 for evaluation."
    assert refused.split() == ["refused", "10", "no_gold_answer"]
    assert "refused.jsonl lists them" in advice and "--overwrite" in advice


def test_more_missing_media_than_are_allowed_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set that was prepared with a larger share is not what is asked for now."""
    prepared = {"train": 20, "eval": 10, "refused": {"missing_media": 10, "corrupt_media": 5}}
    manifest = {"counts": prepared, "program": program()}
    report.print_prepared(tmp_path / "out", manifest, 0.25)
    assert "missing_media" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"media of 10 of 40 questions were not there.*pass --overwrite"):
        report.print_prepared(tmp_path / "out", manifest, 0.24)


def test_the_share_that_is_asked_for_now_counts(arguments: list[str], tmp_path: Path) -> None:
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    manifest["counts"]["refused"] = {"missing_media": 10}
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    assert gsm8k.main([*arguments, "--max-missing-share", "0.4"]) == 0
    with pytest.raises(ConfigError, match=r"At most a share of 0\.3 may be missing"):
        gsm8k.main([*arguments, "--max-missing-share", "0.3"])


def test_another_version_of_the_program_is_told(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    monkeypatch.setattr(report, "program", lambda: "another")
    before = (tmp_path / "out/manifest.json").read_bytes()
    assert gsm8k.main(arguments) == 0
    assert "Another version of this program prepared" in capsys.readouterr().out
    assert (tmp_path / "out/manifest.json").read_bytes() == before


def test_a_folder_whose_manifest_tells_less_can_be_prepared_again(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another version of this program leaves it."""
    path = tmp_path / "out/manifest.json"
    manifest = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in ("program", "written")
    }
    path.write_text(json.dumps(manifest))
    assert gsm8k.main(arguments) == 0 and "Another version" in capsys.readouterr().out
    assert gsm8k.main([*arguments, "--overwrite"]) == 0 and json.loads(path.read_text()).keys() > manifest.keys()


def test_the_program_is_its_sources(tmp_path: Path) -> None:
    packages = {"one": tmp_path / "a", "two": tmp_path / "b"}
    for folder in packages.values():
        (folder / "inner").mkdir(parents=True)
        (folder / "inner/x.py").write_text("x = 1\n")
    first = digest_of(packages)
    (tmp_path / "a/notes.txt").write_text("no program")
    assert digest_of(packages) == first
    (tmp_path / "a/inner/x.py").write_text("x = 2\n")
    second = digest_of(packages)
    (tmp_path / "a/inner/x.py").rename(tmp_path / "a/inner/y.py")
    assert len({first, second, digest_of(packages)}) == 3 and program() == program()


@pytest.mark.parametrize("name", ["train.jsonl", "refused.jsonl"])
def test_a_file_that_was_cut_or_changed_is_not_taken_for_prepared(
    arguments: list[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "out" / name
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    with pytest.raises(ConfigError, match=rf"{name}' is not as it was prepared: it has .* bytes.*Pass --overwrite"):
        gsm8k.main(arguments)
    path.write_bytes(whole.replace(b"a", b"b", 1))
    with pytest.raises(ConfigError, match=r"with another content"):
        gsm8k.main(arguments)
    (tmp_path / "out/summary.html").unlink()
    path.write_bytes(whole)
    assert gsm8k.main(arguments) == 0, "the page is for people"


def test_readers_refuse_what_was_cut(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out/train.jsonl"
    assert len(open_records(path)[0]) == 20
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    said = r"train\.jsonl' has [\d,]+ bytes; it had [\d,]+ when it was prepared.*--overwrite"
    for read in (open_records, read_raw):
        with pytest.raises(ConfigError, match=said):
            read(path)
    path.rename(tmp_path / "out/mine.jsonl")
    assert len(open_records(tmp_path / "out/mine.jsonl")[0]) == 5, "what the manifest does not list is somebody else's"


def test_readers_refuse_a_shard_of_another_set(arguments: list[str], tmp_path: Path) -> None:
    """Whole, but not the one that the manifest tells of: a copy that went wrong."""
    assert gsm8k.main([*arguments[:-2], "--overwrite"]) == 0
    shards = Path(f"{tmp_path}/out:train")
    assert len(open_records(shards)[0]) == 20
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"question": "How much?", "answer": "#### 1"}) + "\n")
    assert gsm8k.main(["--train", str(other), "--eval-share", "0", "--out", str(tmp_path / "other")]) == 0
    name = "train-00000-of-00001.parquet"
    (tmp_path / "out" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    for read in (open_records, read_raw):
        with pytest.raises(ConfigError, match=rf"{name}' has .* when it was prepared"):
            read(shards)


@pytest.mark.parametrize(
    "manifest",
    [
        "no JSON", "[]", '{"fingerprint": 1}', '{"fingerprint": "x", "arguments": {}, "files": {}, "written": []}',
        '{"fingerprint": "x", "arguments": {}, "files": {}, "written": {"a.jsonl": 5, "train.jsonl": {"bytes": "1"}}}',
        '{"step": 5, "files": {"train.jsonl": {"bytes": 1}}}',
    ],
)  # fmt: skip
def test_a_manifest_of_something_else_says_nothing_of_records(
    arguments: list[str], tmp_path: Path, manifest: str
) -> None:
    (tmp_path / "out/manifest.json").write_text(manifest)
    assert len(open_records(tmp_path / "out/train.jsonl")[0]) == 20


def test_a_pipe_or_an_endless_file_is_no_manifest(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out/manifest.json"
    path.unlink()
    os.mkfifo(path)
    assert len(open_records(tmp_path / "out/train.jsonl")[0]) == 20
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert len(open_records(tmp_path / "out/train.jsonl")[0]) == 20


def test_every_file_is_in_the_manifest(arguments: list[str], tmp_path: Path) -> None:
    written = json.loads((tmp_path / "out/manifest.json").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*written["written"], "manifest.json"}
    assert written["program"] == program()
    write_manifest(tmp_path / "out", {}, {"train.jsonl": 20})
    again = json.loads((tmp_path / "out/manifest.json").read_text())
    assert again["written"]["train.jsonl"] == written["written"]["train.jsonl"]
