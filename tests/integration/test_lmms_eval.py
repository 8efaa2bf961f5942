"""lmms-eval asks the tiny model through vlm_pg, by its own command: the answers are those of ``vlm-pg eval``.

Needs lmms-eval beside vlm_pg (docs/evaluation.md says how it is installed); skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.processes import ROOT
from tests.support.runs import eval_config, read_lines, run_cli
from vlm_pg.data.records import read_records
from vlm_pg.errors import ConfigError, VlmPgError
from vlm_pg.prompts.builder import question_words
from vlm_pg.prompts.settings import PromptSettings

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed beside vlm_pg")
from lmms_eval.api.instance import Instance

from vlm_pg.integrations.lmms_eval import VlmPg

MODEL, QUESTIONS, LONGEST = str(ROOT / "assets/tiny-qwen2_5-vl"), 6, 12
TASK = """
task: flashes
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_visual: !function {module}.visuals
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs:
  max_new_tokens: {longest}
  temperature: 0
  do_sample: false
  until: ["\\n\\n"]
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
    return {"is_right": float("yellow" in results[0])}
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


def write_task(folder: Path, clips: Path) -> None:
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
    text = TASK.format(data=folder / "questions.jsonl", module="words", longest=LONGEST)
    (folder / "flashes.yaml").write_text(text)


def lmms_eval(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Its lines of samples and its results. Of an error it tells, and exits with 0."""
    out = folder / "out"
    command = [sys.executable, "-m", "lmms_eval", "--model", "vlm_pg", "--tasks", "flashes"]
    command += ["--include_path", str(folder)]
    command += ["--model_args", f"pretrained={MODEL},device=cpu,media.workers=0"]
    command += ["--log_samples", "--output_path", str(out), "--reasoning_tags", "none"]
    values = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    values["CUDA_VISIBLE_DEVICES"] = ""
    environment = os.environ | values | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for path in out.rglob("*_samples_flashes.jsonl") for line in read_lines(path)]
    found = [json.loads(path.read_text()) for path in out.rglob("*_results.json")]
    assert len(found) == 1, done.stdout + done.stderr
    return lines, found[0]


def test_answers_are_those_of_our_own_evaluation(tmp_path: Path, clips: Path):
    write_task(tmp_path / "task", clips)
    lines, results = lmms_eval(tmp_path / "task")
    sets = {"seen": clips / "eval_seen.jsonl"}
    config = eval_config(tmp_path, sets, rollout={"max_new_tokens": LONGEST})
    done = run_cli("eval", "--config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    [answers] = (tmp_path / "runs").rglob("answers_seen.jsonl")
    ours = [row["outputs"][0]["text"] for row in read_lines(answers)]
    theirs = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    assert len(ours) == 2 * QUESTIONS and len(set(ours)) > 1
    assert theirs == ours
    # The task's own measure: a random model is never right, but it often writes this word.
    share = sum("yellow" in text for text in ours) / len(ours)
    assert share > 0.0 and results["results"]["flashes"]["is_right,none"] == pytest.approx(share)


@pytest.fixture(scope="module")
def model(clips: Path) -> Iterator[VlmPg]:
    """In this process, with questions on two clips and on one that is not there."""
    model = VlmPg(MODEL, device="cpu", batch_size="1", **{"media.workers": 0})
    videos = [row["path"] for row in read_lines(clips / "eval_seen.jsonl")[:2]]
    docs = [{"video": str(clips / name)} for name in (*videos, "absent.mp4")]
    model.task_dict = {"flashes": {"test": docs}}
    yield model
    model.clean()


def request(doc_id: int, repeats: int = 1, **generation: Any) -> Instance:
    def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": "Look:"}, {"type": "video", "url": doc["video"]}]
        return [{"role": "user", "content": [*content, {"type": "text", "text": "What is shown?"}]}]

    arguments = ("", messages, {"max_new_tokens": LONGEST, **generation}, doc_id, "flashes", "test")
    metadata = {"task": "flashes", "doc_id": doc_id, "repeats": repeats}
    return Instance("generate_until", arguments, 0, metadata)


def answers(model: VlmPg, requests: list[Instance]) -> list[str]:
    return [result.text for result in model.generate_until(requests)]


def test_repeats_are_samples_of_one_question(model: VlmPg):
    """Each request gets its own of the samples, in the order of the requests, and the same when asked again."""
    first, second = request(0, 4, temperature=1.0), request(1, 4, temperature=1.0)
    mixed = [first, second, first, second, first, second, first, second]
    texts = answers(model, mixed)
    assert len(set(texts[::2])) > 1 and len(set(texts[1::2])) > 1
    assert answers(model, [first] * 4) == texts[::2] and answers(model, [second] * 4) == texts[1::2]


def test_greedy_repeats_are_alike_and_requests_differ_by_what_they_ask(model: VlmPg):
    short = request(0, max_new_tokens=3)
    texts = answers(model, [request(0), short, request(0), request(1)])
    assert texts[0] == texts[2] and texts[0].startswith(texts[1]) and texts[1] != texts[0]
    results = model.generate_until([short])
    assert results[0].token_counts.output_tokens == 3


def test_what_cannot_be_asked_stops_with_its_name(model: VlmPg):
    with pytest.raises(VlmPgError, match="flashes/test/2: missing_media"):
        model.generate_until([request(0), request(2)])
    with pytest.raises(NotImplementedError, match="ranks given ones by their likelihood"):
        model.loglikelihood([])
    with pytest.raises(NotImplementedError, match="asks in several rounds"):
        model.generate_until_multi_round([])


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="was started on 2 processes"):
        VlmPg(MODEL)
