"""Weights on a server that samples from a policy of its own: it follows, or the run ends by name. What is sampled under
other weights, or not known to be, never becomes a rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.odd_server import Reply
from tests.support.server_engines import reported
from tests.support.tiny_server import WeightServer
from vlm_pg.errors import ServerError
from vlm_pg.models.loading import load_policy
from vlm_pg.models.settings import LoraSettings, ModelSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server import client
from vlm_pg.rollout.server.contract import LoadedModel
from vlm_pg.rollout.server.engine import PROBE_DIVERGENCE, PROBE_DIVERGENCE_MAX, ServerEngine
from vlm_pg.rollout.server.messages import ChatMessages
from vlm_pg.rollout.server.probe import probe_prompt
from vlm_pg.rollout.server.weights import LOADING_ATTEMPTS, Version
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.engines import trained_weights
from vlm_pg.types import ResponseGroup, Sample

TINY = Path(__file__).parents[3] / "assets" / "tiny-qwen2_5-vl"
RESET = ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(TINY)
    yield server
    server.stop()


def is_question(body: dict[str, Any]) -> bool:
    """A request of a step, not of the probe."""
    return "Question" in body["messages"][-1]["content"][-1]["text"]


class Run:
    """An engine, and a policy whose weights can be changed."""

    def __init__(
        self,
        folder: Path,
        *servers: WeightServer,
        lora: LoraSettings | None = None,
        rollout: dict[str, Any] | None = None,
        **settings: Any,
    ):
        parts: Any = {"train": ("tower", "merger", "language")} if lora is None else {"lora": lora}
        trained = ModelSettings(path=str(TINY), **parts)
        self.policy, self.lines = load_policy(TINY, device="cpu", settings=trained), list[str]()
        url, *replicas = [server.url for server in servers]
        given = {"url": url, "replicas": replicas, "retries": 1, "wait_seconds": 5.0} | settings
        sampling = {"engine": "server", "num_generations": 2, "max_new_tokens": 8, "server": given} | (rollout or {})
        sample = {f"q{i}": Sample(f"q{i}", f"Question {i}?", (), (), "1", "numerical", "t", "t") for i in range(4)}
        builder = PromptBuilder(self.policy.processor, PromptSettings(), self.policy.positions)
        self.prompts = [builder.build(one, ()) for one in sample.values()]
        self.engine = ServerEngine(
            LoadedModel(self.policy),
            RolloutSettings.model_validate(sampling),
            3,
            lambda: False,
            ChatMessages(self.policy, sample),
            folder,
            self.lines.append,
        )

    def update(self, seed: int = 0) -> None:
        """Change all trained weights."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, weight in trained_weights(self.policy):
                if weight.ndim > 1:
                    size = float(weight.std()) or 0.1
                    weight.add_(0.3 * size * torch.randn(weight.shape, generator=generator))
        self.policy.weights_changed()

    def assert_on_policy(self, step: int) -> None:
        groups = self.engine.generate(self.prompts, step)
        with torch.no_grad():
            scored = self.policy.logprobs(
                [ResponseGroup(p, tuple(r.token_ids for r in g)) for p, g in zip(self.prompts, groups, strict=True)]
            )
        for group, values in zip(groups, scored, strict=True):
            for rollout, own in zip(group, values, strict=True):
                torch.testing.assert_close(rollout.rollout_logprobs, own, atol=1e-4, rtol=0)


def test_the_server_follows_every_update(server: WeightServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server)
    for step in range(3):
        run.engine.sync_weights(1)
        run.engine.sync_weights(1)  # nothing new
        run.assert_on_policy(step)
        values = reported(run.engine)
        assert 0 <= values[PROBE_DIVERGENCE] < 1e-9 and values[PROBE_DIVERGENCE_MAX] < 1e-4
        found = Version.parse(server.version)
        assert found is not None and found.updates == step
        run.update(step)
    changing = [path for path in server.controlled if path not in ("/weight_info", "/metrics", "/resume")]
    assert changing == ["/update_weight_version", "/collective_rpc", *RESET, "/update_weight_version"] * 3
    # Only the newest weights stay, for a server that is started again.
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["weights-2"]


def test_a_server_that_answers_and_does_not_load_ends_the_run_by_name(server: WeightServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server)
    run.engine.sync_weights(1)
    server.loads = False
    run.update()
    with pytest.raises(ServerError) as caught:
        run.engine.sync_weights(1)
    for part in (server.url, "after 1 updates", "samples from others", "KL of", "max_probe_divergence allows 1e-07"):
        assert part in str(caught.value)


