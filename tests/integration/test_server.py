"""Whole runs whose rollouts come from a real ``transformers serve``: it trains, the server follows the checkpoints, and
a server that dies stops the run in a way that can be resumed. A run without a server can be stopped."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.processes import ModuleProcess
from tests.support.runs import ROOT, read_lines
from vlm_pg.cli import main

httpx2 = pytest.importorskip("httpx2")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

STEPS = 3
QUESTIONS = 2
GENERATIONS = 4
START_SECONDS = 120
KEY = "key-of-this-test"


class Server:
    """``transformers serve`` on a free port of this machine."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._printed_before = ""
        self._process: ModuleProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def log(self) -> str:
        return self._printed_before + (self._process.printed if self._process is not None else "")

    def begin(self) -> None:
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"]
        self._process = ModuleProcess("transformers.cli.transformers", "serve", *arguments)

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx2.get(f"http://127.0.0.1:{self.port}/health")
                return
            except httpx2.TransportError:
                assert time.monotonic() < deadline, self.log
                time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.finish()
            self._printed_before = self.log
            self._process = None

    def requested_models(self) -> list[str]:
        lines = [line for line in self.log.splitlines() if "Request received" in line]
        return [Path(line.split("Model: ")[1].split("@main")[0]).name for line in lines]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    server.begin()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """Questions with and without a picture."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    records: list[dict[str, Any]] = []
    for number in range(4):
        has_picture = number % 2 == 1
        if has_picture:
            pixels = rng.integers(0, 256, (70 + 28 * number, 90, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
        records.append(
            {
                "problem_id": number,
                "problem": "Which colour is shown first?",
                "data_type": "image" if has_picture else "text",
                "problem_type": "multiple choice",
                "options": ["A. red", "B. green", "C. blue", "D. yellow"],
                "solution": f"<answer>{'ABCD'[number]}</answer>",
                "path": f"{number}.png" if has_picture else "",
                "data_source": "test",
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sections = {
        "include": [str(ROOT / "configs" / "models" / "tiny.yaml")],
        "data": {"train": str(folder / "train.jsonl")},
        "media": {"workers": 0, "min_pixels": 3136, "max_pixels": 12544},
        # The words the tiny model was trained on: some of its answers earn a reward.
        "prompt": {"instructions": {"multiple_choice": "Name the colours in order, then answer with a letter."}},
        "rollout": {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": 32,
            "server": {"url": server.url, "retries": 1, "concurrency": 1},
        },
        "training": {
            "steps": STEPS,
            "prompts_per_step": QUESTIONS,
            "checkpoint_every": 1,
            "learning_rate": 1e-4,
            "micro_batch_tokens": 20_000,
        },
        "observe": {"trackers": []},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder / "run.yaml"


@contextmanager
def running(config: Path, *overrides: str) -> Iterator[ModuleProcess]:
    arguments = ["train", str(config), f"run.dir={config.parent / 'run'}", *overrides]
    run = ModuleProcess("vlm_pg.cli", *arguments, environment={"OPENAI_API_KEY": KEY})
    try:
        yield run
    finally:
        run.kill()
        run.finish()


def wait_for(run: ModuleProcess, words: str) -> None:
    deadline = time.monotonic() + 2 * START_SECONDS
    while words not in run.printed:
        assert run.returncode is None and time.monotonic() < deadline, run.printed
        time.sleep(0.05)


def kill_within_step_2(run: ModuleProcess, server: Server) -> None:
    """Once the server has requests of the second step."""
    wait_for(run, "step 1/")
    deadline = time.monotonic() + START_SECONDS
    while len(server.requested_models()) <= QUESTIONS * GENERATIONS:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)
    server.kill()


def test_a_run_survives_its_server(config: Path, server: Server) -> None:
    folder = config.parent / "run"
    server.wait()
    with running(config, "rollout.server.wait_seconds=2", "training.checkpoint_every=0") as first:
        kill_within_step_2(first, server)
        first.finish(START_SECONDS)
        rest = first.printed
    assert first.returncode not in (0, 130)
    assert f"the server at {server.url} does not answer" in rest
    assert f"Server {server.url}: It has not answered for 2 s" in rest and "run.resume=auto" in rest
    # No step was due to be saved: that of the first is what the error saved.
    assert "the checkpoint of step 1 is written" in rest
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1]

    # The server needs longer to start than the run: the run waits for it.
    server.begin()
    with running(config, "run.resume=auto", f"rollout.server.wait_seconds={START_SECONDS}") as second:
        second.finish(2 * START_SECONDS)
        resumed = second.printed
    assert second.returncode == 0, resumed + server.log
    assert "resuming after step 1" in resumed

    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert any(line["grad_norm"] > 0 for line in lines)
    # The trainer scored these rollouts itself: there is nothing to compare.
    assert not any(name.startswith("mismatch/") for line in lines for name in line)
    # The server loaded the weights of every step; those of the interrupted one under two names.
    loaded = dict.fromkeys(name.rpartition("-")[0] for name in server.requested_models())
    assert [*loaded] == ["weights-0", "weights-1", "weights-2"]

    # Tags survive, which the server's own template takes out.
    responses = [line["response"] for line in read_lines(folder / "rollouts.jsonl")]
    assert len(responses) == STEPS * QUESTIONS * GENERATIONS
    assert any("<think>" in text for text in responses)

    for name in ("config.yaml", "report.html", "summary.json"):
        assert KEY not in (folder / name).read_text()


@pytest.mark.matrix
def test_an_evaluation_of_a_server_that_loads_the_checkpoint_is_that_of_this_process(
    config: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy answers to questions with and without a picture; the server is told which weights to load."""
    held = [f"data.eval.held={config.parent / 'train.jsonl'}", f"run.dir={config.parent / 'evaluated' / 'unused'}"]
    held += ["training.torch_threads=1", "eval.thumbnails=0"]
    server.wait()
    assert main(["eval", "--config", str(config), *held]) == 0
    assert "which loads" in capsys.readouterr().out
    assert main(["eval", "--config", str(config), *held, "rollout.engine=in_process"]) == 0
    name = "eval-tiny-qwen2_5-vl"
    found = [
        [
            [(one["text"], one["finish_reason"], one["score"]) for one in row["outputs"]]
            for row in read_lines(config.parent / "evaluated" / folder / "answers_held.jsonl")
        ]
        for folder in (f"{name}-server", name)
    ]
    assert found[0] == found[1] and len(found[0]) == 4
    assert any("<think>" in row[0][0] for row in found[0])
    record = json.loads((config.parent / "evaluated" / f"{name}-server" / "result.json").read_text())["protocol"]
    known = record["decides"]["server"]
    assert known["kind"] == "transformers" and known["model"].endswith("assets/tiny-qwen2_5-vl")


@pytest.mark.matrix
def test_a_run_that_waits_for_its_server_can_be_stopped(config: Path) -> None:
    away = ("rollout.server.url=http://127.0.0.1:9/v1", "rollout.server.wait_seconds=1000")
    with running(config, *away, "observe.report=false") as run:
        wait_for(run, "does not answer")
        run.signal(signal.SIGINT)
        run.finish(START_SECONDS)
        rest = run.printed
    assert run.returncode == 130, rest
    assert "stopped on request before the first step" in rest and "Traceback" not in rest
