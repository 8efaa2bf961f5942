"""``vlm-pg eval`` that is killed, shared by ranks, given a broken video or repeated: the same answers, file by file."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ROOT, ModuleProcess, launch_ranks, start_ranks
from tests.support.runs import eval_config, read_lines, run_cli
from vlm_pg.cli import main

QUESTIONS, PER_BATCH = 64, 4
MODEL = str(ROOT / "assets/tiny-qwen2_5-vl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 clips with a question each, another set of the same clips in which one is broken, and a configuration."""
    path = tmp_path_factory.mktemp("eval")
    prepare_embedded(["--out", str(path / "clips"), "--train", "4", "--eval", str(QUESTIONS)])
    records = read_lines(path / "clips" / "eval_seen.jsonl")
    (path / "clips" / "broken.mp4").write_bytes(b"no video")
    records[37] = records[37] | {"path": "broken.mp4"}
    (path / "clips" / "one_broken.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    eval_config(
        path,
        {"seen": path / "clips" / "eval_seen.jsonl"},
        run={"dir": str(path / "runs" / "whole" / "unused")},
        rollout={"max_new_tokens": 6, "max_batch_rollouts": 2 * PER_BATCH},
        eval={"num_generations": 2, "temperature": 1.0, "thumbnails": 2},
    )
    return path


def arguments(folder: Path, run: str, *overrides: str) -> list[str]:
    return ["eval", "--config", str(folder / "run.yaml"), f"run.dir={folder / 'runs' / run / 'unused'}", *overrides]


def evaluate(folder: Path, run: str, *overrides: str, code: int = 0) -> tuple[Path, str]:
    done = run_cli(*arguments(folder, run, *overrides))
    assert done.returncode == code, done.stdout + done.stderr
    return results_of(folder, run), done.stdout + done.stderr


def results_of(folder: Path, run: str) -> Path:
    return folder / "runs" / run / f"eval-{Path(MODEL).name}-n2-t1"


def figures(out: Path) -> Any:
    return json.loads((out / "result.json").read_text())["sets"]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    return evaluate(folder, "whole")[0]


def test_a_result_says_what_it_depends_on(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["sets"]["seen"]["n"] == QUESTIONS
    decides = result["protocol"]["decides"]
    assert decides["settings"]["media"]["fps"] and len(decides["weights"]) == len(decides["chat_template"]) == 64
    assert len(decides["records"]["seen"]) == 64 and "torch" in decides["versions"]
    rows = read_lines(whole / "answers_seen.jsonl")
    assert len(rows) == QUESTIONS and all(len(row["outputs"]) == 2 for row in rows)
    assert [len(row["shown"]["frames"]) for row in rows[:3]] == [1, 1, 0]
    assert (whole / rows[0]["shown"]["frames"][0]).is_file()
    assert not list(whole.glob("*.part-*")) and not (whole / "protocol.json").exists()


def killed_at(folder: Path, run: str, lines: int, later_seconds: float, *overrides: str) -> ModuleProcess:
    """An evaluation that is killed when it has so many lines of answers, and a moment later."""
    process = ModuleProcess("vlm_pg.cli", *arguments(folder, run, *overrides))
    out = results_of(folder, run)
    while process.returncode is None:
        if sum(len(path.read_bytes().splitlines()) for path in out.glob("answers_seen.part-*.jsonl")) >= lines:
            time.sleep(later_seconds)
            process.kill()
            break
        time.sleep(0.002)
    process.finish()
    return process


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.matrix)])
def test_a_killed_evaluation_resumes_to_the_same_answers(folder: Path, whole: Path, kills: int) -> None:
    random_numbers = random.Random(kills)
    expected = (whole / "answers_seen.jsonl").read_bytes()
    resumed = 0
    for number in range(kills):
        run = f"killed-{kills}-{number}"
        lines = random_numbers.randrange(QUESTIONS) if kills > 1 else QUESTIONS // 3
        killed_at(folder, run, lines, random_numbers.random() * 0.05)
        out, printed = evaluate(folder, run)
        resumed += "going on: " in printed
        assert (out / "answers_seen.jsonl").read_bytes() == expected
        assert figures(out) == figures(whole)
        assert not list(out.glob("*.part-*"))
        shutil.rmtree(folder / "runs" / run)
    assert resumed > kills // 2  # a kill before the first answer, or after the last, leaves nothing to resume


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_ranks_share_the_questions(folder: Path, whole: Path, ranks: int) -> None:
    run = f"ranks-{ranks}"
    launch_ranks("vlm_pg.cli", *arguments(folder, run), ranks=ranks)
    out = results_of(folder, run)
    assert (out / "answers_seen.jsonl").read_bytes() == (whole / "answers_seen.jsonl").read_bytes()
    assert figures(out) == figures(whole)


