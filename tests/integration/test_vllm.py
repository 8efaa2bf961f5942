"""A real vLLM samples for the trainer: it reads the prompt token by token as the trainer does, and gives the sampled
tokens the probabilities that the trainer computes for them. By medium through ``ServerEngine``, and in whole runs."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.bench.vllm_server import START_SECONDS
from tests.support.mixed_questions import GENERATIONS, NEW_TOKENS, build, sections
from tests.support.processes import ModuleProcess
from tests.support.runs import read_lines, run_cli, write_config
from tests.support.server_engines import reported
from tests.support.vllm_server import BROADCAST, FAMILIES, VllmServer, running_vllm
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.server import generator
from vlm_pg.rollout.server.broadcast import Broadcast
from vlm_pg.rollout.server.client import ServerClient
from vlm_pg.rollout.server.contract import LoadedModel
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt, ResponseGroup

pytestmark = pytest.mark.matrix

STEPS = 20
# Of KL per token and of the largest difference of a token's log-probabilities, fp32.
LARGEST_NATS = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(request.param, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_questions_of_every_medium(
    server: VllmServer, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports log-probabilities of the logits as they are; at another temperature the trainer's at 1 are used."""
    policy = load_policy(server.model, device="cpu")
    prompts, messages = build(policy)
    read: dict[str, list[int]] = {}
    check = generator.check_prompt_echo

    def kept(prompt: Prompt, answer: Mapping[str, Any]) -> None:
        read[prompt.sample_id] = answer["prompt_token_ids"]
        check(prompt, answer)

    monkeypatch.setattr(generator, "check_prompt_echo", kept)
    settings = RolloutSettings.model_validate(
        {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": NEW_TOKENS,
            "temperature": temperature,
            "mismatch_every": 1,
            "server": {"url": server.url, "wait_seconds": START_SECONDS, "retries": 0},
        }
    )
    engine = ServerEngine(LoadedModel(policy), settings, 7, lambda: False, messages, tmp_path, lambda line: None)
    assert engine.server.kind == "vllm"
    engine.sync_weights(1)
    for step, prompt in enumerate(prompts):
        (rollouts,) = engine.generate([prompt], step)
        assert len(rollouts) == GENERATIONS and len({rollout.text for rollout in rollouts}) > 1
        assert read[prompt.sample_id] == prompt.input_ids.tolist()
        found = reported(engine)
        assert 0 <= found["server_divergence"] <= LARGEST_NATS, (prompt.sample_id, found)
        assert found["server_divergence_max"] <= LARGEST_NATS, (prompt.sample_id, found)
        assert found["rollouts_asked_again"] == 0


IN_FLIGHT_FLAGS = ("--enable-scale-out", "--mm-processor-cache-gb", "0", "--max-num-batched-tokens", "16384")


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_go_on_under_new_weights(family: str, tmp_path: Path) -> None:
    """While rollouts of every medium are sampled the weights change, tower included. Each token has the log-probability
    that the weights it names give it."""
    with running_vllm(family, tmp_path, *IN_FLIGHT_FLAGS) as server:
        for in_flight in ("continue", "redo"):
            whole = ModelSettings(path=str(server.model), train=("tower", "merger", "language"))
            policies = [load_policy(server.model, device="cpu", settings=whole) for _ in range(2)]
            prompts, messages = build(policies[0])
            settings = RolloutSettings.model_validate(
                {
                    "engine": "server",
                    "num_generations": GENERATIONS,
                    "max_new_tokens": 256,
                    "staleness": 1,
                    "in_flight": in_flight,
                    "server": {"url": server.url, "wait_seconds": START_SECONDS, "retries": 0},
                }
            )
            trained = policies[1]
            engine = ServerEngine(LoadedModel(trained), settings, 7, lambda: False, messages, tmp_path, print)
            engine.sync_weights(1)
            before = generated_tokens(server)
            engine.start(prompts, 2)
            while generated_tokens(server) <= before:
                time.sleep(0.01)
            noise = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in trained.model.parameters():
                    if weight.ndim > 1:
                        weight.add_(0.1 * float(weight.std()) * torch.randn(weight.shape, generator=noise))
            trained.weights_changed()
            engine.sync_weights(2)
            groups = engine.generate(prompts, 2)
            responses = [ResponseGroup(p, tuple(r.token_ids for r in g)) for p, g in zip(prompts, groups, strict=True)]
            with torch.no_grad():
                scored = [policy.logprobs(responses) for policy in policies]
            num_mixed = 0
            for group, *by_version in zip(groups, *scored, strict=True):
                for rollout, *values in zip(group, *by_version, strict=True):
                    versions = torch.tensor(rollout.token_versions)
                    own = torch.stack(values)[versions, torch.arange(len(rollout.token_ids))]
                    torch.testing.assert_close(rollout.rollout_logprobs, own, atol=LARGEST_NATS, rtol=0)
                    num_mixed += len(set(rollout.token_versions)) > 1
            assert (num_mixed > 0) == (in_flight == "continue")
            assert reported(engine)["rollout_lag"] < 1  # some tokens at least are from the new weights