def test_a_restart_between_steps_is_noticed_and_the_weights_are_loaded_again(
    server: WeightServer, tmp_path: Path
) -> None:
    run = Run(tmp_path, server)
    run.update()
    run.engine.sync_weights(1)
    server.restart()
    run.assert_on_policy(1)
    assert any("has lost the weights of this run" in line for line in run.lines)


@pytest.mark.parametrize("loaded_again", [False, True])
def test_what_a_server_sampled_around_a_restart_is_sampled_again(
    server: WeightServer, tmp_path: Path, loaded_again: bool
) -> None:
    """Also where another process of the run has loaded the same weights before this one looks."""
    run = Run(tmp_path, server)
    run.update()
    run.engine.sync_weights(1)
    version = Version.parse(server.version)
    assert version is not None
    folder = tmp_path / "weights" / f"weights-{version.updates}"
    seen: list[int] = []

    def restart(reply: Reply) -> None:
        server.version = "default"
        server._policy = load_policy(TINY, device="cpu")
        if loaded_again:
            server.version = str(Version.new(version.run, version.updates))
            server._policy = load_policy(folder, device="cpu")

    def next_reply(number: int) -> Callable[[Reply], None] | None:
        seen.append(number)
        return restart if len(seen) == 2 else None

    server.next_reply = next_reply
    run.assert_on_policy(1)
    assert any("sampling again" in line for line in run.lines) and len(seen) > len(run.prompts)


def test_a_server_that_is_always_started_again_ends_the_run(server: WeightServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server)
    run.engine.sync_weights(1)

    def lose(reply: Reply) -> None:
        server.version = "default"

    server.next_reply = lambda number: (
        lose if server.bodies[-1]["messages"][-1]["content"][-1]["text"].startswith("Question") else None
    )
    with pytest.raises(ServerError, match=r"lost the weights of this run 3 times while it sampled step 5"):
        run.engine.generate(run.prompts, 5)


@pytest.mark.parametrize("path", ["/update_weight_version", "/collective_rpc", *RESET])
@pytest.mark.parametrize("times", [1, 99])
def test_loading_that_is_cut_off_is_repeated_or_ends_the_run(
    server: WeightServer, tmp_path: Path, path: str, times: int
) -> None:
    """Cut once: repeated. Always: an error, and the server's version is of no complete loading."""
    run = Run(tmp_path, server)
    run.engine.sync_weights(1)
    run.update()
    left = [times]

    def cut(asked: str) -> Reply | None:
        if asked != path or not left[0]:
            return None
        left[0] -= 1
        return Reply({}, {}, silent=True)

    server.before_control = cut
    if times == 1:
        run.engine.sync_weights(1)
        run.assert_on_policy(1)
        return
    with pytest.raises(ServerError, match="broke off"):
        run.engine.sync_weights(1)
    found = Version.parse(server.version)
    assert found is not None and found.updates != 1


def test_a_server_that_restarts_while_it_loads_never_gets_the_version(server: WeightServer, tmp_path: Path) -> None:
    """Before the caches are dropped, or right before the version is set."""
    run = Run(tmp_path, server)
    restarts = [2]

    def restart(path: str) -> None:
        if restarts[0] and path == RESET[-1]:
            restarts[0] -= 1
            server.restart()

    server.before_control = restart  # type: ignore[assignment]
    run.engine.sync_weights(1)
    run.assert_on_policy(0)
    assert server.controlled.count("/collective_rpc") == 3
    restarts[0] = LOADING_ATTEMPTS
    run.update()
    with pytest.raises(ServerError, match=f"started again {LOADING_ATTEMPTS} times while it loaded"):
        run.engine.sync_weights(1)


def test_two_runs_on_one_server_end_by_name(server: WeightServer, tmp_path: Path) -> None:
    first, second = Run(tmp_path / "a", server), Run(tmp_path / "b", server)
    first.engine.sync_weights(1)
    second.engine.sync_weights(1)
    second.assert_on_policy(0)
    with pytest.raises(ServerError, match=r"has weights of another run \(b-[0-9a-f]+\).*this run \(a-"):
        first.engine.generate(first.prompts, 1)


def test_questions_are_divided_over_replicas_which_all_follow(tmp_path: Path) -> None:
    servers = [WeightServer(TINY) for _ in range(3)]
    run = Run(tmp_path, *servers)
    for step in range(2):
        run.engine.sync_weights(1)
        run.assert_on_policy(step)
        run.update()
    of_questions = [sum(map(is_question, server.bodies)) for server in servers]
    assert sum(of_questions) == 8 and min(of_questions) >= 2
    servers[1].models = {"data": [{"id": "other", "owned_by": "vllm"}]}
    with pytest.raises(ServerError, match=r"The servers differ.*serves tiny.*other.*Start all servers of a run alike"):
        Run(tmp_path, *servers)
    for server in servers:
        server.stop()


