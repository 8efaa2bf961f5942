"""Planned activations are those of a whole pass, counted, for every way to run it that changes the kept tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers

from scripts.bench.counting import count, fake_mode, fake_policy
from tests.support.tiny import tiny_model
from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
from vlm_pg.bench.case import text_prompt
from vlm_pg.models.loading import DTYPES
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.registry import FAMILIES as REGISTERED
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.plan.activations import TOWER_RUNNING, tower_activations, update_activations
from vlm_pg.plan.setup import BYTES, Setup
from vlm_pg.plan.shape import shape_of
from vlm_pg.types import ResponseGroup

pytestmark = pytest.mark.usefixtures("thawed")

PREFIX, RESPONSES, LENGTH = 6144, 8, 257
TEXT: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 1536, "vocab_size": 8192, "head_dim": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
FAMILIES = {
    "qwen2_5_vl": TEXT | {"rope_parameters": ROPE},
    "qwen3_vl": TEXT | {"rope_parameters": ROPE | {"mrope_section": [12, 10, 10], "mrope_interleaved": True}},
}
WITHIN = 0.12


@dataclass(frozen=True)
class Way:
    """How a pass is run: settings of the model, and response tokens of a chunk; None: whole."""

    family: str = "qwen2_5_vl"
    model: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    vocab: int = 8192
    tied: bool = True


WAYS = {
    "whole": Way(),
    "checkpointing": Way(model={"gradient_checkpointing": True}),
    "lora": Way(model={"lora": {"rank": 8}}),
    "lora, checkpointing": Way(model={"lora": {"rank": 8}, "gradient_checkpointing": True}),
    "chunks, checkpointing": Way(model={"gradient_checkpointing": True}, chunk=1024),
    "tiles, checkpointing": Way(model={"gradient_checkpointing": True, "mlp_tile_rows": 1024}),
    "large chunks of logits": Way(model={"gradient_checkpointing": True, "logits_chunk_mb": 64}),
    "tied embeddings of many tokens": Way(model={"gradient_checkpointing": True}, vocab=65_536),
    "a head of its own of many tokens": Way(model={"gradient_checkpointing": True}, vocab=65_536, tied=False),
    "qwen3, checkpointing": Way("qwen3_vl", model={"gradient_checkpointing": True}),
}


def settings_of(way: Way) -> ModelSettings:
    return ModelSettings(path="tiny", dtype="bf16", **({"logits_chunk_mb": 8} | way.model))


@cache
def config_of(family: str, vocab: int = 8192, tied: bool = True) -> Any:
    return tiny_model(family, text=FAMILIES[family] | {"vocab_size": vocab}, tie_word_embeddings=tied).config


def model_of(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return getattr(transformers, REGISTERED[config.model_type].model_class)._from_config(config)
    finally:
        torch.set_default_dtype(usual)


def whole_pass(way: Way) -> int:
    """Most bytes of a real pass on fake tensors, weights' gradients given away as they come."""
    fakes = fake_mode()
    policy = fake_policy(
        partial(model_of, config_of(way.family, way.vocab, way.tied)), settings_of(way), fakes, CudaFlashKernel()
    )
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda given: setattr(given, "grad", None))
    responses = tuple(torch.ones(LENGTH, dtype=torch.int64) for _ in range(RESPONSES))
    group = ResponseGroup(text_prompt("p", torch.ones(PREFIX, dtype=torch.int64)), responses)

    def loss(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        return torch.stack([values.mean() for _, values in chunk[0]]).sum()

    return count(lambda: backward_in_chunks(policy, [group], loss, way.chunk), fakes).peak_bytes


def planned(way: Way) -> float:
    settings = settings_of(way)
    shape = shape_of(config_of(way.family, way.vocab, way.tied), settings)
    whole = PREFIX + RESPONSES * (LENGTH - 1)
    setup = Setup(
        element=BYTES[settings.dtype],
        checkpointing=settings.gradient_checkpointing,
        lora=settings.lora is not None,
        prefix=PREFIX,
        response=LENGTH - 1,
        generations=RESPONSES,
        budget=whole if way.chunk is None else PREFIX + way.chunk,
        logits_bytes=settings.least_logits_bytes,
        measures=MemoryChoice.of(settings),
    )
    return sum(update_activations(shape, setup).values())


# Chunks behind a prefix under checkpointing use most of the formula; the others are in the matrix.
ALWAYS = {"chunks, checkpointing"}


def usual(name: str, always: set[str]) -> Any:
    return pytest.param(name, marks=[] if name in always else pytest.mark.matrix)


@pytest.mark.parametrize("name", [usual(name, ALWAYS) for name in WAYS])
def test_the_plan_is_what_a_pass_takes(name: str) -> None:
    found, expected = planned(WAYS[name]), whole_pass(WAYS[name])
    print(f"{name}: {expected:,} bytes, planned {found:,.0f}")
    assert found == pytest.approx(expected, rel=WITHIN)


VISION = {"hidden_size": 256, "depth": 6, "num_heads": 4, "intermediate_size": 700}
# Two prompts of media of other shapes than the count has; visual tokens two patches wide.
MEDIA = torch.tensor([[20, 20, 28], [1, 40, 60], [20, 20, 28], [1, 40, 60]])
TOWERS: dict[str, dict[str, Any]] = {
    "frozen": {"train": ("language",)},
    "merger": {"train": ("merger", "language")},
    "merger, checkpointing": {"train": ("merger", "language"), "gradient_checkpointing": True},
    "all": {"train": ("tower", "merger", "language")},
    "all, checkpointing": {"train": ("tower", "merger", "language"), "gradient_checkpointing": True},
}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("way", [usual(way, {"frozen", "all, checkpointing"}) for way in TOWERS])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_plan_of_a_tower_is_what_it_takes(family: str, way: str, dtype: Any) -> None:
    """Forward, the features cut from their graph as a step does it, and back where something of it trains."""
    settings = ModelSettings(path="tiny", dtype=dtype, **({"gradient_checkpointing": False} | TOWERS[way]))
    config = tiny_model(family, text=FAMILIES[family], vision=VISION).config
    fakes = fake_mode()
    policy = fake_policy(partial(model_of, config, DTYPES[dtype]), settings, fakes, CudaFlashKernel())
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda given: setattr(given, "grad", None))
    patches, trains = int(MEDIA.prod(-1).sum()), policy.vision.trains
    media = MEDIA if trains else MEDIA[:2]
    shown = patches if trains else patches // 2
    with fakes:
        pixels = torch.empty(shown, 3 * 2 * policy.pixels.patch_size**2)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with torch.set_grad_enabled(trains):
            kept.append(policy.run_tower(pixels, media))

    def back() -> None:
        (features,) = kept
        with fakes:
            gradient = torch.empty(features.shape, dtype=features.dtype)
        features.backward(gradient)

    def whole() -> None:
        forward()
        if trains:
            back()

    expected = count(whole, fakes).peak_bytes
    shape = shape_of(config, settings)
    setup = Setup(
        element=BYTES[dtype],
        checkpointing=settings.gradient_checkpointing,
        train=settings.train,
        patches=patches // 2,
        prompts=2 if trains else 1,
    )
    parts = tower_activations(shape, setup)
    del parts["pixels"]  # they were there
    if trains:
        # Until the tower goes back its features have no gradient; while its blocks run the last merger keeps nothing.
        running = parts.pop(TOWER_RUNNING, 0.0)
        early = max(0.0, parts.get("merger's graph", 0.0) - patches * 4 * BYTES[dtype] * VISION["hidden_size"])
        found = max(sum(parts.values()), running + early + parts["visual features"] / 2)
    else:
        found = parts[TOWER_RUNNING]
    print(f"{family}, {way}: {expected:,} bytes, planned {found:,.0f}")
    assert found == pytest.approx(expected, rel=WITHIN)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mib", [64, 1024], ids=["chunks", "one"])
def test_an_entropy_bonus_is_planned(stage: int, mib: int) -> None:
    """Entropies go back by autograd, whose tensors of a chunk's logits log-probabilities alone do without."""
    settings = settings_of(Way())
    config = config_of("qwen2_5_vl", 65_536, tied=False)
    plain = Setup(checkpointing=True, prefix=512, response=256, budget=4096, stage=stage, logits_bytes=mib * 2**20)
    shape = shape_of(config, settings)
    without, with_bonus = (
        update_activations(shape, replace(plain, entropy_bonus=bonus))["logits"] for bonus in (False, True)
    )
    assert with_bonus > 1.4 * without
