"""The output folder: locked, complete or refused with the reason, and nothing in it replaced that is not its own."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipelines import embedded, generic, gsm8k, run
from data_pipelines.engine import command, output_folder
from data_pipelines.engine.output_folder import MANIFEST, digest_of, find_prepared, locked, program, write_manifest
from vlm_pg.data.files import read_raw
from vlm_pg.data.sample_sets import open_records
from vlm_pg.errors import ConfigError
from vlm_pg.progress import Bar
from vlm_pg.rewards.rewarder import gold_faults
from vlm_pg.types import BadSample, Sample

ARGUMENTS = {"seed": 0, "train": 8}


def sample(answer: str, answer_kind: str, options: tuple[str, ...] = ()) -> Sample:
    return Sample("1", "How many?", (), options, answer, answer_kind, "test", "test")  # type: ignore[arg-type]


def prepared(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("{}\n")
    write_manifest(folder, ARGUMENTS, {"train.jsonl": 1})
    return folder


def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="why"), locked(tmp_path / "new"):
        raise ConfigError("why")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="why"), locked(tmp_path / "old"):
        raise ConfigError("why")
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["mine.txt"]


def test_many_at_once_hold_it_one_after_the_other(tmp_path: Path) -> None:
    """Also where each removes the lock, and the folder, that others wait for."""
    holding, most = 0, 0
    guard = threading.Lock()

    def hold() -> None:
        nonlocal holding, most
        for _ in range(20):
            with locked(tmp_path / "set"):
                with guard:
                    holding += 1
                    most = max(most, holding)
                time.sleep(0.001)
                with guard:
                    holding -= 1

    with ThreadPoolExecutor(4) as pool:
        for held in [pool.submit(hold) for _ in range(4)]:
            held.result()
    assert most == 1 and not (tmp_path / "set").exists()


def test_a_folder_that_others_remove_and_make_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed and made again by others, between any two questions whether it is there and what it is."""
    folder, mkdir, answers = tmp_path / "set", Path.mkdir, iter((True, True, False))

    def made_by_another(path: Path, *arguments: Any, **options: Any) -> None:
        if next(answers, False):
            raise FileExistsError(path)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", made_by_another)
    monkeypatch.setattr(output_folder.os.path, "lexists", lambda path: True)
    with locked(folder):
        assert folder.is_dir()
    assert not folder.exists()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="it is no folder"), locked(tmp_path / name):
            pass
    with pytest.raises(ConfigError, match=r"Cannot write to --out .* Choose another"), locked(tmp_path / "file/set"):
        pass
    (tmp_path / "home").mkdir()
    (tmp_path / "led").symlink_to(tmp_path / "home")
    with locked(tmp_path / "led"):
        assert (tmp_path / "home" / ".lock").exists()


def test_equal_arguments_find_it_prepared_and_others_or_a_lost_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert not find_prepared(tmp_path, ARGUMENTS), "without a manifest it is not prepared"
    assert find_prepared(prepared(tmp_path), {"train": 8, "seed": 0})
    with pytest.raises(ConfigError, match=r"has \{'seed': 0\}, requested is \{'seed': 1\}.*Choose another --out"):
        find_prepared(tmp_path, {**ARGUMENTS, "seed": 1})
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"lost train\.jsonl since it was prepared.*Pass --overwrite"):
        find_prepared(tmp_path, ARGUMENTS)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arguments": 1, "files": {}, "fingerprint": "x"}', "\udcff"])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"is not the manifest of a prepared folder.*Choose another --out"):
        find_prepared(tmp_path, ARGUMENTS)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Cannot write to --out"), locked(tmp_path / "set"):
        pass


@pytest.mark.parametrize(
    ("answer", "answer_kind", "options"),
    [
        ("B", "multiple_choice", ("A. red", "B. blue")), ("5.0", "numerical", ()), ("no entry", "ocr", ()),
        ("a red lorry on a bridge", "free_form", ()), ("3.25", "regression", ()), ("[12.5, 30]", "time_span", ()),
        ("3.25", "mean_relative_accuracy", ()), ("[10, 20, 30, 40]", "box", ()), ("New York", "exact", ()),
        ("Yes", "yes_no", ()), ("A, B", "multiple_select", ("A. red", "B. blue")),
        ("none", "multiple_select", ("A. red", "B. blue")),
    ],
)  # fmt: skip
def test_good_gold_answers_pass(answer: str, answer_kind: str, options: tuple[str, ...]) -> None:
    assert list(gold_faults([sample(answer, answer_kind, options)])) == [None]


@pytest.mark.parametrize(
    ("answer", "answer_kind", "message"),
    [
        ("many", "numerical", "does not state one number"),
        ("0", "regression", "gold answer is 0"),
        ("see <think>", "ocr", "format 0.0"),
    ],
)
def test_gold_answers_that_cannot_be_rewarded_are_refused(answer: str, answer_kind: str, message: str) -> None:
    good = sample("5", "numerical")
    none, fault, _ = gold_faults([good, sample(answer, answer_kind), good])
    assert none is None and fault is not None and fault.reason == "unscorable_gold_answer"
    assert re.search(f"{message}.*must earn the full reward", str(fault))


