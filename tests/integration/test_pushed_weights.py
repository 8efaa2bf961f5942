"""Whole runs whose weights a server follows: on several ranks, and while the server dies or its transfers break off.

The server records under which weights it has sampled each response: none is trained on as sampled under others."""

from __future__ import annotations

import random
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from data_pipelines.embedded import main as prepare_embedded
from tests.support.odd_server import Reply
from tests.support.processes import ModuleProcess, launch_ranks, start_ranks
from tests.support.runs import deepspeed_config, read_lines
from tests.support.short_run import short_run, train_here
from tests.support.tiny_server import WeightServer
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.weights import Version

pytestmark = pytest.mark.matrix

TRANSFERS = ("folder", "broadcast")
STEPS, QUESTIONS, DEATHS, CUTS = 12, 2, 20, 10


class MortalServer(WeightServer):
    """``dies``: at these requests, counted from 0, it is killed; ``breaks``: at these it closes the connection alone.

    ``sampled``: version of the weights, question and response of all that it has sampled.
    """

    def __init__(self, model: Path, dies: frozenset[int] = frozenset(), breaks: frozenset[int] = frozenset()):
        self.dies, self.breaks, self.number = dies, breaks, 0
        self.sampled_under: set[tuple[str, str, str]] = set()
        super().__init__(model)
        self.before_control = lambda path: self._end() if path != "/openapi.json" else None

    def _end(self) -> Reply | None:
        number, self.number = self.number, self.number + 1
        if number in self.dies:
            self.restart()
        return Reply({}, {}, silent=True) if number in self.dies | self.breaks else None

    def generate(self, body: dict[str, Any]) -> Reply:
        return self._end() or super().generate(body)

    def reply(self, body: dict[str, Any]) -> Reply:
        with self._policy_lock:
            if (end := self._end()) is not None:
                return end
            reply = super().reply(body)
            text = body["messages"][-1]["content"][-1]["text"]
            for choice in reply.value["choices"]:
                self.sampled_under.add((self.version.split("-")[-2:][0], text, choice["message"]["content"]))
            return reply


def config_of(
    folder: Path,
    server_url: str,
    staleness: int = 0,
    transfer: str = "folder",
    in_flight: str = "finish",
    **training: Any,
) -> Path:
    settings = {"url": server_url, "retries": 2, "wait_seconds": 20.0, "timeout_seconds": 60.0, "transfer": transfer}
    return short_run(
        folder,
        rollout={
            "engine": "server",
            "num_generations": 4,
            "max_new_tokens": 8,
            "staleness": staleness,
            "in_flight": in_flight,
            "server": settings,
        },
        training={"steps": STEPS, "prompts_per_step": QUESTIONS, "checkpoint_every": 0, "learning_rate": 1e-3}
        | training,
        observe={"trackers": [], "report": False, "rollouts_per_step": 99, "thumbnails": 0},
    )


def assert_trained_on_its_own(folder: Path, server: MortalServer, staleness: int = 0) -> int:
    """Every rollout was sampled under the weights that it names, which are recent enough; how many there are."""
    records = read_lines(folder / "run" / "rollouts.jsonl")
    for record in records:
        assert 0 <= record["step"] - 1 - record["policy_version"] <= staleness
        version, response = str(record["policy_version"]), record["response"]
        assert any(
            (under, said) == (version, response) and record["question"] in asked
            for under, asked, said in server.sampled_under
        ), record
    return len(records)


