"""``vlm-pg eval`` with a judge by URL: decisions beside the rules, and not asked for again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.judge_server import FakeServer
from tests.support.runs import eval_config, read_lines
from vlm_pg.cli import main

pytestmark = pytest.mark.matrix

CODE = re.compile(r"\n(J[0-9A-F]{12}): ")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_an_evaluation_with_a_judge_is_repeated_with_its_decisions(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "4", "--eval", "6"])
    records = tmp_path / "clips" / "eval_seen.jsonl"
    judge = {"url": server.url, "concurrency": 1, "model": "m"}
    path = eval_config(
        tmp_path,
        {"seen": records},
        # Many tokens end an answer, so that few are cut off, about which a judge is not asked.
        rollout={"max_new_tokens": 200, "stop_token_ids": list(range(0, 400, 20))},
        eval={"num_generations": 4, "temperature": 1.0, "judge": judge},
    )
    config = ["eval", "--config", str(path)]
    server.reply = lambda message: f"{CODE.search(message)[1]}: B"  # type: ignore[index]
    assert main(config) == 0
    [folder] = (tmp_path / "runs").glob("eval-*")
    judged = json.loads((folder / "result.json").read_text())["sets"]["seen"]["judged"]
    assert judged["n_asked"] == judged["n_decided"] == len(server.bodies) > 0
    gold = {row["problem_id"]: row["solution"] for row in read_lines(records)}
    decisions = read_lines(folder / "judged_seen.jsonl")
    assert judged["n_raised"] == sum("B" in gold[row["sample_id"]] for row in decisions)
    assert "with the judge m: accuracy" in " ".join(capsys.readouterr().out.split())
    # As a kill leaves it, with one decision of all and half of another line.
    first = (folder / "judged_seen.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "judged_seen.jsonl").unlink()
    (folder / "judged_seen.part.jsonl").write_bytes(first[0] + first[1][:40])
    (folder / "protocol.json").write_text(json.dumps(json.loads((folder / "result.json").read_text())["protocol"]))
    (folder / "result.json").unlink()
    server.bodies.clear()
    assert main(config) == 0
    assert len(server.bodies) == len(decisions) - 1 and read_lines(folder / "judged_seen.jsonl") == decisions