def test_progress_is_a_line_a_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("Checking", 100) as bar:
        for _ in range(100):
            bar.advance(1)
    lines = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"Checking: {done} of 100" for done in (25, 50, 75, 100)]


def test_user_errors_of_a_script_are_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConfigError("--seed is -1.")

    assert run(main) == 2
    assert capsys.readouterr().err == "error: --seed is -1.\n"
    assert run(lambda: 0) == 0


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_names_of_files_and_records_may_be_no_unicode(tmp_path: Path, form: str) -> None:
    path = tmp_path / "caf\udce9.jsonl"
    path.write_text(
        '{"question": "How much is 1?", "answer": "#### 1"}\n{"question": "x\\ud83d", "answer": "#### 2"}\n'
    )
    arguments = ["--train", str(path), "--out", str(tmp_path / "out"), "--eval-share", "0", "--format", form]
    assert gsm8k.main(arguments) == 0
    refused = BadSample(**json.loads((tmp_path / "out/refused.jsonl").read_text()))
    assert (refused.sample_id, refused.reason) == ("caf\\udce9-2", "not_unicode")
    assert json.loads((tmp_path / "out/report.json").read_text())["train_files"] == [str(path)]
    assert gsm8k.main(arguments) == 0


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a set of 30 questions, ten without a gold answer, that was prepared."""
    rows = ({"question": f"How much is {n}?", "answer": f"#### {n}" if n % 3 else "none"} for n in range(30))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--train", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--eval-share", "0"]
    arguments += ["--format", "jsonl"]
    assert gsm8k.main(arguments) == 0
    return arguments


def test_a_second_start_reports_refusals_and_how_to_retry(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert gsm8k.main(arguments) == 0
    first, refused, advice = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path}/out is already prepared: 20 for training, 0 for evaluation."
    assert refused.split() == ["refused", "10", "no_gold_answer"]
    assert "refused.jsonl lists them" in advice and "--overwrite" in advice


def test_the_requested_missing_share_applies_to_a_prepared_set(arguments: list[str], tmp_path: Path) -> None:
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    manifest["counts"]["refused"] = {"missing_media": 10}
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    assert gsm8k.main([*arguments, "--max-missing-share", "0.4"]) == 0
    with pytest.raises(ConfigError, match=r"At most a share of 0\.3 may be missing"):
        gsm8k.main([*arguments, "--max-missing-share", "0.3"])


def test_a_manifest_with_fewer_fields_can_be_overwritten(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another version of this program leaves it."""
    path = tmp_path / "out/manifest.json"
    manifest = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in ("program", "written")
    }
    path.write_text(json.dumps(manifest))
    before = path.read_bytes()
    assert gsm8k.main(arguments) == 0 and "Another version" in capsys.readouterr().out
    assert path.read_bytes() == before
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
    message = r"train\.jsonl' has [\d,]+ bytes; it had [\d,]+ when it was prepared.*--overwrite"
    for read in (open_records, read_raw):
        with pytest.raises(ConfigError, match=message):
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
def test_other_manifests_do_not_describe_records(arguments: list[str], tmp_path: Path, manifest: str) -> None:
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


def refused(folder: Path, *arguments: object, message: str = "is read, and lies in --out") -> None:
    """The command, with and without ``--overwrite``, and that every file below a folder is as it was."""
    before = contents(folder)
    for more in ([], ["--overwrite"]):
        with pytest.raises(ConfigError, match=rf"{message}.*Choose another"):
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
def test_foreign_files_are_not_replaced(tmp_path: Path, name: str) -> None:
    source = lines(tmp_path / "train.jsonl")
    lines(tmp_path / "out" / name)
    message = "is not the manifest" if name == "manifest.json" else rf"holds {name}, which no manifest"
    refused(tmp_path / "out", "--train", source, "--out", tmp_path / "out", message=f"({message}|which no manifest)")


def test_files_with_other_names_may_stay_in_the_folder(tmp_path: Path) -> None:
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
        message="(prepared with other arguments|holds train.jsonl, which no manifest)",
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


@pytest.mark.parametrize("moment", ["write_manifest", "settle", "publish"])
def test_files_of_a_killed_run_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
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
    assert (out / "train.jsonl").exists() == (moment != "publish")
    assert gsm8k.main([*arguments, "--overwrite"]) == 0
    assert contents(out) == expected


def died(*arguments: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_the_embedded_set_replaces_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--train", "1", "--eval", "1"]
    lines(out / "train.jsonl")
    for more in ([], ["--overwrite"]):
        with pytest.raises(ConfigError, match=r"holds train\.jsonl, which no manifest"):
            embedded.main([*arguments, *more])
    (out / "train.jsonl").unlink()
    for moment in ("write_manifest", "find_prepared"):
        with monkeypatch.context() as patch:
            patch.setattr(output_folder, moment, died)
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


def test_only_clips_in_the_manifest_are_replaced(tmp_path: Path) -> None:
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
