"""A real vLLM samples for the trainer: it reads the prompt token by token as the trainer does, and gives the sampled
tokens the probabilities that the trainer computes for them. By medium through ``ServerEngine``, and in whole runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.runs import read_lines, run_cli, write_config
from tests.support.server_engines import reported
from tests.support.short_run import SPREAD
from tests.support.tiny_media import mp4
from tests.support.vllm_server import FAMILIES, VllmServer, running_vllm
from vlm_pg.models.loading import load_policy
from vlm_pg.models.policy import Policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server import generator
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import DecodedMedia, MediaKind, MediaRef, Prompt, Sample

pytestmark = pytest.mark.matrix

GENERATIONS, NEW_TOKENS = 4, 32
# Of KL per token and of the largest difference of a token's log-probabilities, fp32.
LARGEST_NATS = 1e-4
MEDIA: dict[str, tuple[MediaKind, ...]] = {
    "text": (),
    "image": ("image",),
    "images": ("image", "image"),
    "video": ("video",),
    "image and video": ("image", "video"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(request.param, tmp_path_factory.mktemp("vllm")) as server:
        yield server


def medium(policy: Policy, kind: MediaKind, seed: int) -> DecodedMedia:
    """Random pixels; a video has 6 frames at 2 a second."""
    side, count = policy.pixel_factor, 6 if kind == "video" else 1
    size = (count, 3, (3 + seed) * side, 4 * side)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    times = tuple(frame / 2 for frame in range(count))
    return DecodedMedia(kind, pixels, times, 2.0 if kind == "video" else 0.0, "test")


def build(policy: Policy) -> tuple[list[Prompt], ChatMessages]:
    """A question with each combination of media, and the messages of all of them."""
    builder = PromptBuilder(policy.processor, PromptSettings(), policy.positions)
    samples, prompts = {}, []
    for name, kinds in MEDIA.items():
        media = tuple(medium(policy, kind, number) for number, kind in enumerate(kinds))
        refs = tuple(MediaRef(kind, "x") for kind in kinds)
        samples[name] = Sample(name, f"What is in the {name}?", refs, (), "1", "numerical", "test", "test")
        prompts.append(builder.build(samples[name], media))
    return prompts, ChatMessages(policy, samples)


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
            "server": {"url": server.url, "wait_seconds": 0.0, "retries": 0},
        }
    )
    engine = ServerEngine(policy, settings, 7, lambda: False, messages, tmp_path, lambda line: None)
    assert engine.server.kind == "vllm"
    for step, prompt in enumerate(prompts):
        (rollouts,) = engine.generate([prompt], step)
        assert len(rollouts) == GENERATIONS and len({rollout.text for rollout in rollouts}) > 1
        assert read[prompt.sample_id] == prompt.input_ids.tolist()
        found = reported(engine)
        assert 0 <= found["server_divergence"] <= LARGEST_NATS, (prompt.sample_id, found)
        assert found["server_divergence_max"] <= LARGEST_NATS, (prompt.sample_id, found)
        assert found["rollouts_asked_again"] == 0


def write_records(folder: Path) -> Path:
    """Two questions each about nothing, a picture and an MP4 file, whose frames are 0.5 s apart as vLLM's are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    records = []
    for number, kind in enumerate(("text", "image", "video") * 2):
        name = {"text": "", "image": f"{number}.png", "video": f"{number}.mp4"}[kind]
        if kind == "image":
            Image.fromarray(rng.integers(0, 256, (130 + number, 170, 3), dtype=np.uint8)).save(folder / name)
        if kind == "video":
            (folder / name).write_bytes(mp4(number, seconds=3 + number, rate=2, height=128, width=160))
        records.append(
            {
                "problem_id": number,
                "problem": "Which colour is shown first?",
                "data_type": kind,
                "problem_type": "multiple choice",
                "options": ["A. red", "B. green"],
                "solution": "<answer>A</answer>",
                "path": name,
            }
        )
    (folder / "records.json").write_text(json.dumps(records))
    return folder / "records.json"


def test_a_run_of_two_steps(server: VllmServer, tmp_path: Path) -> None:
    """Updates stay far below what is tolerated, because this server keeps its first weights."""
    (tmp_path / "spread.py").write_text(SPREAD)
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(server.model)},
        "data": {"train": str(write_records(tmp_path))},
        "media": {"workers": 0, "fps": 2, "max_frames": 16, "min_pixels": 4096, "image_min_pixels": 4096},
        "rollout": {
            "engine": "server",
            "num_generations": GENERATIONS,
            "max_new_tokens": NEW_TOKENS,
            "server": {"url": server.url, "retries": 0, "wait_seconds": 0},
        },
        "reward": {"functions": [{"function": f"{tmp_path}/spread.py:spread"}]},
        "training": {"steps": 2, "prompts_per_step": 3, "learning_rate": 1e-9},
        "observe": {"trackers": [], "report": False, "rollouts_per_step": 3},
    }
    done = run_cli("train", str(write_config(tmp_path / "run.yaml", config)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + server.log[-3000:]
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["grad_norm"] > 0
        assert 0 <= line["server_divergence"] <= LARGEST_NATS and line["server_divergence_max"] <= LARGEST_NATS, line
    responses = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len({line["sample_id"] for line in responses}) == 6 and len(responses) == 6 * GENERATIONS
