"""``vlm-pg eval`` with a judge by URL, killed while it judges: what was decided is not asked again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.judge_server import FakeServer
from tests.support.processes import ROOT, ModuleProcess
from tests.support.runs import read_lines, run_cli, write_config

pytestmark = pytest.mark.matrix

CLIPS, QUESTIONS_EACH, BEFORE = 4, 6, 1
CODE = re.compile(r"\n(J[0-9A-F]{12}): ")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_a_killed_judgement_goes_on(tmp_path: Path, server: FakeServer):
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "4", "--eval", str(CLIPS)])
    records = tmp_path / "clips" / "repeated.jsonl"
    records.write_text(
        "".join(
            json.dumps(row | {"problem_id": f"{row['problem_id']}-{number}"}) + "\n"
            for row in read_lines(tmp_path / "clips" / "eval_seen.jsonl")
            for number in range(QUESTIONS_EACH)
        )
    )
    config = tmp_path / "run.yaml"
    write_config(
        config,
        {
            "run": {"dir": str(tmp_path / "runs" / "unused")},
            "model": {"path": str(ROOT / "assets/tiny-qwen2_5-vl")},
            "data": {"eval": {"seen": str(records)}},
            "media": {"workers": 0},
            # Most tokens end an answer, so that few are cut off, about which a judge is not asked.
            "rollout": {"max_new_tokens": 200, "stop_token_ids": list(range(0, 400, 20))},
            "training": {"steps": 1, "torch_threads": 1},
            "eval": {
                "num_generations": 4,
                "temperature": 1.0,
                "judge": {"url": server.url, "concurrency": 1, "model": "m"},
            },
            "observe": {"trackers": [], "report": False},
        },
    )
    end, stuck = threading.Event(), threading.Event()

    def reply(message: str) -> str:
        if len(server.bodies) > BEFORE:
            stuck.set()
            end.wait(600)
        return f"{CODE.search(message)[1]}: NONE"  # type: ignore[index]

    server.reply = reply
    process = ModuleProcess("vlm_pg.cli", "eval", "--config", str(config))
    assert stuck.wait(60), process.printed
    process.kill()
    process.finish()
    end.set()
    first = [body["messages"][0]["content"] for body in server.bodies]
    server.bodies.clear()
    server.reply = lambda message: f"{CODE.search(message)[1]}: B"  # type: ignore[index]
    done = run_cli("eval", "--config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    second = [body["messages"][0]["content"] for body in server.bodies]
    assert not set(first[:BEFORE]) & set(second) and first[BEFORE] in second
    [folder] = (tmp_path / "runs").glob("eval-*")
    judged = json.loads((folder / "result.json").read_text())["sets"]["seen"]["judged"]
    assert judged["n_asked"] == judged["n_decided"] == len(second) + BEFORE
    decisions = read_lines(folder / "judged_seen.jsonl")
    assert [row["judged"]["answer"] for row in decisions].count(None) == BEFORE == judged["n_none"]
    gold = {row["problem_id"]: row["solution"] for row in read_lines(records)}
    raised = sum(row["judged"]["answer"] == "B" and "B" in gold[row["sample_id"]] for row in decisions)
    assert judged["n_raised"] == raised and "with the judge m: accuracy" in " ".join(done.stdout.split())