def test_what_a_server_cannot_do_is_refused_before_the_run(server: WeightServer, tmp_path: Path) -> None:
    server.schema = Reply({"paths": {"/collective_rpc": {}}}, {})
    with pytest.raises(ServerError, match=r"lacks /reset_encoder_cache.*VLLM_SERVER_DEV_MODE=1.*weights=keep"):
        Run(tmp_path, server)
    with pytest.raises(ServerError, match=r"lacks .*/sleep, /update_weight_version, /wake_up"):
        Run(tmp_path, server, sleep=True)
    server.models = {"data": [{"id": "tiny", "owned_by": "someone"}]}
    with pytest.raises(ServerError, match=r"sleep is true, which takes vLLM, and the server at .* is of kind openai"):
        Run(tmp_path, server, sleep=True)
    with pytest.raises(ServerError, match=r"kind openai, which cannot load the weights.*weights=keep"):
        Run(tmp_path, server)


@pytest.mark.parametrize(("version", "logged"), [("0.32.1", False), ("0.40.0", True)])
def test_a_vllm_that_was_not_tested_is_logged(server: WeightServer, tmp_path: Path, version: str, logged: bool) -> None:
    server.schema.value["paths"]["/version"] = {}  # type: ignore[union-attr]
    server.before_control = lambda path: Reply({"version": version}, {}) if path == "/version" else None
    lines = Run(tmp_path, server).lines
    assert any(f"is vLLM {version}; loading weights was tested with 0.32" in line for line in lines) is logged


def test_a_folder_that_the_server_does_not_see_is_named(server: WeightServer, tmp_path: Path) -> None:
    run = Run(tmp_path, server)
    server.before_control = lambda path: (
        Reply({"error": "Cannot find any model weights"}, {}, 500) if path == "/collective_rpc" else None
    )
    with pytest.raises(ServerError, match=r"did not load .*weights-0.*Cannot find any.*same path.*weights_folder"):
        run.engine.sync_weights(1)


def test_an_adapter_alone_is_given_to_a_server(server: WeightServer, tmp_path: Path) -> None:
    """Under a name of its own for each update; the one before is removed, and the base stays."""
    run = Run(tmp_path, server, lora=LoraSettings(rank=2))
    for step in range(3):
        run.engine.sync_weights(1)
        run.assert_on_policy(step)
        (name,) = server.adapters
        assert f"-{step}-" in name and run.engine._generator.model_name == name
        run.update(step)
    assert "/collective_rpc" not in server.controlled
    (folder,) = (tmp_path / "weights").iterdir()
    assert not (folder / "model.safetensors").exists() and (folder / "adapter_model.safetensors").is_file()


def test_a_server_that_loses_its_adapter_while_it_samples_is_given_it_again(
    server: WeightServer, tmp_path: Path
) -> None:
    """It refuses further requests for that name by status 404, which would otherwise end the run."""
    run = Run(tmp_path, server, lora=LoraSettings(rank=2), concurrency=1)
    run.update()
    run.engine.sync_weights(1)
    seen: list[int] = []

    def next_reply(number: int) -> Callable[[Reply], None] | None:
        seen.append(number)
        return (lambda reply: server.restart()) if len(seen) == 2 else None

    server.next_reply = next_reply
    run.assert_on_policy(1)
    assert any("sampling again" in line for line in run.lines)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["weights", "adapter"])
def test_a_server_sleeps_while_the_trainer_updates(
    server: WeightServer, tmp_path: Path, lora: LoraSettings | None
) -> None:
    """It gives up its weights, unless an adapter needs them, and has them again before the next step in any case."""
    run = Run(tmp_path, server, lora=lora, sleep=True)
    for step in range(3):
        run.engine.sync_weights(1)
        run.assert_on_policy(step)
        run.engine.release_memory()
        assert server.asleep and server.controlled[-1] == f"/sleep?level={2 if lora is None else 1}"
        if step != 1:
            run.update(step)
    if lora is None:
        weights, cache = (server.controlled.index(f"/wake_up?tags={tag}") for tag in ("weights", "kv_cache"))
        assert server.controlled[weights + 1 : cache] == ["/collective_rpc"]


