"""A real vLLM with tiny models that it can serve on a CPU. ``scripts/vllm_env.sh`` installs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.vllm_server import COMMAND_VARIABLE
from scripts.bench.vllm_server import VllmServer as VllmServer
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.rollout.server import vllm_plugin

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
# Of a server that receives weights by broadcast, with its PYTHONPATH.
BROADCAST = (
    *("--worker-extension-cls", "vlm_pg_transfer.Extension"),
    *("--weight-transfer-config", '{"backend": "vlm_pg"}'),
)
PLUGIN = Path(vllm_plugin.__file__).parent

# Heads of 32 are the smallest that vLLM's attention on a CPU has.
_HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _HEADS | {"rope_parameters": _ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen3_vl": _HEADS
    | {"head_dim": 32, "rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
}
_VISION = {"hidden_size": 64, "num_heads": 2, "intermediate_size": 128}
# All media of the tests lie within, so that no server scales them.
_PIXELS = {"shortest_edge": 1024, "longest_edge": 16 * 1024 * 1024}


def vllm_command() -> str:
    """Path of the ``vllm`` executable; without ``VLM_PG_VLLM`` the test is skipped."""
    command = os.environ.get(COMMAND_VARIABLE)
    if not command:
        pytest.skip(f"{COMMAND_VARIABLE} is not set: scripts/vllm_env.sh installs a vLLM for CPUs and prints its path")
    assert os.access(command, os.X_OK), f"{COMMAND_VARIABLE}={command} is set but is not an executable file"
    return command


def save_vllm_model(folder: Path, family: str, seed: int = 0, tied: bool = False) -> Path:
    """A random tiny model that vLLM serves on a CPU, as a checkpoint folder.

    ``tie_word_embeddings`` is false unless ``tied``: on a CPU vLLM keeps a packed copy of a tied output head, which
    weight updates do not reach. Image and video processors normalize alike: vLLM uses the image processor's numbers for
    both.
    """
    tiny_model(family, seed=seed, text=_TEXT[family], vision=_VISION, tie_word_embeddings=tied).save_pretrained(folder)
    processor = tiny_processor(family)
    video, image = processor.video_processor, processor.image_processor
    image.image_mean, image.image_std = video.image_mean, video.image_std
    for one in (image, video):
        one.size = dict(_PIXELS)
    processor.save_pretrained(folder)
    return folder


@contextmanager
def running_vllm(
    family: str, home: Path, *flags: str, tied: bool = False, adapters: bool = False
) -> Iterator[VllmServer]:
    """A server of the family's tiny model (``server.model``), ready for requests; for fixtures.

    Args:
        family: one of ``FAMILIES``.
        home: folder for the model and the log.
        flags: further flags of ``vllm serve``.
        tied: see ``save_vllm_model``.
        adapters: allow loading further adapters.
    """
    command = vllm_command()
    whole = (*("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"), *flags)
    environment = {"PYTHONPATH": str(PLUGIN)}
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if adapters else {}
    server = VllmServer([command], save_vllm_model(home / "model", family, tied=tied), home, whole, environment)
    try:
        server.start()
        yield server
    finally:
        server.kill()
