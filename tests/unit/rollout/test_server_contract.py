"""``vlm-pg doctor --server``: a server that fits passes every check; each fault fails the check of that name, with what
was measured, and the checks after it are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.odd_server import OddServer, Reply
from tests.support.tiny_server import WeightServer
from vlm_pg import cli
from vlm_pg.models.loading import load_policy
from vlm_pg.rollout.server import client, probe
from vlm_pg.rollout.server.divergence import Divergence
from vlm_pg.rollout.server.weights import Version

TINY = Path(__file__).parents[3] / "assets" / "tiny-qwen2_5-vl"
PROMPTS = ["prompt: text", "prompt: image", "prompt: video"]
LOGPROBS = ["logprobs: text", "logprobs: image", "logprobs: video"]
LOADS = ["load: same weights", "load: changed weights", "load: model's weights"]
CHECKS = ["server", "vLLM version", *PROMPTS, "positions", *LOGPROBS, "caches", "endpoints"]
Found = dict[str, tuple[str, str]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_pg.http.client.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(client, "PROBE_EVERY_SECONDS", 0.01)


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(TINY)
    assert server.schema is not None
    server.schema.value["paths"]["/version"] = {}
    server.before_control = lambda path: Reply({"version": "0.32.1"}, {}) if path == "/version" else None
    yield server
    server.stop()


@pytest.fixture
def check(server: WeightServer, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Found]]:
    """The exit code, and per check its status and all that is printed of it."""

    def run(*arguments: str) -> tuple[int, Found]:
        few = ("rollout.num_generations=2", "rollout.server.retries=1")
        code = cli.main(["doctor", "--server", server.url, "--model", str(TINY), *few, *arguments])
        found: Found = {}
        *lines, last = capsys.readouterr().out.splitlines()
        for line in lines:
            if "has a head size of 16" in line:  # true of the tiny model and a real vLLM
                continue
            status, name, text = line[:7].strip().lower(), line[8:29].strip(), line[30:]
            name = name or list(found)[-1]
            status, before = (status, "") if status else found[name]
            found[name] = (status, f"{before} {text}")
        assert last == ("The server does not fit this trainer, see above." if code else "The server fits this trainer.")
        return code, found

    return run


def of_status(found: Found, status: str) -> list[str]:
    return [name for name, (its, _) in found.items() if its == status]


def on_reply(server: WeightServer, change: Callable[[Reply], None]) -> None:
    server.next_reply = lambda number: change


def is_initial(server: WeightServer) -> bool:
    """Whether the server has the weights it was started with."""
    own = load_policy(TINY, device="cpu").model.state_dict()
    return all(torch.equal(value, own[name]) for name, value in server._policy.model.state_dict().items())


def test_a_server_that_fits_passes_all_checks_and_has_its_weights_afterwards(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    code, found = check("--update")
    assert code == 0 and list(found) == [*CHECKS, *LOADS] == of_status(found, "ok")
    for name in PROMPTS:
        assert "token ids equal the trainer's; responses with token ids" in found[name][1]
    for name in (*LOGPROBS, *LOADS):
        assert "nats per token (limit 1e-07), largest difference" in found[name][1]
    assert "2 responses in 1 request" in found["caches"][1]
    before = float(found["load: changed weights"][1].split("KL ")[1].split()[0])
    assert before > 1e-3
    assert is_initial(server) and server.controlled.count("/collective_rpc") == 3
    version = Version.parse(server.version)
    assert version is not None and version.updates == 2


def test_without_update_nothing_is_loaded(server: WeightServer, check: Callable[..., tuple[int, Found]]) -> None:
    code, found = check()
    assert code == 0 and of_status(found, "note") == ["weight update"] and list(found) == [*CHECKS, "weight update"]
    assert "not tried: it changes what the server samples from -> Add --update" in " ".join(
        found["weight update"][1].split()
    )
    assert server.controlled == ["/version"]


def test_another_prompt_fails_and_no_weights_are_loaded(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    def other_template(reply: Reply) -> None:
        reply.value["prompt_token_ids"][4] += 1

    on_reply(server, other_template)
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == PROMPTS
    for name in PROMPTS:
        assert "token 4 of the prompt is" in found[name][1] and "same chat template" in found[name][1]
    assert "not tried: it would replace other weights" in found["weight update"][1]
    assert server.controlled == ["/version"]


def test_media_that_the_server_resizes_or_samples_again_fail(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    def smaller(reply: Reply) -> None:
        if len(reply.asked["messages"][-1]["content"]) > 1:
            del reply.value["prompt_token_ids"][50:53]

    on_reply(server, smaller)
    code, found = check()
    assert code == 1 and of_status(found, "failed") == PROMPTS[1:]
    assert "must not sample frames again. vLLM keeps at most" in found["prompt: video"][1]
    assert found["logprobs: text"][0] == found["caches"][0] == found["endpoints"][0] == "ok"


def test_a_server_that_does_not_load_weights_fails(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    server.loads = False
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == ["load: changed weights"]
    assert "samples from others: its log-probabilities of" in found["load: changed weights"][1]


def test_a_server_with_other_weights_fails_and_keeps_them(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    with torch.no_grad():
        for weight in server._policy.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std())
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == [*LOGPROBS, "caches"]
    assert "-> Serve the checkpoint of model.path in the trainer's dtype" in found["logprobs: text"][1]
    assert "not tried: it would replace other weights" in found["weight update"][1]
    assert server.controlled == ["/version"]


def test_a_server_without_log_probabilities_fails(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    def drop(reply: Reply) -> None:
        for choice in reply.value["choices"]:
            del choice["logprobs"]

    on_reply(server, drop)
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == [*LOGPROBS, "caches"]
    assert "no log-probabilities reported -> Which policy samples is not known" in found["logprobs: image"][1]
    assert "not tried" in found["weight update"][1]


def test_a_vllm_server_without_token_ids_fails_and_another_is_noted(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    def text_alone(reply: Reply) -> None:
        reply.value["prompt_token_ids"] = None
        for choice in reply.value["choices"]:
            choice |= {"message": {"content": "red"}, "finish_reason": "stop", "token_ids": None, "logprobs": None}

    on_reply(server, text_alone)
    code, found = check()
    assert code == 1 and of_status(found, "failed")[:3] == PROMPTS
    assert "tokens here, unknown there; responses without token ids" in found["prompt: text"][1]
    other = OddServer(exact=False)
    server.url = other.url
    code, found = check("rollout.server.weights=keep")
    other.stop()
    assert code == 0 and of_status(found, "ok") == ["server"] and "vLLM version" not in found
    assert "not tried" in found["prompt: video"][1] and "tokenized again" in found["prompt: image"][1]
    assert "no log-probabilities reported" in found["logprobs: image"][1]


def test_lacking_endpoints_and_other_versions_are_named(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    server.schema = Reply({"paths": {"/collective_rpc": {}, "/version": {}}}, {})
    server.before_control = lambda path: Reply({"version": "0.29.0"}, {})
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == ["weight update"]
    assert "lacks /reset_encoder_cache" in found["weight update"][1]
    assert "VLLM_SERVER_DEV_MODE=1" in found["weight update"][1]
    assert found["vLLM version"] == ("note", " 0.29.0 -> vLLM 0.32 was tested.")


def test_other_positions_are_noted(server: WeightServer, check: Callable[..., tuple[int, Found]]) -> None:
    code, found = check("model.positions=transformers")
    assert code == 0 and found["positions"][0] == "note"
    assert "rule transformers here, qwen at the server -> Only videos" in found["positions"][1]


def test_fewer_choices_than_requested_are_noted(server: WeightServer, check: Callable[..., tuple[int, Found]]) -> None:
    on_reply(server, lambda reply: reply.value["choices"].__delitem__(slice(1, None)))
    code, found = check()
    assert code == 0 and "2 responses in 2 requests" in found["caches"][1]
    assert "gave 1 of 2 choices" in found["log"][1]


def test_a_server_that_is_away_ends_the_checks(server: WeightServer, check: Callable[..., tuple[int, Found]]) -> None:
    server.stop()
    code, found = check("--update")
    assert code == 1 and list(found) == ["server", "other checks"] == [*of_status(found, "failed"), "other checks"]
    assert "has not answered" in found["server"][1] and "skipped" in found["other checks"][1]
    server.start()


def test_a_model_that_the_server_does_not_list_ends_the_checks(check: Callable[..., tuple[int, Found]]) -> None:
    code, found = check("rollout.server.model=large")
    assert code == 1 and list(found) == ["server", "other checks"]
    assert "'large', which the server does not serve. It lists: tiny" in found["server"][1]


@pytest.mark.parametrize("times", [1, 99])
def test_the_models_weights_are_loaded_again_after_an_error(
    server: WeightServer, check: Callable[..., tuple[int, Found]], times: int
) -> None:
    """The second loading is refused; or all from then on."""
    seen: list[str] = []

    def refuse(path: str) -> Reply | None:
        seen.extend([path] if path == "/collective_rpc" else [])
        refused = path == "/collective_rpc" and 1 < len(seen) <= 1 + times
        return Reply({"error": "no memory"}, {}, 400) if refused else None

    server.before_control = refuse
    code, found = check("--update")
    assert code == 1 and of_status(found, "failed") == (LOADS[1:2] if times == 1 else LOADS[1:])
    assert "did not load" in found["load: changed weights"][1] and "no memory" in found["load: changed weights"][1]
    assert is_initial(server)
    if times > 1:
        assert "-> The server may still have changed weights. Start it again." in found[LOADS[2]][1]


def test_changed_weights_do_not_stay_on_the_server_after_an_interruption(
    server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, interrupted = probe.divergence, list[bool]()

    def divergence(*given: Any) -> Divergence:
        if not interrupted and not is_initial(server):
            interrupted.append(True)
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(probe, "divergence", divergence)
    assert cli.main(["doctor", "--server", server.url, "--model", str(TINY), "--update"]) == 130
    assert interrupted and server.controlled.count("/collective_rpc") == 3 and is_initial(server)


def test_an_adapter_is_loaded_changed_and_removed(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    code, found = check("--update", "model.lora={rank: 2}")
    assert code == 0 and of_status(found, "ok") == [*CHECKS, *LOADS]
    assert server.controlled.count("/v1/load_lora_adapter") == 3 and not server.adapters


def test_a_server_that_sleeps_during_updates_wakes_up_with_them(
    server: WeightServer, check: Callable[..., tuple[int, Found]]
) -> None:
    code, found = check("--update", "rollout.server.sleep=true")
    assert code == 0 and of_status(found, "ok") == [*CHECKS, *LOADS]
    assert server.controlled.count("/sleep?level=2") == 1 and is_initial(server)


def test_a_configuration_gives_model_and_settings(
    server: WeightServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {TINY}}}\ntraining: {{steps: 1}}\nrollout: {{num_generations: 3}}\n")
    assert cli.main(["doctor", "--server", server.url, str(path), "rollout.server.weights=keep"]) == 0
    out = capsys.readouterr().out
    assert "3 responses in 1 request" in out and "none, with rollout.server.weights=keep" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--update"], r"--update and KEY=VALUE go with --server URL"),
        (["model.dtype=bf16"], r"--update and KEY=VALUE go with --server URL"),
        (["--server", "http://127.0.0.1:1/v1"], r"give either CONFIG or --model PATH"),
        (["c.yaml", "--server", "http://127.0.0.1:1/v1", "--model", "m"], r"give either CONFIG or --model PATH"),
        (["--server", "nonsense", "--model", "m"], r"must be http:// or https://"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
