"""Command lines of the servers of ``rollout.server.launch``; of vLLM with the flags that exact sampling needs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple
from urllib.parse import urlsplit

from vlm_pg.errors import ConfigError
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rollout.server import vllm_plugin
from vlm_pg.rollout.settings import LaunchSettings, RolloutSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# What vLLM's --max-lora-rank accepts.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Area of the picture with which pushed weights are probed, of any model's processor.
PROBE_PIXELS = 256 * 256
SERVER_MODULE = "vlm_pg.rollout.server.engine_server"


class ServerCommand(NamedTuple):
    """How one server is started. ``environment`` extends that of this process; ``bind``: host and port."""

    url: str
    bind: tuple[str, int]
    command: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        """As a line for a shell."""
        assignments = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join([*assignments, shlex.join(self.command)])


def server_commands(
    model: ModelSettings,
    media: MediaSettings,
    prompt: PromptSettings,
    rollout: RolloutSettings,
    seed: int,
    gpus: Sequence[Sequence[str]],
) -> list[ServerCommand]:
    """One command for each URL that is launched.

    Args:
        model, media, prompt, rollout: sections of the run's configuration, with ``rollout.server.launch``.
        seed: the run's.
        gpus: of each server; empty without GPUs.

    Raises:
        ConfigError: an adapter that vLLM cannot load.
    """
    launch = rollout.server.launch
    assert launch is not None
    environment = dict(launch.environment)
    if launch.engine == "vlm_pg":
        start, end = [sys.executable, "-m", SERVER_MODULE], ["--model-settings", model.model_dump_json()]
    else:
        start = [launch.executable, "serve", model.path]
        end = [*_flags(model, media, prompt, rollout, seed), *launch.arguments]
        environment |= _vllm_environment(model, rollout, environment.get("PYTHONPATH"))
    commands = []
    for number, url in enumerate(rollout.server.launched_urls):
        port = urlsplit(url).port
        assert port is not None
        own = {VISIBLE: ",".join(gpus[number])} if gpus else {}
        where = ("--host", launch.host, "--port", str(port))
        commands.append(ServerCommand(url, (launch.host, port), (*start, *where, *end), environment | own))
    return commands


def _vllm_environment(model: ModelSettings, rollout: RolloutSettings, python_path: str | None) -> dict[str, str]:
    if rollout.server.weights == "keep":
        return {}
    found = {}
    if model.lora is None or rollout.server.sleep:
        found["VLLM_SERVER_DEV_MODE"] = "1"
    if model.lora is not None:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if rollout.server.transfer == "broadcast":
        paths = (vllm_plugin.__path__[0], python_path or os.environ.get("PYTHONPATH"))
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


def _flags(
    model: ModelSettings, media: MediaSettings, prompt: PromptSettings, rollout: RolloutSettings, seed: int
) -> list[str]:
    server, launch = rollout.server, rollout.server.launch
    assert launch is not None
    # Media arrive at their final size and must not be resized again. The families count a video's pixels per frame or
    # in total; the upper limit contains both.
    frames = max(media.max_frames, media.num_frames or 0)
    sizes = {"images_kwargs": max(media.image_max_pixels, PROBE_PIXELS), "videos_kwargs": media.max_pixels * frames}
    processor = {kind: {"size": {"shortest_edge": 1, "longest_edge": area}} for kind, area in sizes.items()}
    values = {
        "dtype": DTYPES[model.dtype],
        "seed": seed % 2**32,  # numpy takes no larger one
        "max-model-len": prompt.max_prompt_tokens + rollout.max_new_tokens,
        "tensor-parallel-size": launch.tensor_parallel_size,
        # A model's generation_config.json may limit the length of all responses.
        "generation-config": "vllm",
        "media-io-kwargs": json.dumps({"video": {"num_frames": -1}}),
        "mm-processor-kwargs": json.dumps(processor),
    }
    if rollout.temperature != 1.0 and rollout.top_p == 1.0 and not rollout.extras:
        # Log-probabilities of logits / temperature, as the trainer's; filters and penalties would be included too.
        values["logprobs-mode"] = "processed_logprobs"
    if server.model is not None:
        values["served-model-name"] = server.model
    if model.lora is not None:
        values["max-lora-rank"] = _lora_rank(model.lora.rank)
    if rollout.interrupts:
        # With that cache, a request that arrives while it is reset may end the engine.
        values["mm-processor-cache-gb"] = 0
    if server.weights == "push" and server.transfer == "broadcast":
        values["worker-extension-cls"] = "vlm_pg_transfer.Extension"
        values["weight-transfer-config"] = json.dumps({"backend": "vlm_pg"})
    switches = {
        "enable-lora": model.lora is not None,
        "enable-sleep-mode": server.sleep,
        "enable-scale-out": rollout.interrupts,
        "trust-remote-code": model.trust_remote_code,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return flags + [f"--{name}" for name, is_on in switches.items() if is_on]


def _lora_rank(rank: int) -> int:
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank is {rank}, and vLLM loads adapters of rank {LORA_RANKS[-1]} at most. Lower it, or set "
            "rollout.engine=in_process."
        )
    return next(allowed for allowed in LORA_RANKS if allowed >= rank)


def visible_gpus() -> list[str]:
    """Names of this machine's GPUs as CUDA_VISIBLE_DEVICES lists them, without importing torch."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        return list(takewhile(lambda name: name not in ("", "-1"), names))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def divide_gpus(
    gpus: Sequence[str], launch: LaunchSettings, trains: bool, shared: bool = False
) -> tuple[list[list[str]], list[str]]:
    """GPUs of each server, the last ones, and those of training: the others, or all of them where servers sleep during
    updates (``shared``). Without GPUs both are empty.

    Raises:
        ConfigError: there are too few.
    """
    size = launch.tensor_parallel_size
    num_served = launch.num_servers * size
    if not gpus:
        return [], []
    num_left = len(gpus) - num_served
    if num_left < (trains and not shared):
        raise ConfigError(
            f"rollout.server.launch needs {num_served} GPU(s) (num_servers={launch.num_servers} x "
            f"tensor_parallel_size={size}){' and one more for training' if trains and not shared else ''}; there are "
            f"{len(gpus)} ({VISIBLE}: {','.join(gpus)}). Lower one of both, or set rollout.engine=in_process."
        )
    starts = range(num_left, len(gpus), size)
    return [list(gpus[start : start + size]) for start in starts], list(gpus if shared else gpus[:num_left])