def train_to_the_end(config: Path, server: MortalServer) -> int:
    """Resumed whenever it ended by naming the server; how often."""
    for ends in range(DEATHS):
        ended = train_here(config)
        if ended.code == 0:
            server.stop()
            return ends
        assert server.url in ended.printed and "run.resume=auto" in ended.printed
        assert "Traceback" not in ended.printed
    raise AssertionError(ended.printed)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of ``short_run``, made before its server starts."""
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)
    short_run(tmp_path)
    return tmp_path / "model"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_run_outlives_a_server_that_dies_again_and_again(
    model: Path, tmp_path: Path, seed: int, transfer: str
) -> None:
    requests = range(2, STEPS * 12)
    server = MortalServer(model, dies=frozenset(random.Random(seed).sample(requests, DEATHS)))
    train_to_the_end(config_of(tmp_path, server.url, transfer=transfer), server)
    assert server.number > max(server.dies) and assert_trained_on_its_own(tmp_path, server) == STEPS * QUESTIONS * 4


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_rollouts_are_as_old_as_allowed(model: Path, tmp_path: Path, staleness: int) -> None:
    """They have the questions of a run that does not sample ahead; a step that loses its server is sampled again."""
    questions = []
    for steps_ahead in (0, staleness):
        (folder := tmp_path / str(steps_ahead)).mkdir()
        server = MortalServer(model, dies=frozenset((25, 50, 75) if steps_ahead else ()))
        ended = train_here(config_of(folder, server.url, steps_ahead), f"model.path={model}")
        server.stop()
        assert ended.code == 0, ended.printed
        assert assert_trained_on_its_own(folder, server, steps_ahead) == STEPS * QUESTIONS * 4
        records = read_lines(folder / "run" / "rollouts.jsonl")
        questions.append({(record["step"], record["sample_id"]) for record in records})
        lags = [line["rollout_lag"] for line in read_lines(folder / "run" / "metrics.jsonl")]
        assert lags[0] == 0 and max(lags) <= steps_ahead and (max(lags) > 0) == (steps_ahead > 0)
        assert ("server idle" in ended.printed) and "trainer idle" in ended.printed
    assert questions[0] == questions[1]


@pytest.mark.parametrize("in_flight", ["continue", "redo"])
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rollouts_outlive_updates(model: Path, tmp_path: Path, in_flight: str, transfer: str, ranks: int) -> None:
    """Every third request waits for an update; the server dies three times. All tokens have the version that sampled
    them, at most two updates old."""
    server = MortalServer(model, dies=frozenset((25, 50, 90)) if transfer == "folder" else frozenset())
    server.slow_seconds = 5.0
    requests = count()
    # From the second update on, no step waits for rollouts before weights are loaded; no update follows the last steps.
    server.is_slow = lambda body: 4 <= server.interrupted < 2 * STEPS and next(requests) % 3 == 0
    config = config_of(tmp_path, server.url, 2, transfer, in_flight)
    options = ("rollout.logprobs=recompute", "algorithm.importance_cap=2")
    launch_ranks("vlm_pg.cli", "train", str(config), f"model.path={model}", *options, ranks=ranks)
    server.stop()
    records = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(records) == STEPS * QUESTIONS * 4 // ranks  # rank 0 writes its own
    updates_of = {name: Version.parse(name) for _, names in server.sampled_by_token for name in names}
    said = {
        (text, tuple(found and found.updates for found in map(updates_of.get, names)))
        for text, names in server.sampled_by_token
    }
    for record in records:
        versions = record["token_versions"]
        assert len(versions) == record["response_tokens"] and versions == sorted(versions)
        assert record["policy_version"] == versions[0] and 0 <= record["step"] - 1 - versions[0] <= 2
        assert (record["response"], tuple(versions)) in said
    mixed = [len(set(record["token_versions"])) > 1 for record in records]
    assert any(mixed) == (in_flight == "continue")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(line["rollout_lag"] for line in lines) > 0
    assert any(line["rollouts_continued"] for line in lines) == (in_flight == "continue")


@pytest.mark.parametrize("with_controls", [False, True])
def test_a_killed_run_samples_ahead_again(model: Path, tmp_path: Path, with_controls: bool) -> None:
    """No question is lost and none is trained twice, whatever was being sampled."""
    options = []
    if with_controls:
        prepare_embedded(["--out", str(tmp_path / "clips"), "--train", "40", "--eval", "8"])
        options = [f"data.train={tmp_path}/clips/train.jsonl", "media.fps=2", "algorithm.temporal_bonus=0.3"]
    server = MortalServer(model)
    config = config_of(tmp_path, server.url, 2, checkpoint_every=2)
    run = ModuleProcess("vlm_pg.cli", "train", str(config), *options)
    while "step  5/" not in run.printed:
        assert run.returncode is None, run.printed
        time.sleep(0.01)
    run.kill()
    run.finish()
    assert train_here(config, *options).code == 0
    server.stop()
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))
    trained = {(r["step"], r["sample_id"]) for r in read_lines(tmp_path / "run" / "rollouts.jsonl")}
    (folder := tmp_path / "whole").mkdir()
    server = MortalServer(model)
    assert train_here(config_of(folder, server.url), f"model.path={model}", *options).code == 0
    server.stop()
    assert trained == {(r["step"], r["sample_id"]) for r in read_lines(folder / "run" / "rollouts.jsonl")}


def test_a_run_outlives_transfers_that_break_off(model: Path, tmp_path: Path) -> None:
    server = MortalServer(model)
    loading = ("/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/reset_encoder_cache")
    chosen = frozenset(random.Random(1).sample(range(STEPS * len(loading)), CUTS))
    seen = [0]

    def cut(path: str) -> Reply | None:
        if path not in loading:
            return None
        seen[0] += 1
        return Reply({}, {}, silent=True) if seen[0] in chosen else None

    server.before_control = cut
    train_to_the_end(config_of(tmp_path, server.url), server)
    assert seen[0] > max(chosen) and assert_trained_on_its_own(tmp_path, server) == STEPS * QUESTIONS * 4


LAYOUTS = {"ddp": (), "zero2": (2,), "zero3": (3, "all"), "zero3 by layer": (3, "layers")}


def test_ranks_sample_ahead_together(model: Path, tmp_path: Path) -> None:
    """With importance weights and one question less than two ranks would share evenly; the server dies twice."""
    server = MortalServer(model, dies=frozenset((31, 60)))
    config = config_of(tmp_path, server.url, 2, prompts_per_step=3)
    options = ("rollout.logprobs=recompute", "algorithm.importance_cap=2", "algorithm.importance_level=sequence")
    launch_ranks("vlm_pg.cli", "train", str(config), f"model.path={model}", *options)
    server.stop()
    assert_trained_on_its_own(tmp_path, server, 2)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == STEPS and max(line["rollout_lag"] for line in lines) > 0
    assert all(line["importance_mean"] > 0 for line in lines)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_ranks_write_or_send_the_weights_once(model: Path, tmp_path: Path, layout: str, transfer: str) -> None:
    """Three questions over two ranks; the responses are those of a single process."""
    stage, *gather = LAYOUTS[layout] or (None,)
    steps = 3
    engine = [] if stage is None else ["training.engine=deepspeed"]
    engine += [] if stage is None else [f"training.deepspeed_config={deepspeed_config(tmp_path, stage)}"]
    engine += [f"rollout.gather={how}" for how in gather]
    found = []
    for ranks, arguments in ((1, []), (2, engine)):
        server, folder = MortalServer(model), tmp_path / f"of-{ranks}"
        folder.mkdir()
        config = config_of(folder, server.url, transfer=transfer, steps=steps, prompts_per_step=3)
        run = ["train", str(config), f"model.path={model}", *arguments]
        launch_ranks("vlm_pg.cli", *run, ranks=ranks)
        server.stop()
        loading = "/collective_rpc" if transfer == "folder" else "/finish_weight_update"
        assert server.controlled.count(loading) == steps
        assert_trained_on_its_own(folder, server)
        lines = read_lines(folder / "run" / "metrics.jsonl")
        assert max(line["server_divergence_max"] for line in lines) < 1e-4
        assert max(line["server_probe_divergence_max"] for line in lines) < 1e-4
        records = read_lines(folder / "run" / "rollouts.jsonl")
        found.append(sorted((record["step"], record["sample_id"], record["response"]) for record in records))
    # Of two ranks, the first one logs its own questions.
    assert found[1] and set(found[1]) < set(found[0])


@pytest.mark.parametrize("times", [1, 99])
def test_ranks_end_a_failed_broadcast_together(model: Path, tmp_path: Path, times: int) -> None:
    """Under ZeRO-3 rank 0 goes on gathering with the others. Broken off once, everything is sent again."""
    server, left = MortalServer(model), [times]

    def cut(path: str) -> Reply | None:
        if path != "/update_weights" or not left[0]:
            return None
        left[0] -= 1
        return Reply({}, {}, silent=True)

    server.before_control = cut
    config = config_of(tmp_path, server.url, transfer="broadcast", steps=2)
    engine = ["training.engine=deepspeed", f"training.deepspeed_config={deepspeed_config(tmp_path, 3)}"]
    done = [rank.finish(300) for rank in start_ranks("vlm_pg.cli", "train", str(config), *engine)]
    server.stop()
    printed = done[0].stdout + done[0].stderr
    assert [rank.returncode for rank in done] == ([0, 0] if times == 1 else [2, 2]), printed
    assert ("3 broadcasts of the weights failed" if times == 99 else "a broadcast of the weights failed") in printed
