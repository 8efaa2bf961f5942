"""Servers of this package sample what the engine in the trainer's process does, under the weights they were given."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.groups import tiny_policy
from tests.support.mixed_questions import build, sections
from tests.support.processes import ROOT, ModuleProcess
from tests.support.runs import read_lines, save_tiny_model, write_config
from tests.support.served import free_port
from tests.support.server_engines import reported
from tests.support.short_run import train_here
from tests.support.tiny import tiny_model
from vlm_pg.errors import ServerError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.server.contract import LoadedModel, check_server
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.engine_server import EngineServer, HttpServer
from vlm_pg.rollout.server.launch import SERVER_MODULE
from vlm_pg.rollout.server.remote import RolloutRequest
from vlm_pg.rollout.settings import RolloutSettings, ServerSettings
from vlm_pg.types import Rollout

RUN_STEPS, KEY = 4, "key-of-this-test"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
ROUNDING = 1e-5
PARTS = ("tower", "merger", "language")


class Served:
    """A server in this process."""

    def __init__(self, settings: ModelSettings):
        self.engine = EngineServer(settings)
        self.http = HttpServer(("127.0.0.1", 0), self.engine)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[[ModelSettings], Served]]:
    running: list[Served] = []

    def start(settings: ModelSettings) -> Served:
        running.append(Served(settings))
        return running[-1]

    yield start
    for one in running:
        one.http.shutdown()


def settings_of(url: str, **values: Any) -> RolloutSettings:
    server = {"url": url, "retries": 0, "wait_seconds": 1.0}
    return RolloutSettings.model_validate({"num_generations": 4, "max_new_tokens": 8} | values | {"server": server})


def assert_equal(found: list[tuple[Rollout, ...]], expected: list[tuple[Rollout, ...]]) -> None:
    for group, of_engine in zip(found, expected, strict=True):
        for rollout, other in zip(group, of_engine, strict=True):
            assert rollout.token_ids.tolist() == other.token_ids.tolist()
            assert (rollout.text, rollout.finish_reason) == (other.text, other.finish_reason)
            torch.testing.assert_close(rollout.rollout_logprobs, other.rollout_logprobs, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("values", [{}, {"temperature": 0.7, "top_p": 0.9, "stop_strings": ["e"], "min_new_tokens": 2}])
def test_rollouts_of_every_medium_are_those_of_the_engine(
    family: str, values: dict[str, Any], tmp_path: Path, serve: Callable[[ModelSettings], Served]
) -> None:
    """Before an update of all parts and after it; times and positions are those of the prompts, at any frame rate."""
    model = ModelSettings(path=str(save_tiny_model(tmp_path / "model", family)), train=PARTS)
    server, policy = serve(model), load_policy(model.path, device="cpu", settings=model)
    prompts, messages = build(policy, seconds_per_frame=0.13)
    settings = settings_of(server.url, **values)
    engine = ServerEngine(LoadedModel(policy), settings, 3, lambda: False, messages, tmp_path, print)
    for step in (1, 2):
        engine.sync_weights(step)
        assert_equal(engine.generate(prompts, step), RolloutEngine(policy, settings, 3).generate(prompts, step))
        found = reported(engine)
        assert max(found["server_divergence_max"], found["server_probe_divergence_max"]) <= ROUNDING
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)))
        policy.weights_changed()


def test_a_request_names_everything_and_holds_media_once() -> None:
    policy = tiny_policy()
    prompts, _ = build(policy)
    settings = RolloutSettings(num_generations=3, top_k=5, stop_strings=("x",))
    request = RolloutRequest(settings, 1, "2/control", (*prompts, prompts[-1]))
    data = request.pack()
    found = RolloutRequest.unpack(data)
    assert (found.settings, found.seed, found.step) == (settings, 1, "2/control")
    pixels = sum(p.pixel_values.nbytes for p in prompts if p.pixel_values is not None)
    assert pixels < len(data) < pixels + 2**16
    for prompt, other in zip(request.prompts, found.prompts, strict=True):
        for name in ("input_ids", "mm_token_type_ids", "positions_3P", "grid_thw", "pixel_values"):
            torch.testing.assert_close(getattr(other, name), getattr(prompt, name), atol=0, rtol=0)
        for name in ("sample_id", "media_kinds", "content_key", "media_keys", "next_position"):
            assert getattr(other, name) == getattr(prompt, name)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_an_adapter_follows(quantize: Any, tmp_path: Path, serve: Callable[[ModelSettings], Served]) -> None:
    lora = LoraSettings(rank=4, quantize=quantize)
    model = ModelSettings(path=str(save_tiny_model(tmp_path / "model")), lora=lora)
    server, policy = serve(model), load_policy(model.path, device="cpu", settings=model)
    prompts, messages = build(policy)
    settings = settings_of(server.url)
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    policy.weights_changed()
    engine = ServerEngine(LoadedModel(policy), settings, 3, lambda: False, messages, tmp_path, print)
    engine.sync_weights(1)
    assert_equal(engine.generate(prompts, 1), RolloutEngine(policy, settings, 3).generate(prompts, 1))
    assert not list((tmp_path / "weights").glob("*/model*.safetensors")), "the adapter alone is written"


def test_requests_of_one_step_are_sampled_together(
    tmp_path: Path, serve: Callable[[ModelSettings], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks with a question each; those of another step wait."""
    server = serve(ModelSettings(path=str(save_tiny_model(tmp_path / "model"))))
    prompts, _ = build(tiny_policy())
    calls, generate = [], RolloutEngine.generate

    def counted(engine: RolloutEngine, prompts: Any, step: Any) -> Any:
        calls.append((step, sorted(prompt.sample_id for prompt in prompts)))
        return generate(engine, prompts, step)

    monkeypatch.setattr(RolloutEngine, "generate", counted)
    monkeypatch.setattr("vlm_pg.rollout.server.engine_server.GATHER_SECONDS", 1.0)
    requests = [RolloutRequest(settings_of(server.url), 0, 1 + (number > 3), (prompts[number],)) for number in range(5)]
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, r=r: answers.update({i: server.engine.sample(r, lambda: False)}))
        for i, r in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [(1, sorted(p.sample_id for p in prompts[:4])), (2, [prompts[4].sample_id])]
    expected = RolloutEngine(server.engine.policy, settings_of(server.url), 0)
    for number, request in enumerate(requests):
        assert_equal(answers[number], generate(expected, request.prompts, request.step))