def generated_tokens(server: VllmServer) -> float:
    with urllib.request.urlopen(f"{server.base_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def train(folder: Path, config: dict[str, Any], log: str = "") -> list[dict[str, Any]]:
    """Metrics of the run's steps."""
    done = run_cli("train", str(write_config(folder / "run.yaml", config)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log[-3000:]
    return read_lines(Path(config["run"]["dir"]) / "metrics.jsonl")


def assert_followed(lines: list[dict[str, Any]]) -> None:
    """Rollouts and probes of every step had the log-probabilities of the trainer, whose weights had changed."""
    for line in lines:
        assert line["grad_norm"] > 0
        for name in ("server_divergence", "server_probe_divergence"):
            assert 0 <= line[name] <= LARGEST_NATS and line[f"{name}_max"] <= LARGEST_NATS, line


def test_the_server_follows_20_steps(server: VllmServer, tmp_path: Path) -> None:
    lines = train(tmp_path, sections(server.model, tmp_path, server.url), server.log)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert_followed(lines)
    responses = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len({line["sample_id"] for line in responses}) == 6 and len(responses) == 3 * STEPS * GENERATIONS
    # It was not the weights that it was started with: those would differ by far more.
    assert (first := server.post("/weight_checker", {"action": "checksum"})) and first["checksums"]
    with urllib.request.urlopen(f"{server.base_url}/weight_info") as response:
        assert f"-{STEPS - 1}-" in json.load(response)["weight_version"]


def test_greedy_runs_end_with_the_weights_of_our_own_engine(server: VllmServer, tmp_path: Path) -> None:
    """Both sample the most probable tokens. The reward itself is the advantage, so that gradients differ from 0."""
    weights = []
    for engine in ("server", "in_process"):
        (folder := tmp_path / engine).mkdir()
        config = sections(
            server.model,
            folder,
            server.url,
            algorithm={"baseline": "none", "scale_advantages": "none"},
            training={"steps": 5, "learning_rate": 1e-4},
        )
        config["rollout"] |= {"engine": engine, "num_generations": 1, "top_k": 1}
        train(folder, config, server.log)
        (checkpoint,) = (folder / "run" / "checkpoints").iterdir()
        weights.append(load_file(checkpoint / "model.safetensors"))
    responses = [read_lines(tmp_path / engine / "run" / "rollouts.jsonl") for engine in ("server", "in_process")]
    same = [[(line["step"], line["sample_id"], line["response"]) for line in lines] for lines in responses]
    assert same[0] == same[1]
    start = load_file(server.model / "model.safetensors")
    for name, ours in weights[1].items():
        moved = (ours - start[name]).abs().max()
        torch.testing.assert_close(weights[0][name], ours, atol=max(1e-6, 0.02 * float(moved)), rtol=0)


def test_a_server_that_is_killed_is_given_the_weights_again(server: VllmServer, tmp_path: Path) -> None:
    """While it samples the third step, or right before."""
    config = sections(server.model, tmp_path, server.url, training={"steps": 5})
    run = ModuleProcess("vlm_pg.cli", "train", str(write_config(tmp_path / "run.yaml", config)))
    while "step 2/" not in run.printed:
        assert run.returncode is None, run.printed
        time.sleep(0.05)
    server.kill()
    server.begin()
    done = run.finish(2 * START_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "does not answer" in done.stderr + done.stdout
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 5
    assert_followed(lines)


@pytest.mark.parametrize("case", ["lora", "tied"])
def test_an_adapter_follows_and_a_tied_head_is_named(case: str, tmp_path: Path) -> None:
    """On a CPU vLLM keeps a packed copy of a tied output head, which loading does not reach."""
    flags = ("--enable-lora", "--max-lora-rank", "8") if case == "lora" else ()
    with running_vllm("qwen2_5_vl", tmp_path, *flags, tied=case == "tied", adapters=case == "lora") as server:
        config = sections(server.model, tmp_path, server.url, training={"steps": 4, "learning_rate": 1e-2})
        if case == "lora":
            config["model"] |= {"train": ["language"], "lora": {"rank": 4}}
            assert_followed(train(tmp_path, config, server.log))
            return
        done = run_cli("train", str(write_config(tmp_path / "run.yaml", config)))
        printed = done.stdout + done.stderr
        assert done.returncode == 2 and "was given the weights after 1 updates and samples from others" in printed


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    """Two servers of one model that receive weights by broadcast."""
    flags = (*BROADCAST, "--served-model-name", "tiny")
    with (
        running_vllm("qwen3_vl", tmp_path_factory.mktemp("vllm"), *flags) as first,
        running_vllm("qwen3_vl", tmp_path_factory.mktemp("vllm"), *flags) as second,
    ):
        yield [first, second]


def test_replicas_follow_5_steps_by_broadcast(replicas: list[VllmServer], tmp_path: Path) -> None:
    first, second = replicas
    config = sections(first.model, tmp_path, first.url, training={"steps": 5})
    config["rollout"]["server"] |= {"replicas": [second.url], "transfer": "broadcast"}
    assert_followed(lines := train(tmp_path, config, first.log))
    assert len(lines) == 5 and not (tmp_path / "run" / "weights").exists()


def test_a_server_that_is_killed_in_a_broadcast_is_sent_everything_again(
    replicas: list[VllmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = replicas[0]
    policy = load_policy(server.model, device="cpu")
    prompts, messages = build(policy)
    settings = RolloutSettings.model_validate(
        {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": NEW_TOKENS,
            "server": {"url": server.url, "wait_seconds": START_SECONDS, "retries": 0, "transfer": "broadcast"},
        }
    )
    lines: list[str] = []
    engine = ServerEngine(LoadedModel(policy), settings, 7, lambda: False, messages, tmp_path, lines.append)
    send, kills = Broadcast._send_bucket, [1]

    async def kill_while_it_receives(self: Broadcast, client: ServerClient) -> None:
        if kills:
            kills.pop()
            Timer(0.005, lambda: (server.kill(), server.begin())).start()
        await send(self, client)

    monkeypatch.setattr(Broadcast, "_send_bucket", kill_while_it_receives)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.01)
    policy.weights_changed()
    engine.sync_weights(1)
    engine.generate(prompts, 1)
    found = reported(engine)
    assert 0 <= found["server_divergence"] <= LARGEST_NATS and 0 <= found["server_probe_divergence"] <= LARGEST_NATS
    assert any("a broadcast of the weights failed" in line for line in lines)
