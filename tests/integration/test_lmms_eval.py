"""lmms-eval asks the tiny model through vlm_pg, by its own command: the answers are those of ``vlm-pg eval``.

Needs lmms-eval beside vlm_pg (docs/guide.md says how it is installed); skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ROOT
from tests.support.runs import read_lines, run_cli, write_config
from vlm_pg.data.records import read_records
from vlm_pg.prompts.builder import question_words
from vlm_pg.prompts.settings import PromptSettings

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed beside vlm_pg")

MODEL, QUESTIONS, LONGEST = str(ROOT / "assets/tiny-qwen2_5-vl"), 6, 12
TASK = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {output_type}
doc_to_visual: !function {module}.visuals
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs:
  max_new_tokens: {longest}
  temperature: {temperature}
  do_sample: {is_sampled}
  until: ["\\n\\n"]
repeats: {repeats}
process_results: !function {module}.results
metric_list:
  - metric: is_right
    aggregation: mean
    higher_is_better: true
metadata:
  version: 0
"""
MODULE = """
def visuals(doc):
    return [doc["video"]]

def results(doc, results):
    return {"is_right": float(results[0].strip() == doc["target"])}
"""


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions on each clip: the second asks in other words."""
    folder = tmp_path_factory.mktemp("clips")
    prepare_embedded(["--out", str(folder), "--train", "4", "--eval", str(QUESTIONS)])
    records = folder / "eval_seen.jsonl"
    more = [row | {"problem_id": f"{row['problem_id']}-2", "problem": "And now?"} for row in read_lines(records)]
    (folder / "manifest.json").unlink()
    with records.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in more)
    return folder


def write_task(folder: Path, clips: Path, **changes: Any) -> None:
    samples, bad = read_records(clips / "eval_seen.jsonl")
    assert not bad
    rows = [
        {
            "video": str(clips / sample.media[0].path),
            "text": question_words(PromptSettings(), sample),
            "target": sample.answer,
            "id": sample.sample_id,
        }
        for sample in samples
    ]
    folder.mkdir()
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.py").write_text(MODULE)
    values = {"task": "flashes", "output_type": "generate_until", "temperature": 0, "is_sampled": False, "repeats": 1}
    text = TASK.format(data=folder / "questions.jsonl", module="words", longest=LONGEST, **values | changes)
    (folder / "flashes.yaml").write_text(text)


def lmms_eval(folder: Path, *more: str) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """What lmms-eval printed, its lines of samples, and its results; of an error it tells, and exits with 0."""
    out = folder / "out"
    command = [
        sys.executable,
        "-m",
        "lmms_eval",
        "--model",
        "vlm_pg",
        "--tasks",
        "flashes",
        "--include_path",
        str(folder),
    ]
    command += ["--model_args", f"pretrained={MODEL},device=cpu,media.workers=0"]
    command += ["--log_samples", "--output_path", str(out), *more]
    values = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment = os.environ | values | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = [line for path in out.rglob("*_samples_flashes.jsonl") for line in read_lines(path)]
    found = [json.loads(path.read_text()) for path in out.rglob("*_results.json")]
    return said, lines, found[0] if found else {}


def test_answers_are_those_of_our_own_evaluation(tmp_path: Path, clips: Path):
    write_task(tmp_path / "task", clips)
    _, lines, results = lmms_eval(tmp_path / "task")
    config = tmp_path / "run.yaml"
    write_config(
        config,
        {
            "run": {"dir": str(tmp_path / "runs" / "unused")},
            "model": {"path": MODEL},
            "data": {"eval": {"seen": str(clips / "eval_seen.jsonl")}},
            "media": {"workers": 0},
            "rollout": {"max_new_tokens": LONGEST},
            "training": {"steps": 1, "torch_threads": 1},
            "observe": {"trackers": [], "report": False},
        },
    )
    done = run_cli("eval", "--config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    [answers] = (tmp_path / "runs").rglob("answers_seen.jsonl")
    ours = [row["outputs"][0]["text"] for row in read_lines(answers)]
    theirs = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    assert len(ours) == 2 * QUESTIONS and len(set(ours)) > 1
    assert theirs == ours
    gold = [row["gold"] for row in read_lines(answers)]
    right = sum(text.strip() == one for text, one in zip(ours, gold, strict=True)) / len(ours)
    assert results["results"]["flashes"]["is_right,none"] == pytest.approx(right)


def test_repeats_share_a_prompt_and_differ(tmp_path: Path, clips: Path):
    """Three samples of each question, which the same command gives again."""
    write_task(tmp_path / "task", clips, temperature=1.0, is_sampled=True, repeats=3)
    _, lines, _ = lmms_eval(tmp_path / "task", "--limit", "2")
    texts = [line["resps"] for line in lines]
    assert len(texts) == 2 and all(len(set(each[0])) > 1 and len(each[0]) == 3 for each in texts)


def test_likelihoods_are_refused_in_words(tmp_path: Path, clips: Path):
    write_task(tmp_path / "task", clips, output_type="loglikelihood")
    said, lines, _ = lmms_eval(tmp_path / "task")
    assert "ranks given ones by their likelihood" in said and not lines