def test_a_client_that_has_gone_is_not_sampled_for(tmp_path: Path, serve: Callable[[ModelSettings], Served]) -> None:
    server = serve(ModelSettings(path=str(save_tiny_model(tmp_path / "model"))))
    request = RolloutRequest(settings_of(server.url, max_new_tokens=64), 0, 1, tuple(build(tiny_policy())[0]))
    for stays in (0, 4):  # times that it is looked for: before it is sampled, and meanwhile
        looks = count()
        with pytest.raises(InterruptedError):
            server.engine.sample(request, lambda looks=looks, stays=stays: next(looks) >= stays)
    assert len(server.engine.sample(request, lambda: False)) == len(request.prompts)


def test_other_weights_are_named_and_never_sampled(tmp_path: Path, serve: Callable[[ModelSettings], Served]) -> None:
    model = ModelSettings(path=str(save_tiny_model(tmp_path / "model")))
    server, policy = serve(model), load_policy(model.path, device="cpu", settings=model)
    prompts, messages = build(policy)
    engine = ServerEngine(LoadedModel(policy), settings_of(server.url), 3, lambda: False, messages, tmp_path, print)
    engine.sync_weights(1)
    assert server.engine.version
    wide = tiny_model("qwen2_5_vl", text={"intermediate_size": 96})
    wide.save_pretrained(tmp_path / "wide")
    policy.processor.save_pretrained(tmp_path / "wide")
    for path, words in (("wide", "size mismatch"), ("nowhere", "nowhere")):
        body = json.dumps({"model_path": str(tmp_path / path), "weight_version": "2"}).encode()
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(server.url.removesuffix("v1") + "update_weights_from_disk", body)
        assert words in refused.value.read().decode()
        assert (server.engine.version == "") == (path == "wide")
        engine.sync_weights(1)
        engine.generate(prompts, 1)  # after the weights were loaded again
        assert server.engine.version


