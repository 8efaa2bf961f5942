"""Servers are started with the flags that exact sampling needs, and stopped whatever ends the run."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT
from tests.support.served import Serving
from vlm_pg.cli import main
from vlm_pg.config import RunConfig, load_config
from vlm_pg.errors import ConfigError
from vlm_pg.rollout.server.launch import ServerCommand, divide_gpus, server_commands
from vlm_pg.rollout.settings import LaunchSettings

VLLM = ROOT / "configs/qwen2_5_vl_7b_video_r1_vllm.yaml"
# Beside the servers: writes what it sees and waits for a signal, of which its exit code tells.
WAITS = """import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: sys.exit(40 + number))
print("beside", flush=True)
time.sleep(600)
"""


def vllm_config(*overrides: str) -> RunConfig:
    return load_config(VLLM, overrides)


def commands(config: RunConfig, gpus: list[list[str]] | None = None) -> list[ServerCommand]:
    sections = config.model, config.media, config.prompt, config.rollout
    return server_commands(*sections, config.run.seed, gpus or [])


def flags(command: ServerCommand) -> dict[str, Any]:
    words = list(command.command[3:])
    values = [word if following.startswith("--") else following for word, following in zip(words, [*words[1:], "--"])]
    return {word: value for word, value in zip(words, values) if word.startswith("--")}


def test_flags_for_exact_sampling() -> None:
    config = vllm_config("run.seed=4294967301", "rollout.server.launch.arguments=[--enforce-eager]")
    first, *others = commands(config, [["4"], ["5"], ["6"], ["7"]])
    assert [first.url, others[-1].url] == ["http://127.0.0.1:8000/v1", "http://127.0.0.1:8003/v1"]
    assert list(config.rollout.server.urls) == [command.url for command in [first, *others]]
    assert first.command[:3] == ("vllm", "serve", "Qwen/Qwen2.5-VL-7B-Instruct")
    assert first.command[-1] == "--enforce-eager", "after ours, so that vLLM takes the user's"
    assert first.environment == {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "4"}
    found = flags(first)
    assert (found["--host"], found["--port"], flags(others[0])["--port"]) == ("127.0.0.1", "8000", "8001")
    assert (found["--dtype"], found["--seed"]) == ("bfloat16", "5")
    assert int(found["--max-model-len"]) == config.prompt.max_prompt_tokens + config.rollout.max_new_tokens
    assert json.loads(found["--media-io-kwargs"]) == {"video": {"num_frames": -1}}
    sizes = json.loads(found["--mm-processor-kwargs"])
    assert sizes["images_kwargs"]["size"] == {"shortest_edge": 1, "longest_edge": config.media.image_max_pixels}
    assert sizes["videos_kwargs"]["size"] == {"shortest_edge": 1, "longest_edge": config.media.max_pixels * 16}
    assert not {"--logprobs-mode", "--enable-lora", "--trust-remote-code", "--served-model-name"} & found.keys()
    assert shlex.split(str(first))[:2] == ["VLLM_SERVER_DEV_MODE=1", "CUDA_VISIBLE_DEVICES=4"]
    assert tuple(shlex.split(str(first))[2:]) == first.command


def test_an_adapter_and_another_temperature() -> None:
    lora = ("model.train=[language]", "model.lora={rank: 24}", "rollout.temperature=0.7", "rollout.server.model=mine")
    found = flags(commands(vllm_config(*lora))[0])
    assert (found["--max-lora-rank"], found["--logprobs-mode"]) == ("32", "processed_logprobs")
    assert "--enable-lora" in found and found["--served-model-name"] == "mine"
    assert commands(vllm_config(*lora))[0].environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    assert not commands(vllm_config(*lora, "rollout.server.weights=keep"))[0].environment
    (asleep, *_) = commands(vllm_config(*lora, "rollout.server.sleep=true"))
    assert "--enable-sleep-mode" in asleep.command and asleep.environment["VLLM_SERVER_DEV_MODE"] == "1"
    # Processed log-probabilities would be those after the filter.
    assert "--logprobs-mode" not in flags(commands(vllm_config(*lora, "rollout.top_p=0.9"))[0])
    with pytest.raises(ConfigError, match=r"model\.lora\.rank is 600, and vLLM loads adapters of rank 512 at most"):
        commands(vllm_config(*lora, "model.lora.rank=600"))


def test_servers_get_the_last_gpus() -> None:
    launch = LaunchSettings(num_servers=2, tensor_parallel_size=2)
    assert divide_gpus("abcdef", launch, trains=True) == ([["c", "d"], ["e", "f"]], ["a", "b"])
    assert divide_gpus("abcd", launch, trains=False) == ([["a", "b"], ["c", "d"]], [])
    assert divide_gpus("abcd", launch, trains=True, shared=True) == ([["a", "b"], ["c", "d"]], [*"abcd"])
    assert divide_gpus("", launch, trains=True) == ([], [])
    with pytest.raises(ConfigError, match=r"needs 4 GPU.* and one more for training; there are 4 \(CUDA_VIS"):
        divide_gpus("abcd", launch, trains=True)
    with pytest.raises(ConfigError, match=r"needs 4 GPU.*; there are 3"):
        divide_gpus("abc", launch, trains=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.engine=in_process", "rollout.server.launch is set and rollout.engine is in_process"),
        ("rollout.server.url=http://node-7:8000/v1", "only this machine reaches them"),
        ("rollout.server.url=http://127.0.0.1/v1", "it must be http://HOST:PORT/v1"),
        ("rollout.server.url=https://127.0.0.1:8000/v1", "it must be http://HOST:PORT/v1"),
        ("rollout.server.url=http://127.0.0.1:65534/v1", "with free ports up to 65535"),
    ],
)
def test_impossible_settings(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        vllm_config(override)


def test_other_nodes_are_reached_at_a_host_that_is_set() -> None:
    config = vllm_config("rollout.server.url=http://node-7:8000/v1", "rollout.server.launch.host=node-7")
    further = vllm_config("rollout.server.replicas=['http://node-8:8000/v1']")
    assert flags(commands(config)[0])["--host"] == "node-7"
    assert further.rollout.server.urls[-2:] == ("http://127.0.0.1:8003/v1", "http://node-8:8000/v1")


def test_a_dry_run_prints_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert main(["serve", str(VLLM), "--dry-run", "--", "vlm-pg", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[1] for line in lines] == [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in range(4, 8)]
    assert main(["serve", str(ROOT / "configs/embedded.yaml"), "--dry-run"]) == 2
    assert "has no rollout.server.launch, which says what servers to start" in capsys.readouterr().err


def test_a_command_runs_beside_healthy_servers_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    code = "import os, sys; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:]); sys.exit(7)"
    beside = [sys.executable, "-c", code, "a.b=1", "--", "c"]
    serving = Serving(tmp_path, beside=beside, gpus="0,1,2")
    returncode, printed = serving.finish()
    assert returncode == 7, printed
    urls = ", ".join(f"http://127.0.0.1:{serving.port + number}/v1" for number in range(2))
    assert f"all servers are healthy: {urls}" in printed and "GPUs 0 ['a.b=1', '--', 'c']" in printed
    assert "stopped 2 server(s)" in printed and str(tmp_path / "run-servers") in printed
    assert "arguments serve a model --host 127.0.0.1" in serving.log(1)
    assert "CUDA_VISIBLE_DEVICES=2" in serving.log(1)


@pytest.mark.parametrize(("behaviour", "end"), [("DIES_AT_ONCE", "has ended (exit code 3)"), ("HANGS", "after 1 s")])
def test_a_server_that_is_never_healthy(behaviour: str, end: str, tmp_path: Path) -> None:
    limit = "rollout.server.launch.start_seconds=1" if behaviour == "HANGS" else "run.seed=0"
    beside = [sys.executable, "-c", "print('beside')"]
    returncode, printed = Serving(tmp_path, limit, behaviour=[behaviour], beside=beside).finish()
    assert returncode == 2 and "\nbeside" not in printed
    assert "vlm-pg: error: The server at http://127.0.0.1:" in printed and end in printed
    tail = printed.partition("Last lines of")[2]
    assert tail if behaviour == "HANGS" else "CUDA error: out of memory" in tail


def test_the_command_is_stopped_when_a_server_dies(tmp_path: Path) -> None:
    beside = [sys.executable, "-c", WAITS.replace("sys.exit(40 + number)", "(print('saved'), sys.exit(0))")]
    serving = Serving(tmp_path, beside=beside)
    serving.wait_for_line("beside")
    serving.let_servers_die()
    returncode, printed = serving.finish()
    assert returncode == 2 and "saved" in printed
    assert "has ended (exit code 3). Correct what its log reports and start again" in printed


def test_servers_alone_end_with_the_first_that_dies(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.wait_for_line("all servers are healthy")
    serving.let_servers_die()
    returncode, printed = serving.finish()
    assert returncode == 2 and "has ended (exit code 3)" in printed and "CUDA error: out of memory" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_command_and_then_the_servers(number: signal.Signals, tmp_path: Path) -> None:
    serving = Serving(tmp_path, beside=[sys.executable, "-c", WAITS])
    serving.wait_for_line("beside")
    serving.process.send_signal(number)
    # Launchers of ranks die of SIGUSR1.
    seen = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert serving.finish()[0] == 40 + seen


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_servers_alone_run_until_a_signal(number: signal.Signals, code: int, tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.wait_for_line("all servers are healthy")
    assert len(serving.alive()) == 4
    serving.process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert serving.process.poll() is None
    serving.process.send_signal(number)
    assert serving.finish()[0] == code


def test_a_signal_before_servers_are_healthy(tmp_path: Path) -> None:
    serving = Serving(tmp_path, behaviour=["HANGS"], beside=["true"])
    serving.wait_for(lambda: len(serving.alive()) == 4)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.finish()[0] == 128 + signal.SIGTERM


def test_a_further_signal_kills_servers_that_do_not_stop(tmp_path: Path) -> None:
    serving = Serving(tmp_path, behaviour=["STUBBORN"])
    serving.wait_for_line("all servers are healthy")
    serving.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert len(serving.alive()) == 4
    serving.process.send_signal(signal.SIGTERM)
    assert serving.finish()[0] == 0


def test_servers_and_command_end_with_a_killed_parent(tmp_path: Path) -> None:
    serving = Serving(tmp_path, beside=[sys.executable, "-c", WAITS])
    serving.wait_for_line("beside")
    serving.process.kill()
    serving.process.communicate(timeout=10)  # to the end of all output: the command has ended too
    deadline = time.monotonic() + 10
    while serving.alive():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_port_that_is_taken_and_commands_that_do_not_exist(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"rollout.server.url=http://127.0.0.1:{taken.getsockname()[1]}/v1"
        one = "rollout.server.launch.num_servers=1"
        returncode, printed = Serving(tmp_path / "a", url, one).finish()
    assert returncode == 2 and "cannot be bound (Address already in use" in printed
    assert "Stop what listens there, or set another port in rollout.server.url" in printed
    returncode, printed = Serving(tmp_path / "b", "rollout.server.launch.executable=no-vllm").finish()
    assert returncode == 2 and "executable is 'no-vllm', which is no command here" in printed
    returncode, printed = Serving(tmp_path / "c", beside=["no-such-command"]).finish()
    assert returncode == 2 and "no-such-command cannot be run" in printed


def test_a_server_that_receives_broadcasts_has_our_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on its PYTHONPATH, before what is there already."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    (command, *_) = commands(vllm_config("rollout.server.transfer=broadcast"))
    folder, _, rest = command.environment["PYTHONPATH"].partition(":")
    module, _, name = flags(command)["--worker-extension-cls"].partition(".")
    assert f"class {name}:" in (Path(folder) / f"{module}.py").read_text() and rest == "elsewhere"
    assert json.loads(flags(command)["--weight-transfer-config"]) == {"backend": "vlm_pg"}
    assert "PYTHONPATH" not in commands(vllm_config())[0].environment
