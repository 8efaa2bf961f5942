"""Sets asked by a protocol, and outputs scored that were made elsewhere, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ROOT
from tests.support.runs import eval_config, read_lines, write_config
from vlm_pg.cli import main

MODEL = str(ROOT / "assets/tiny-qwen2_5-vl")
QUESTIONS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("protocols")
    prepare_embedded(["--out", str(path / "clips"), "--train", "4", "--eval", str(QUESTIONS)])
    # Small clips in few tokens; the details that Video-MME's figures are made by are not theirs.
    own = {"base": "video_mme/lmms", "source": "made up", "aggregation": "mean", "max_new_tokens": 6}
    write_config(path / "own.yaml", own | {"media": {"min_frames": 4, "max_frames": 16}})
    protocols = {"protocols": {"seen": str(path / "own.yaml")}, "controls": ["frames_shuffled"]}
    eval_config(path, {"seen": path / "clips" / "eval_seen.jsonl"}, eval=protocols)
    return path


def result_in(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_set_is_asked_as_its_protocol_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--config", str(folder / "run.yaml"), "eval.lmms_samples=true"]) == 0
    printed = capsys.readouterr().out
    assert "seen: protocol own (made up); 6 questions" in printed
    out = folder / "runs" / "eval-tiny-qwen2_5-vl"
    result = result_in(out)
    assert list(result["sets"]) == ["seen", "seen (frames_shuffled)"]
    assert result["sets"]["seen"]["reader"] == "ours" and result["sets"]["seen"]["format_rate"] is None
    assert result["protocol"]["decides"]["protocols"]["seen"]["max_new_tokens"] == 6
    rows = read_lines(out / "answers_seen.jsonl")
    assert all(row["outputs"][0]["num_tokens"] <= 6 for row in rows)
    assert (out / "report.html").is_file()
    assert [line["doc_id"] for line in read_lines(out / "lmms_samples_seen.jsonl")] == list(range(QUESTIONS))
    # The protocol's words, not the configuration's instructions, are what was asked.
    config = [str(folder / "run.yaml"), "--prompts", "seen"]
    assert main(["eval", "--config", *config]) == 0
    asked = read_lines(folder / "runs" / "unused" / "prompts" / "prompts_seen.jsonl")
    assert len(asked) == QUESTIONS and asked[0]["user"].startswith("Select the best answer to the following")
    longer = [row["shown"]["prompt_tokens"] for row in rows]
    assert main(["eval", "--config", str(folder / "run.yaml"), "eval.protocols={}"]) == 0
    other = read_lines(out / "answers_seen.jsonl")
    assert [row["shown"]["prompt_tokens"] for row in other] != longer
    assert result_in(out)["sets"]["seen"]["reader"] == "strict"


@pytest.mark.matrix
def test_a_protocol_without_clips_shows_whole_videos(folder: Path) -> None:
    """Videos have 8 frames, 2 a second; half a second from the first on has 2 of them."""
    whole = read_lines(folder / "clips" / "eval_seen.jsonl")[:1]
    cut = [row | {"start": 0.0, "end": 0.5} for row in whole]
    shown = []
    for name, rows, clips in (("whole", whole, True), ("cut", cut, True), ("cut", cut, False)):
        records = folder / "clips" / f"{name}.jsonl"
        records.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        own = {"base": "video_mme/lmms", "source": "made up", "aggregation": "mean", "max_new_tokens": 2}
        media = {"min_frames": 4, "max_frames": 16}
        write_config(folder / "clips.yaml", own | {"clips": clips, "media": media})
        sets = [f"data.eval.mine={records}", f"eval.protocols.mine={folder / 'clips.yaml'}", "eval.sets=[mine]"]
        assert main(["eval", "--config", str(folder / "run.yaml"), *sets, "eval.controls=[]"]) == 0
        [row] = read_lines(folder / "runs" / "eval-tiny-qwen2_5-vl" / "answers_mine.jsonl")
        shown.append(row["shown"]["seconds"])
    assert shown == [[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [0.0, 0.5], [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.protocols={seen: video_mme/offical}", "Did you mean video_mme/official?"),
        ("eval.protocols={seen: vsi_bench/official}", "question_type"),
        ("eval.protocols={seen: charades_sta/lmms}", "asks none of the 6 questions"),
        ("eval.protocols={sen: video_mme/official}", "eval.protocols names 'sen', which is not an evaluation set"),
        ("data.eval={'a b': {seen}, a_b: {seen}}", "The answers of 'a b', 'a_b' would have one file"),
    ],
)
def test_protocols_that_do_not_fit_are_refused_before_anything_is_asked(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = str(folder / "clips" / "eval_seen.jsonl")
    others = ["eval.protocols={}", "eval.controls=[]"] if override.startswith("data") else []
    assert main(["eval", "--config", str(folder / "run.yaml"), override.replace("{seen}", records), *others]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_outputs_made_elsewhere_are_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = folder / "clips" / "eval_seen.jsonl"
    rows = read_lines(records)
    golds = {row["problem_id"]: row["solution"].removeprefix("<answer>").removesuffix("</answer>") for row in rows}
    outputs = {name: f"The answer is ({gold})." for name, gold in golds.items()}
    first, *_, last = golds
    outputs[first] = "I cannot tell."
    del outputs[last]
    (folder / "outputs.json").write_text(json.dumps(outputs))
    assert main(["score", str(records), str(folder / "outputs.json")]) == 0
    printed = capsys.readouterr()
    figures = result_in(folder / "scored-outputs")["sets"]["outputs"]
    assert (figures["n"], figures["n_no_output"], figures["n_unparsed"]) == (QUESTIONS - 1, 1, 1)
    assert figures["accuracy"] == pytest.approx((QUESTIONS - 2) / (QUESTIONS - 1))
    assert "1 of 6 questions have no output" in printed.out
    assert (folder / "scored-outputs" / "report.html").is_file()
    rules = ["--protocol", str(folder / "own.yaml"), "--reader", "published", "--out", str(folder / "by-rule")]
    assert main(["score", str(records), str(folder / "outputs.json"), *rules]) == 0
    assert result_in(folder / "by-rule")["sets"]["own"]["reader"] == "video_mme/lmms"
    both = ["--compare", str(folder / "by-rule")]
    (folder / "by-rule" / "answers_own.jsonl").rename(folder / "by-rule" / "answers_outputs.jsonl")
    capsys.readouterr()
    assert main(["report", str(folder / "scored-outputs"), *both]) == 0
    assert (
        "outputs: 0.800, +0.000 against by-rule, no interval since all questions differ alike"
        in capsys.readouterr().out
    )
    (folder / "none.json").write_text(json.dumps({"x": "A"}))
    assert main(["score", str(records), str(folder / "none.json")]) == 2
    assert "None of the 1 outputs belongs to one of the 6 questions" in capsys.readouterr().err
    assert main(["score", str(records), str(folder / "outputs.json"), "--reader", "published"]) == 2
    assert "there is none for these records" in capsys.readouterr().err