def test_an_answer_that_cannot_be(
    tmp_path: Path, serve: Callable[[ModelSettings], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSettings(path=str(save_tiny_model(tmp_path / "model")))
    server, policy = serve(model), load_policy(model.path, device="cpu", settings=model)
    prompts, messages = build(policy)
    engine = ServerEngine(LoadedModel(policy), settings_of(server.url), 3, lambda: False, messages, tmp_path, print)
    engine.sync_weights(1)
    sample = server.engine.sample
    faults: dict[str, Callable[[list[tuple[Rollout, ...]]], list[tuple[Rollout, ...]]]] = {
        r"\[4, 4, 4, 4\] rollouts": lambda groups: groups[1:],
        r"\[3, 3, 3, 3, 3\] rollouts": lambda groups: [group[1:] for group in groups],
        "tokens that cannot be": lambda groups: [(_one_token(10**6, 0.0), *group[1:]) for group in groups],
        "logprobs.0: Input should be a finite number": lambda groups: [
            (_one_token(1, math.nan), *group[1:]) for group in groups
        ],
    }
    for words, fault in faults.items():
        monkeypatch.setattr(server.engine, "sample", lambda *given, fault=fault: fault(sample(*given)))
        with pytest.raises(ServerError, match=words):
            engine.generate(prompts, 1)


def _one_token(token: int, logprob: float) -> Rollout:
    return Rollout(torch.tensor([token]), torch.tensor([logprob]), "length", "")


def test_settings_that_need_a_gpu_are_not_followed_where_weights_are_read(
    tmp_path: Path, serve: Callable[[ModelSettings], Served]
) -> None:
    server = serve(ModelSettings(path=str(save_tiny_model(tmp_path / "model"))))
    server.engine.settings = server.engine.settings.model_copy(update={"liger": True, "attention_kernel": "cuda-flash"})
    server.engine.load(str(tmp_path / "model"), "1")
    assert server.engine.version == "1"


def test_a_server_that_cannot_sample_any_more_ends(tmp_path: Path) -> None:
    """A thread that has died would leave a server that seems healthy."""
    code = f"""
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.server.engine_server import EngineServer
from vlm_pg.rollout.server.remote import RolloutRequest
from vlm_pg.rollout.settings import RolloutSettings
def generate(*given): raise RuntimeError("CUDA error: an illegal memory access was encountered")
RolloutEngine.generate = generate
engine = EngineServer(ModelSettings(path={str(save_tiny_model(tmp_path / "model"))!r}))
prompts = __import__("tests.support.mixed_questions", fromlist=["build"]).build(engine.policy)[0]
engine.sample(RolloutRequest(RolloutSettings(), 0, 1, tuple(prompts)), lambda: False)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 1 and "an illegal memory access" in ended.stderr


def test_the_doctor_checks_it(tmp_path: Path, serve: Callable[[ModelSettings], Served]) -> None:
    model = ModelSettings(path=str(save_tiny_model(tmp_path / "model")))
    server = serve(model)
    rollout = RolloutSettings(server=ServerSettings(url=server.url))
    found = list(check_server(model, rollout, 0, tmp_path / "run", update=True))
    assert [finding.status for finding in found] == ["ok"] * len(found) and len(found) == 13, found


def run_beside_servers(folder: Path, config: dict[str, Any], num_ranks: int = 1) -> list[dict[str, Any]]:
    """Metrics of a run whose two servers are started for it."""
    config["rollout"]["server"] |= {"launch": {"engine": "vlm_pg", "num_servers": 2}}
    path = str(write_config(folder / "run.yaml", config))
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m")
    beside = (sys.executable, "-m", *(launcher if num_ranks > 1 else ()), "vlm_pg.cli", "train", path)
    ended = ModuleProcess("vlm_pg.cli", "serve", path, "--", *beside).finish(600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = read_lines(folder / "run" / "metrics.jsonl")
    assert len(lines) == RUN_STEPS and max(line.get("server_probe_divergence_max", 0.0) for line in lines) <= ROUNDING
    return lines


def run_config(model: Path, folder: Path, url: str = "", **rollout: Any) -> dict[str, Any]:
    folder.mkdir()
    url = url or f"http://127.0.0.1:{free_port(2)}/v1"
    config = sections(model, folder, url, training={"steps": RUN_STEPS})
    config["rollout"] |= {"keep_forward_gb": 0} | rollout
    config["rollout"]["server"]["wait_seconds"] = 1.0
    config["media"]["fps"] = 7
    return config


def test_a_run_is_that_of_the_engine_in_its_process(tmp_path: Path) -> None:
    """Rollouts, and weights up to rounding."""
    model, runs = save_tiny_model(tmp_path / "model"), []
    for engine in ("server", "in_process"):
        config = run_config(model, folder := tmp_path / engine, engine=engine)
        if engine == "server":
            assert max(line["server_divergence_max"] for line in run_beside_servers(folder, config)) <= ROUNDING
        else:
            ended = train_here(write_config(folder / "run.yaml", config))
            assert ended.code == 0, ended.printed
        (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
        said = [(r["step"], r["sample_id"], r["response"]) for r in read_lines(folder / "run" / "rollouts.jsonl")]
        runs.append((sorted(said), load_file(checkpoint / "model.safetensors")))
    assert runs[0][0] == runs[1][0]
    start = load_file(model / "model.safetensors")
    for name, weight in runs[1][1].items():
        moved = float((weight - start[name]).abs().max())
        torch.testing.assert_close(runs[0][1][name], weight, atol=max(1e-6, 0.02 * moved), rtol=0)


class Process:
    """A server in a process of its own, at an address that stays."""

    def __init__(self, model: Path):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._settings = ModelSettings(path=str(model)).model_dump_json()
        self.begin()

    def kill(self) -> None:
        self.process.kill()
        self.process.finish()

    def begin(self) -> None:
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--model-settings", self._settings)
        self.process = ModuleProcess(SERVER_MODULE, *where)
        while "serving " not in self.process.printed:
            assert self.process.returncode is None, self.process.printed
            time.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    server = Process(save_tiny_model(tmp_path / "model"))
    yield server
    server.kill()


def test_a_run_outlives_its_server(server: Process, tmp_path: Path) -> None:
    """Killed in the second step; the run ends with its steps saved, and goes on once the server is back."""
    model = tmp_path / "model"
    config = run_config(model, folder := tmp_path / "run", url=server.url)
    config["training"]["steps"] = 12
    path = write_config(folder / "run.yaml", config)
    first = ModuleProcess("vlm_pg.cli", "train", str(path), environment={"OPENAI_API_KEY": KEY})
    while "step  1/12" not in first.printed:
        assert first.returncode is None, first.printed
        time.sleep(0.01)
    server.kill()
    first.finish()
    assert first.returncode not in (0, 130) and "Traceback" not in first.printed
    assert f"Server {server.url}: It has not answered for 1 s" in first.printed and "run.resume=auto" in first.printed
    saved = [line["step"] for line in read_lines(folder / "run" / "metrics.jsonl")]
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == [f"step-{saved[-1]:06d}"]
    server.begin()
    again = ModuleProcess(
        "vlm_pg.cli", "train", str(path), "run.resume=auto", "rollout.server.wait_seconds=120", "observe.report=true"
    )
    again.finish()
    assert again.returncode == 0 and f"resuming after step {saved[-1]}" in again.printed, again.printed
    assert [line["step"] for line in read_lines(folder / "run" / "metrics.jsonl")] == [*range(1, 13)]
    for name in ("config.yaml", "report.html", "summary.json"):
        assert KEY not in (folder / "run" / name).read_text()


@pytest.mark.matrix
def test_a_run_that_waits_for_its_server_can_be_stopped(tmp_path: Path) -> None:
    config = run_config(save_tiny_model(tmp_path / "model"), folder := tmp_path / "run")
    path = str(write_config(folder / "run.yaml", config))
    run = ModuleProcess("vlm_pg.cli", "train", path, "rollout.server.wait_seconds=1000")
    while "does not answer" not in run.printed:
        assert run.returncode is None, run.printed
        time.sleep(0.05)
    run.signal(signal.SIGINT)
    run.finish()
    assert run.returncode == 130 and "stopped on request before the first step" in run.printed
    assert "Traceback" not in run.printed


@pytest.mark.matrix
def test_two_ranks_sample_ahead_on_two_servers(tmp_path: Path) -> None:
    config = run_config(save_tiny_model(tmp_path / "model"), folder := tmp_path / "ahead", staleness=2)
    lags = [line["rollout_lag"] for line in run_beside_servers(folder, config, num_ranks=2)]
    assert max(lags) > 0 and max(lags) <= 2
