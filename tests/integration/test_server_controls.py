"""T-GRPO's control groups on a server: shuffled frames arrive there, half a group each, under weights that are recent
enough, and the bonus is that of the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.collecting import made_up_collector, made_up_samples, tiny_config
from tests.support.odd_server import Reply
from tests.support.server_engines import LoadedModel
from tests.support.tiny_server import WeightServer
from vlm_pg.media.controls import shuffle_frames
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.engine import ServerEngine
from vlm_pg.rollout.server.generator import UNUSABLE
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.weights import Version
from vlm_pg.training.engines import trained_weights
from vlm_pg.types import BadSample, DecodedMedia, RolloutGroup, Sample

TINY = Path(__file__).parents[2] / "assets" / "tiny-qwen2_5-vl"
GENERATIONS, FRAMES, QUESTIONS, STEPS = 4, 8, 3, 3
KINDS = ("video", "text", "video")


def accuracy(text: str) -> float:
    return float(sum(map(ord, text)) % 2)


class Request(NamedTuple):
    """What a server sampled, and under which version of the weights."""

    frames: bytes
    count: int
    seed: int
    version: Version
    responses: tuple[str, ...]

    @property
    def is_control(self) -> bool:
        return self.count == GENERATIONS // 2


class RecordingServer(WeightServer):
    """``requests_of_run``: all but those of probes."""

    def __init__(self) -> None:
        self.requests_of_run: list[Request] = []
        super().__init__(TINY)

    def reply(self, body: dict[str, Any]) -> Reply:
        with self._policy_lock:
            version = Version.parse(self.version)
            reply = super().reply(body)
            frames: list[torch.Tensor] = []
            parts = body["messages"][-1]["content"]
            if not any(part["type"] == "image_url" for part in parts):
                for part in parts:
                    self._part(part, [], frames, [])
                assert version is not None
                said = tuple(choice["message"]["content"] for choice in reply.value["choices"])
                shown = b"".join(video.numpy().tobytes() for video in frames)
                if "n" in body:
                    self.requests_of_run.append(Request(shown, body["n"], body["seed"], version, said))
                else:
                    self._replace(shown, said)
        return reply

    def _replace(self, frames: bytes, said: tuple[str, ...]) -> None:
        """A response that is not allowed, and is requested again."""
        requests = self.requests_of_run
        index = max(index for index, request in enumerate(requests) if request.frames == frames)
        allowed = [text for text in requests[index].responses if "<|im_start|>" not in text]
        requests[index] = requests[index]._replace(responses=(*allowed, *said))


class Run:
    """A collector whose rollouts come from a server, and a policy whose weights can be changed."""

    def __init__(self, folder: Path, server: RecordingServer, staleness: int = 0, questions: int = QUESTIONS):
        settings = ModelSettings(path=str(TINY), train=("language",))
        self.policy, self.lines, self.bad = load_policy(TINY, device="cpu", settings=settings), list[str](), []
        self.builder = PromptBuilder(self.policy.processor, PromptSettings(), self.policy.positions)
        at = {"url": server.url, "retries": 5, "wait_seconds": 5.0}
        self.config = tiny_config(
            {"temporal_bonus": 0.3, "temporal_ratio": 0.8},
            rollout={"engine": "server", "num_generations": GENERATIONS, "staleness": staleness, "server": at},
            training={"steps": STEPS, "prompts_per_step": questions},
        )
        samples = {sample.sample_id: sample for sample in made_up_samples(QUESTIONS * STEPS, KINDS)}
        self.sampler = ServerEngine(
            LoadedModel(self.policy),
            self.config.rollout,
            3,
            lambda: False,
            ChatMessages(self.policy, samples),
            folder,
            self.lines.append,
        )
        self.collector = made_up_collector(
            self.policy,
            self.config,
            lambda response, index: accuracy(response.text),
            num_samples=len(samples),
            kinds=KINDS,
            sampler=self.sampler,
            source=self,
            on_bad=lambda tried, bad: self.bad.extend(bad),
        )

    def video(self, sample: Sample) -> DecodedMedia:
        """Noise, of as many frames per second as the server counts."""
        side, number = self.policy.pixel_factor, int(sample.sample_id.split("-")[-1])
        frames = np.random.default_rng(number).integers(0, 256, (FRAMES, 3, side, side), dtype=np.uint8)
        return DecodedMedia("video", frames, tuple(i / 2 for i in range(FRAMES)), 2.0, f"{number}")

    def load(self, samples: list[Sample], tamper: Any = None, should_stop: Any = None) -> tuple[list[Any], list[Any]]:
        """As ``PromptSource.load``."""
        found = []
        for sample in samples:
            media = [self.video(sample)] if sample.media else []
            if tamper is not None:
                media = [tamper(item, sample.sample_id) for item in media]
            found.append((sample, self.builder.build(sample, media)))
        return found, []

    def step(self, number: int) -> list[RolloutGroup]:
        """As ``Trainer`` does it; the update changes all weights."""
        batch = self.collector.collect(number, 0)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for _, weight in trained_weights(self.policy):
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        self.policy.weights_changed()
        return batch.sampled

    def assert_by_the_rule(self, group: RolloutGroup, server: RecordingServer) -> tuple[Request, Request]:
        """The bonus is that of the responses that the server gave last; the requests for the group and its control."""
        video = self.video(group.sample)
        own, control = (
            [request for request in server.requests_of_run if request.frames == frames.tobytes()][-1]
            for frames in (video.frames, shuffle_frames(video, group.sample.sample_id).frames)
        )
        assert (own.count, control.count) == (GENERATIONS, GENERATIONS // 2)
        texts = [rollout.text for rollout in group.rollouts]
        assert sorted(texts) == sorted(own.responses)
        means = [sum(map(accuracy, request.responses)) / request.count for request in (own, control)]
        right = [accuracy(text) if means[0] >= 0.8 * means[1] else 0.0 for text in texts]
        assert [reward.parts["temporal"] for reward in group.rewards] == [0.3 * value for value in right]
        return own, control


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingServer]:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)
    server = RecordingServer()
    yield server
    server.stop()


def to_controls(change: Callable[[Reply], None]) -> Callable[[int], Callable[[Reply], None]]:
    """``next_reply`` that changes what controls get."""
    return lambda number: lambda reply: change(reply) if reply.asked.get("n") == GENERATIONS // 2 else None


def is_video(group: RolloutGroup) -> bool:
    return bool(group.sample.media)


def test_the_bonus_compares_with_shuffled_frames_that_the_server_saw(server: RecordingServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server, questions=9)
    groups = run.step(1)
    videos = [*filter(is_video, groups)]
    for group in videos:
        run.assert_by_the_rule(group, server)
    earned = [any(reward.parts["temporal"] for reward in group.rewards) for group in videos]
    assert set(earned) == {True, False}
    assert [request.is_control for request in server.requests_of_run].count(True) == len(earned) == 6
    assert all(r.parts["temporal"] == 0.0 for group in groups if not is_video(group) for r in group.rewards)
    assert len(groups) == 9 and not run.bad


def test_a_question_whose_control_has_no_valid_answer_trains_without_bonus(
    server: RecordingServer, tmp_path: Path
) -> None:
    server.next_reply = to_controls(lambda reply: reply.value.update(choices=[]))
    run = Run(tmp_path, server)
    groups = run.step(1)
    assert [len(group.rollouts) for group in groups] == [GENERATIONS] * QUESTIONS
    assert any(accuracy(rollout.text) for group in groups if is_video(group) for rollout in group.rollouts)
    assert all(reward.parts["temporal"] == 0.0 for group in groups for reward in group.rewards)
    faults: list[BadSample] = run.bad
    assert [(fault.sample_id, fault.reason) for fault in faults] == [("video-0", UNUSABLE), ("video-2", UNUSABLE)]
    assert all(fault.message.startswith("no control group: ") and "for 2 choices" in fault.message for fault in faults)


def test_controls_are_sampled_ahead_with_their_groups(server: RecordingServer, tmp_path: Path) -> None:
    """Slow ones delay the next loading of weights, which never begins while they are sampled."""
    found = []
    for staleness in (0, 1):
        (folder := tmp_path / str(staleness)).mkdir()
        server.requests_of_run, server.controlled = [], []
        server.next_reply = to_controls(lambda reply: setattr(reply, "wait_seconds", 0.3))
        run = Run(folder, server, staleness)
        for step in range(1, STEPS + 1):
            groups = run.step(step)
            assert [group.order for group in groups] == [*range(QUESTIONS)]
            # Where a run resumes that ends here.
            assert run.collector.position == step * QUESTIONS
            for group in filter(is_video, groups):
                own, control = run.assert_by_the_rule(group, server)
                updates = max(0, step - 1 - staleness)
                assert group.policy_version == own.version.updates == control.version.updates == updates
        assert len(server.requests_of_run) == STEPS * (QUESTIONS + 2)
        assert server.controlled.count("/collective_rpc") == STEPS
        assert not any("sampling again" in line for line in run.lines) and not run.bad
        found.append(sorted((request.frames, request.count, request.seed) for request in server.requests_of_run))
    assert found[0] == found[1]


def test_a_control_of_a_server_that_lost_its_weights_is_sampled_again(server: RecordingServer, tmp_path: Path) -> None:
    """The last one of step 2, which is sampled ahead."""
    run, left = Run(tmp_path, server, staleness=1), [4]

    def restart(reply: Reply) -> None:
        left[0] -= 1
        if left[0] == 0:
            server.restart()

    server.next_reply = to_controls(restart)
    run.step(1)
    for group in filter(is_video, run.step(2)):
        run.assert_by_the_rule(group, server)
    assert left[0] < 0 and any("lost the weights of this run while it sampled" in line for line in run.lines)
