"""The folder that is written: nothing in it that is read, nothing replaced in it that somebody else put there."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import embedded, generic, gsm8k
from data_pipelines.engine import command
from vlm_pg.errors import ConfigError

ROWS = [{"question": f"How much is {number}?", "answer": f"#### {number}"} for number in range(3)]
MAP = {
    "name": "mine",
    "fields": {
        "problem": "question",
        "data_type": {"constant": "text"},
        "problem_type": {"constant": "numerical"},
        "answer": "answer",
    },
}


def shard(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def lines(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, *arguments: object, said: str = "is read, and lies in --out") -> None:
    """The command, with and without ``--overwrite``, and that every file below a folder is as it was."""
    before = contents(folder)
    for more in ([], ["--overwrite"]):
        with pytest.raises(ConfigError, match=rf"{said}.*Choose another"):
            gsm8k.main([*map(str, arguments), *more])
        assert contents(folder) == before


def test_the_folder_of_the_source_is_not_written_to(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        shard(hub / f"{name}.parquet")
    refused(tmp_path, "--train", f"{hub}:train", "--out", hub)
    refused(tmp_path, "--train", hub, "--out", tmp_path / "hub/../hub")
    refused(tmp_path, "--train", hub, "--out", tmp_path)
    lines(tmp_path / "plain/train.jsonl")
    refused(tmp_path, "--train", tmp_path / "plain/train.jsonl", "--out", tmp_path / "plain", "--format", "jsonl")
    refused(tmp_path, tmp_path / "plain", "--out", tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain/media.zip", "w") as file:
        file.writestr("1.png", b"")
    refused(tmp_path, tmp_path / "plain", "--unpack", "--out", tmp_path / "plain")


def test_links_lead_to_what_is_read(tmp_path: Path) -> None:
    """One in the output folder would be replaced itself; one to it leads to a file that would be."""
    source = lines(tmp_path / "source/train.jsonl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.jsonl").symlink_to(source)
    (tmp_path / "same").symlink_to(tmp_path / "source")
    (tmp_path / "linked.jsonl").symlink_to(source)
    refused(tmp_path, "--train", tmp_path / "out/train.jsonl", "--out", tmp_path / "out")
    refused(tmp_path, "--train", source, "--out", tmp_path / "same")
    refused(tmp_path, "--train", tmp_path / "linked.jsonl", "--out", tmp_path / "source")


def test_a_map_and_a_folder_of_the_hub_are_read_too(tmp_path: Path) -> None:
    lines(tmp_path / "source/train.jsonl")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/map.yaml").write_text(json.dumps(MAP))
    (tmp_path / "map.yaml").write_text(json.dumps(MAP))
    with pytest.raises(ConfigError, match=r"out/map\.yaml' is read, and lies in --out"):
        generic.main(["--map", f"{tmp_path}/out/map.yaml", str(tmp_path / "source"), "--out", str(tmp_path / "out")])
    hub = ["--hub", str(tmp_path / "source"), "--allow-hub", "--out", str(tmp_path / "raw")]
    for folder in ("raw", "raw/inner"):
        with pytest.raises(ConfigError, match=r"raw.*' is read, and lies in --out"):
            generic.main(["--map", str(tmp_path / "map.yaml"), *hub, "--hub-folder", str(tmp_path / folder)])
    assert not (tmp_path / "raw").exists(), "nothing was fetched"


@pytest.mark.parametrize(
    "name",
    ["train-00000-of-00002.parquet", "report.json", "summary.html", "refused.jsonl", "manifest.json", "repeated.jsonl"]
    + ["missing_media.txt"],
)
def test_files_of_somebody_else_are_not_replaced(tmp_path: Path, name: str) -> None:
    source = lines(tmp_path / "train.jsonl")
    lines(tmp_path / "out" / name)
    said = "is not the manifest" if name == "manifest.json" else rf"holds {name}, which no manifest"
    refused(tmp_path / "out", "--train", source, "--out", tmp_path / "out", said=f"({said}|which no manifest)")


def test_what_does_not_go_by_a_name_of_ours_may_lie_there(tmp_path: Path) -> None:
    source = lines(tmp_path / "source.jsonl")
    mine = {"notes.txt": b"mine", "train.jsonl": b"mine"}
    (tmp_path / "out").mkdir()
    for name, content in mine.items():
        (tmp_path / "out" / name).write_bytes(content)
    for more in ([], ["--overwrite"]):
        assert gsm8k.main(["--train", str(source), "--out", str(tmp_path / "out"), *more]) == 0
    assert mine.items() <= contents(tmp_path / "out").items()
    refused(
        tmp_path, "--train", source, "--out", tmp_path / "out", "--format", "jsonl",
        said="(prepared with other arguments|holds train.jsonl, which no manifest)",
    )  # fmt: skip


def test_a_file_that_came_during_the_run_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = lines(tmp_path / "source.jsonl"), tmp_path / "out"
    written = command.write_summary
    monkeypatch.setattr(
        command, "write_summary", lambda *some: (written(*some), (out / "report.json").write_text("me"))
    )
    with pytest.raises(ConfigError, match=r"holds report\.json, which no manifest"):
        gsm8k.main(["--train", str(source), "--out", str(out)])
    assert (out / "report.json").read_text() == "me" and not list(out.glob("*.parquet"))


@pytest.mark.parametrize("moment", ["write_manifest", "settle", "place"])
def test_what_a_killed_run_put_there_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Files of two runs, without the manifest of either."""
    out = tmp_path / "out"
    arguments = ["--train", str(lines(tmp_path / "source.jsonl")), "--out", str(out), "--eval-share", "0"]
    assert gsm8k.main(arguments) == 0
    expected = contents(out)
    lines(tmp_path / "other.jsonl", ROWS[:1])
    other = ["--train", str(tmp_path / "other.jsonl"), "--out", str(out), "--overwrite", "--format", "jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(command, moment, died)
        with pytest.raises(KeyboardInterrupt):
            gsm8k.main(other)
    assert (out / "train.jsonl").exists() == (moment != "place")
    assert gsm8k.main([*arguments, "--overwrite"]) == 0
    assert contents(out) == expected


def died(*arguments: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_the_set_that_is_rendered_here_replaces_its_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--train", "1", "--eval", "1"]
    lines(out / "train.jsonl")
    for more in ([], ["--overwrite"]):
        with pytest.raises(ConfigError, match=r"holds train\.jsonl, which no manifest"):
            embedded.main([*arguments, *more])
    (out / "train.jsonl").unlink()
    for moment in ("write_manifest", "find_prepared"):
        with monkeypatch.context() as patch:
            patch.setattr(embedded, moment, died)
            with pytest.raises(KeyboardInterrupt):
                embedded.main([*arguments, "--overwrite"])
        assert embedded.main(arguments) == 0
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "eval_seen.jsonl", "eval_unseen.jsonl", "manifest.json", "train.jsonl",
    ]  # fmt: skip


def test_what_another_pipeline_prepared_is_not_cleared_for_it(tmp_path: Path) -> None:
    """Whatever lies in its folder under the names of clips."""
    out = tmp_path / "out"
    described = MAP | {"name": "embedded"}
    (tmp_path / "map.yaml").write_text(json.dumps(described))
    source = str(lines(tmp_path / "rows.jsonl", [{"question": "1?", "answer": "1"}]))
    for main, more in ((gsm8k.main, []), (generic.main, ["--map", str(tmp_path / "map.yaml"), "--overwrite"])):
        rows = str(lines(tmp_path / "source.jsonl")) if main is gsm8k.main else source
        assert main(["--train", rows, "--out", str(out), "--format", "jsonl", "--eval-share", "0", *more]) == 0
        (out / "clips/train").mkdir(parents=True, exist_ok=True)
        (out / "clips/train/00000.mp4").write_bytes(b"mine")
        before = contents(out)
        with pytest.raises(ConfigError, match=r"was prepared by another pipeline.*Choose another --out"):
            embedded.main(["--out", str(out), "--train", "1", "--eval", "1", "--overwrite"])
        assert contents(out) == before


def test_of_its_folders_only_what_its_manifest_names_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--eval", "1", "--overwrite", "--train"]
    assert embedded.main([*arguments, "2"]) == 0
    mine = {"clips/train/notes.txt": b"mine", "clips/other/00000.mp4": b"mine"}
    for name, content in mine.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(content)
    assert embedded.main([*arguments, "1"]) == 0
    assert mine.items() <= contents(out).items()
    assert {path.name for path in (out / "clips/train").iterdir()} == {"00000.mp4", "notes.txt"}
    (out / "clips/train/00001.mp4").write_bytes(b"mine")
    before = contents(out)
    with pytest.raises(ConfigError, match=r"holds clips/train/00001\.mp4, which its manifest"):
        embedded.main([*arguments, "2"])
    assert contents(out) == before
