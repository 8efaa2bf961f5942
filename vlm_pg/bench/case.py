"""A random model of a chosen size, the same weights for every contestant, and the interface of a case."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vlm_pg.bench.runner import SIZES
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import Prompt

Spec = dict[str, Any]
# Ids at the end of the vocabulary that no prompt and no response has: end, media and vision tokens.
SPECIAL_IDS = 16
STUB_TOWER = {"depth": 1, "hidden_size": 64, "num_heads": 2}


@dataclass(frozen=True)
class ModelCase(ABC):
    """The input of every contestant. ``policy.model`` is the transformers model they all run."""

    policy: Policy

    @property
    def model(self) -> Any:
        return self.policy.model

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @abstractmethod
    def tiny(self) -> ModelCase:
        """One that only warms up."""

    @abstractmethod
    def run(self, contestant: Any) -> Any:
        """The whole work, once."""

    @abstractmethod
    def time(self, contestant: Any) -> dict[str, float]:
        """The whole work, timed: seconds by part."""

    @abstractmethod
    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        """Compare the outcomes; further entries of each contestant.

        Raises:
            RuntimeError: they do not compute the same thing.
        """

    def outcome(self, result: Any) -> Any:
        """The value that contestants must agree on, from the result of ``run``."""
        return result

    def forget(self) -> None:
        """Drop the gradients that a run left behind."""
        self.policy.zero_grad(set_to_none=True)

    def timed(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds on the clock and, on a CPU, processor seconds of all threads."""
        self._synchronize()
        start_seconds, start_cpu_seconds = time.perf_counter(), time.process_time()
        run()
        self._synchronize()
        found = {"seconds": time.perf_counter() - start_seconds}
        return found | ({"cpu_seconds": time.process_time() - start_cpu_seconds} if self.device.type == "cpu" else {})

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def text_prompt(name: str, ids: torch.Tensor) -> Prompt:
    """Token ids int64 [P] as a prompt without media."""
    return Prompt(name, ids, torch.zeros_like(ids), torch.arange(len(ids)).expand(3, -1))


def set_attention(case: ModelCase, name: str) -> None:
    """The attention implementation that the language model's layers look up."""
    text = case.model.config.get_text_config()
    if text._attn_implementation != name:
        case.model.set_attn_implementation({"text_config": name})


def best_attention(case: ModelCase) -> str:
    """The fastest attention of transformers' own for sequences without padding."""
    return "flash_attention_2" if can_use_flash_attention_2(case) else "sdpa"


def can_use_flash_attention_2(case: ModelCase) -> bool:
    """Whether the package flash-attn is there, and takes this device and dtype."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    half = case.policy.dtype in (torch.bfloat16, torch.float16)
    return case.device.type == "cuda" and half and bool(is_flash_attn_2_available())


def random_policy(spec: Spec) -> Policy:
    """The model that a specification names, with random weights."""
    name, dtype = spec["model"], spec["dtype"]
    settings = ModelSettings(path=name, dtype=dtype, gradient_checkpointing=spec.get("checkpointing", False))
    return make_policy(random_model(name, device=spec["device"], dtype=DTYPES[dtype]), None, settings)


def random_model(
    size: str,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tower: Mapping[str, Any] | None = None,
) -> Any:
    """A Qwen2.5-VL with random weights and the language model's shape of that name; its vision tower is a stub.

    Weights are drawn on ``device``: equal there for equal seeds. ``tower``: values of its config instead of the stub's.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = random_config(size, tower)
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            return Qwen2_5_VLForConditionalGeneration(config)
        finally:
            torch.set_default_dtype(usual)


def random_config(size: str, tower: Mapping[str, Any] | None = None) -> Any:
    """transformers' config of ``random_model``."""
    from transformers import Qwen2_5_VLConfig

    shape = SIZES[size]
    sections = [shape.head_dim // 8, 3 * shape.head_dim // 16, 3 * shape.head_dim // 16]
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            "bos_token_id": None,
            "eos_token_id": shape.vocab - 1,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        vision_config={**(tower or STUB_TOWER), "out_hidden_size": shape.hidden},
        image_token_id=shape.vocab - 6,
        video_token_id=shape.vocab - 5,
        vision_start_token_id=shape.vocab - 4,
        vision_end_token_id=shape.vocab - 3,
        tie_word_embeddings=shape.tied,
    )