def test_a_restart_during_the_probe_is_no_other_weights(server: WeightServer, tmp_path: Path) -> None:
    """Its responses come from the initial weights then, which alone would end the run."""
    run = Run(tmp_path, server)
    run.update()
    left = [1]

    def restart(number: int) -> Callable[[Reply], None] | None:
        if left[0]:
            left[0] -= 1
            server.restart()
            # This request was read by then; the next ones come from the initial weights.
            return lambda reply: reply.value["choices"].clear()
        return None

    server.next_reply = restart
    run.engine.sync_weights(1)
    run.assert_on_policy(1)
    assert any("started again while it loaded weights" in line for line in run.lines)


def test_a_folder_that_cannot_be_written_is_named(server: WeightServer, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    run = Run(tmp_path, server, weights_folder=str(tmp_path / "full"))
    with pytest.raises(ServerError, match=r"could not be written to .*full.*Not a directory.*weights_folder"):
        run.engine.sync_weights(1)


def test_runs_share_a_folder_for_weights(server: WeightServer, tmp_path: Path) -> None:
    """Each in a part of its own, which it empties at its start."""
    for name in ("a", "b", "a"):
        run = Run(tmp_path / name, server, weights_folder=str(tmp_path / "shm"))
        run.update()
        run.engine.sync_weights(1)
    kept = sorted(path.relative_to(tmp_path / "shm").parts for path in (tmp_path / "shm").glob("*/weights/*"))
    assert [(first[:2], *rest) for first, *rest in kept] == [
        ("a-", "weights", "weights-1"),
        ("b-", "weights", "weights-1"),
    ]


def test_versions_are_read_as_they_are_written() -> None:
    for updates in (None, 0, 12):
        version = Version.new("my-run-1", updates)
        assert Version.parse(str(version)) == version
    assert Version.parse("default") is None and Version.parse("vlm_pg-a-1") is None


@pytest.mark.parametrize("in_flight", ["continue", "redo"])
@pytest.mark.parametrize("transfer", ["folder", "broadcast"])
def test_rollouts_in_flight_go_on_or_are_sampled_anew(
    server: WeightServer, tmp_path: Path, in_flight: str, transfer: str
) -> None:
    """Each token has the log-probability that the weights which it names give it."""
    run = Run(tmp_path, server, transfer=transfer, rollout={"staleness": 1, "in_flight": in_flight})
    prompts = [*run.prompts, probe_prompt(run.policy)]
    run.engine.sync_weights(1)
    before, waiting = load_policy(TINY, device="cpu"), list[dict[str, Any]]()
    first_pause = server.interrupted
    server.is_slow = lambda body: server.interrupted == first_pause and waiting.append(body) is None
    run.engine.start(prompts, 2)
    while len(waiting) < len(prompts):
        time.sleep(0.001)
    run.update()
    run.engine.sync_weights(2)
    groups = run.engine.generate(prompts, 2)
    responses = [ResponseGroup(p, tuple(r.token_ids for r in g)) for p, g in zip(prompts, groups, strict=True)]
    with torch.no_grad():
        scored = [policy.logprobs(responses) for policy in (before, run.policy)]
    for group, *of_versions in zip(groups, *scored, strict=True):
        for rollout, *values in zip(group, *of_versions, strict=True):
            count = len(rollout.token_ids)
            interrupted = in_flight == "continue" and count > 1
            assert len(rollout.token_versions) == count and set(rollout.token_versions) == (
                {0, 1} if interrupted else {1}
            )
            assert rollout.weights_version == rollout.token_versions[0]
            own = torch.stack(values)[torch.tensor(rollout.token_versions), torch.arange(count)]
            torch.testing.assert_close(rollout.rollout_logprobs, own, atol=1e-4, rtol=0)
    values = reported(run.engine)
    assert (values["rollouts_continued"] > 0.9) == (in_flight == "continue")
    assert (values["rollout_lag"] > 0.1) == (in_flight == "continue")


def test_weights_in_flight_need_the_endpoints_for_it(server: WeightServer, tmp_path: Path) -> None:
    assert server.schema is not None
    del server.schema.value["paths"]["/inference/v1/generate"]
    with pytest.raises(ServerError, match=r"lacks /inference/v1/generate.*--enable-scale-out"):
        Run(tmp_path, server, rollout={"staleness": 1, "in_flight": "redo"})
    with pytest.raises(ServerError, match=r"continue, which takes vLLM and whole weights, and model\.lora is set"):
        Run(tmp_path, server, lora=LoraSettings(rank=2), rollout={"staleness": 1, "in_flight": "continue"})