@pytest.mark.matrix
def test_questions_on_one_video_are_dealt_together(folder: Path) -> None:
    """Three on each video, scattered over the file: two ranks, and one that goes on where a kill was, answer as one."""
    records = read_lines(folder / "clips" / "eval_seen.jsonl")[:24]
    for number, record in enumerate(records):
        record["path"] = records[number % 8]["path"]
    shared = folder / "clips" / "three_each.jsonl"
    shared.write_text("".join(json.dumps(record) + "\n" for record in records))
    own = [f"data.eval.seen={shared}"]
    out, _ = evaluate(folder, "three", *own)
    expected = (out / "answers_seen.jsonl").read_bytes()
    # 4 questions to a batch, 3 on a video: a batch for each video
    content = [row["shown"]["content"] for row in read_lines(out / "answers_seen.jsonl")]
    assert content[:8] == content[8:16] == content[16:] and len(set(content)) == 8
    launch_ranks("vlm_pg.cli", *arguments(folder, "three-ranks", *own), ranks=2)
    assert (results_of(folder, "three-ranks") / "answers_seen.jsonl").read_bytes() == expected
    killed_at(folder, "three-killed", 7, 0.0, *own)
    out, _ = evaluate(folder, "three-killed", *own)
    assert (out / "answers_seen.jsonl").read_bytes() == expected


@pytest.mark.matrix
def test_one_process_goes_on_where_two_were_killed(folder: Path, whole: Path) -> None:
    running = start_ranks("vlm_pg.cli", *arguments(folder, "fewer"), ranks=2)
    out = results_of(folder, "fewer")
    while sum(len(path.read_bytes().splitlines()) for path in out.glob("answers_seen.part-*.jsonl")) < 16:
        assert running[0].returncode is None
        time.sleep(0.002)
    for process in running:
        process.kill()
    for process in running:
        process.finish()
    out, printed = evaluate(folder, "fewer")
    assert "going on: " in printed
    assert (out / "answers_seen.jsonl").read_bytes() == (whole / "answers_seen.jsonl").read_bytes()


@pytest.mark.matrix
def test_a_broken_video_costs_its_own_question(folder: Path, whole: Path) -> None:
    out, _ = evaluate(folder, "broken", f"data.eval.seen={folder}/clips/one_broken.jsonl")
    rows, others = read_lines(out / "answers_seen.jsonl"), read_lines(whole / "answers_seen.jsonl")
    assert rows[37]["fault"][0] == "corrupt_media" and rows[37]["outputs"] == []
    assert [row["outputs"] for row in rows[:37] + rows[38:]] == [row["outputs"] for row in others[:37] + others[38:]]
    assert figures(out)["seen"]["n_bad_media"] == 1
    assert [line["sample_id"] for line in read_lines(out / "bad_samples.jsonl")] == [rows[37]["sample_id"]]


@pytest.mark.matrix
def test_a_fault_that_was_put_right_is_asked_again(folder: Path, whole: Path) -> None:
    clips = folder / "mended"
    shutil.copytree(folder / "clips", clips)
    name = read_lines(clips / "eval_seen.jsonl")[3]["path"]
    good = (clips / name).read_bytes()
    (clips / name).write_bytes(b"no video")
    own = [f"data.eval.seen={clips}/eval_seen.jsonl"]
    killed_at(folder, "mended", QUESTIONS // 2, 0.0, *own)
    (clips / name).write_bytes(good)
    out, printed = evaluate(folder, "mended", *own)
    assert "going on: " in printed and figures(out)["seen"]["n_bad_media"] == 0
    rows, others = read_lines(out / "answers_seen.jsonl"), read_lines(whole / "answers_seen.jsonl")
    assert [row["outputs"] for row in rows] == [row["outputs"] for row in others]


def test_a_result_is_repeated(folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_cli("eval", "--like", str(whole / "result.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 of 64 questions equal" in done.stdout and "not made equal" not in done.stdout
    again = whole.with_name(f"{whole.name}-again")
    assert (again / "answers_seen.jsonl").read_bytes() == (whole / "answers_seen.jsonl").read_bytes()
    # A repetition can be repeated: its own folder is not that of the result that it is compared with.
    result = json.loads((again / "result.json").read_text())
    result["sets"]["seen"]["accuracy"] = 0.75
    (again / "result.json").write_text(json.dumps(result))
    done = run_cli("eval", "--like", str(again / "result.json"), "run.seed=1")
    assert done.returncode == 1 and "accuracy 0.7500 and" in done.stdout, done.stdout + done.stderr
    assert "not made equal: seed: 0 then, 1 now" in done.stdout
    for arguments, message in (
        ([MODEL, "--like", str(whole / "result.json")], "Leave CHECKPOINT and --config out"),
        (["--like", str(folder / "run.yaml")], "The result.json of an evaluation is expected"),
    ):
        assert main(["eval", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
