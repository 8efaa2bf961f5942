"""``vlm-pg sample``, ``select`` and ``data.difficulty`` as a user runs them: sample, choose, train."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, ModuleProcess, launch_ranks
from tests.support.runs import read_lines
from tests.support.short_run import train_here
from tests.support.small_run import clips_run
from tests.support.tiny_server import TinyServer
from vlm_pg.cli import main
from vlm_pg.data.sample_sets import open_records

QUESTIONS, BROKEN = 24, 5
# Two questions a batch, so that a kill leaves some of them.
ROLLOUT = {"num_generations": 4, "max_new_tokens": 20, "max_batch_rollouts": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, one of them broken, and the samples of one process in ``samples``."""
    path = tmp_path_factory.mktemp("sample")
    clips_run(path, train=QUESTIONS, rollout=ROLLOUT, run={"dir": str(path / "run")})
    records = read_lines(path / "clips" / "train.jsonl")
    (path / "clips" / records[BROKEN]["path"]).write_bytes(b"no video")
    assert main(["sample", str(path / "run.yaml"), "--out", str(path / "samples")]) == 0
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    return read_lines(out / "samples.jsonl")


def test_every_record_has_a_row_with_scored_responses(folder: Path) -> None:
    found = rows(folder / "samples")
    records = read_lines(folder / "clips" / "train.jsonl")
    assert [row["problem_id"] for row in found] == [record["problem_id"] for record in records]
    broken = found.pop(BROKEN)
    assert broken["p_correct"] is None and broken["responses"] == [] and broken["fault"][0] == "corrupt_media"
    bad = read_lines(folder / "samples" / "bad_samples.jsonl")
    assert [one["sample_id"] for one in bad] == [records[BROKEN]["problem_id"]]
    for row in found:
        assert row.keys() == {"problem_id", "p_correct", "responses"} and len(row["responses"]) == 4
        assert row["p_correct"] == sum(one["accuracy"] for one in row["responses"]) / 4
        for one in row["responses"]:
            assert one["accuracy"] == one["parts"]["accuracy"]
            assert one["reward"] == pytest.approx(one["accuracy"] + 0.1 * one["parts"]["format"])
            assert one["finish_reason"] == "stop" or one["tokens"] == 20
    assert len({row["p_correct"] for row in found}) > 2
    left = {path.name for path in (folder / "samples").iterdir() if not path.name.startswith(".")}
    assert left <= {"samples.jsonl", "protocol.json", "bad_samples.jsonl", "run.lock"}


def test_a_finished_folder_is_left_and_another_protocol_moves_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sample", str(folder / "run.yaml"), "data.limit=4", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    written = (tmp_path / "out/samples.jsonl").stat()
    assert main(arguments) == 0
    assert "is finished" in capsys.readouterr().out and (tmp_path / "out/samples.jsonl").stat() == written
    assert main([*arguments, "rollout.top_p=0.5"]) == 0
    assert "holds an earlier sampling run: moved it to" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*/samples.jsonl"))) == 2


def test_a_killed_run_goes_on_to_the_same_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "killed"
    arguments = ["sample", str(folder / "run.yaml"), "--out", str(out)]
    process = ModuleProcess("vlm_pg.cli", *arguments)
    while process.returncode is None:
        if sum(len(path.read_bytes().splitlines()) for path in out.glob("parts/*.part-0.jsonl")) >= QUESTIONS // 3:
            process.kill()
        time.sleep(0.002)
    assert process.finish().returncode == -9
    assert not (out / "samples.jsonl").exists()
    assert main([*arguments, "rollout.temperature=0.5", "reward.format_weight=0.2"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "holds an unfinished sampling run with another protocol: " in message and "(--out)" in message
    assert "settings.rollout.temperature: 1.0 then, 0.5 now" in message
    assert "settings.reward.format_weight: 0.1 then, 0.2 now" in message
    with (next(out.glob("parts/*"))).open("ab") as file:
        file.write(b'{"problem_id": "half a li')
    assert main(arguments) == 0
    assert (out / "samples.jsonl").read_bytes() == (folder / "samples/samples.jsonl").read_bytes()


def test_two_ranks_write_the_file_of_one(folder: Path, tmp_path: Path) -> None:
    printed = launch_ranks("vlm_pg.cli", "sample", str(folder / "run.yaml"), "--out", str(tmp_path / "two"))
    for name in ("samples.jsonl", "bad_samples.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (folder / "samples" / name).read_bytes()
    assert f"{QUESTIONS} questions, mean accuracy" in printed


def test_blocks_are_joined_in_data_order(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.eval.sample_command.BLOCK_QUESTIONS", 6)
    assert main(["sample", str(folder / "run.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert rows(tmp_path / "out") == rows(folder / "samples")


def test_a_server_samples(folder: Path, tmp_path: Path) -> None:
    server = TinyServer(ROOT / "assets/tiny-qwen2_5-vl")
    of_server = ["rollout.engine=server", f"rollout.server.url={server.url}", "rollout.server.wait_seconds=0"]
    try:
        for name in ("first", "second"):
            # Whatever it trains on.
            overrides = [*of_server, "data.limit=4", "training.objective=dpo", "preference.beta=0.2"]
            assert main(["sample", str(folder / "run.yaml"), *overrides, "--out", str(tmp_path / name)]) == 0
    finally:
        server.stop()
    found = rows(tmp_path / "first")
    assert found == rows(tmp_path / "second")
    assert [len(row["responses"]) for row in found] == [4] * 4
    assert json.loads((tmp_path / "first/protocol.json").read_text())["decides"]["server"]["kind"]


def test_greedy_rollouts_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(folder / "run.yaml"), "rollout.temperature=0"]) == 2
    assert "rollout.temperature is 0, which makes all rollouts of a group alike." in capsys.readouterr().err


def settings_of(printed: str) -> list[str]:
    """The overrides that ``vlm-pg select`` advises."""
    return [word for word in shlex.split(printed.splitlines()[-1]) if word.startswith("data.")]


def test_selected_responses_train(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", str(folder / "samples"), "--out", str(tmp_path / "sft"), "--per-question", "2"]) == 0
    overrides = settings_of(capsys.readouterr().out)
    selected, _ = open_records(Path(f"{tmp_path / 'sft'}:train"))
    right = {
        f"{row['problem_id']}-{number}": one["text"]
        for row in rows(folder / "samples")
        for number, one in enumerate(row["responses"])
        if one["accuracy"] == 1 and one["finish_reason"] == "stop"
    }
    assert len(selected) > 10 and all(right[one.sample_id] == one.response for one in selected)
    ended = train_here(
        folder / "run.yaml",
        *overrides,
        f"run.dir={tmp_path / 'run'}",
        "training.objective=sft",
        "rollout.num_generations=8",
    )
    assert ended.code == 0, ended.printed
    assert all(line["loss"] > 0 and line["groups"] == 3 for line in read_lines(tmp_path / "run/metrics.jsonl"))


def test_pairs_train(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", str(folder / "samples"), "--out", str(tmp_path / "pairs"), "--pairs"]) == 0
    selected, _ = open_records(Path(f"{tmp_path / 'pairs'}:train"))
    assert selected
    by_id = {
        row["problem_id"]: {one["text"]: one["accuracy"] for one in row["responses"]}
        for row in rows(folder / "samples")
    }
    for one in selected:
        accuracy = by_id[one.sample_id.rpartition("-")[0]]
        assert accuracy[one.response] == 1 and accuracy[one.rejected] < 1
    ended = train_here(
        folder / "run.yaml",
        *settings_of(capsys.readouterr().out),
        f"run.dir={tmp_path / 'run'}",
        "training.objective=dpo",
        "training.micro_batch_tokens=300",
        "rollout.num_generations=8",
    )
    assert ended.code == 0, ended.printed


def test_training_uses_records_of_a_difficulty(folder: Path, tmp_path: Path) -> None:
    difficulty = f"data.difficulty={{file: {folder / 'samples'}, low: 0.2, high: 0.8}}"
    ended = train_here(folder / "run.yaml", difficulty, f"run.dir={tmp_path / 'run'}", "training.prompts_per_step=5")
    assert ended.code == 0, ended.printed
    inside = {row["problem_id"] for row in rows(folder / "samples") if 0.2 <= (row["p_correct"] or 0) <= 0.8}
    assert f"data.difficulty: {len(inside)} of {QUESTIONS} records" in " ".join(ended.printed.split())
    used = {json.loads(line)["sample_id"] for line in (tmp_path / "run/rollouts.jsonl").open()}
    assert used and used <= inside


def test_several_sets_keep_their_names(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips, out = folder / "clips", tmp_path / "out"
    sets = f"data.train={{one: {clips}/train.jsonl, two: {clips}/eval_seen.jsonl, none: {clips}/eval_unseen.jsonl}}"
    own = [sets, "data.limit=4", "data.mixture={one: 1, two: 1, none: 0}", "training.prompts_per_step=2"]
    assert main(["sample", str(folder / "run.yaml"), *own, "--out", str(out)]) == 0
    assert [row["dataset"] for row in rows(out)] == ["one"] * 4 + ["two"] * 4
    assert main(["select", str(out), "--out", str(tmp_path / "sft"), "--min-accuracy", "0"]) == 0
    printed = capsys.readouterr().out
    assert f"'data.media_root={{one: {clips}, two: {clips}}}'" in printed
    assert {path.name for path in (tmp_path / "sft").iterdir()} == {"one", "two", "selection.json"}
    difficulty = f"data.difficulty={{file: {out}}}"
    ended = train_here(folder / "run.yaml", *own, difficulty, f"run.dir={tmp_path / 'run'}", "training.steps=1")
    assert ended.code == 0, ended.printed
    assert "data.difficulty: 8 of 8 records" in " ".join(ended.printed.split())
