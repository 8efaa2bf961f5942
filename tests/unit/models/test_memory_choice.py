"""The choice of ``auto``, from sizes and free memory alone, and its line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.support.tiny import tiny_model
from vlm_pg.memory import GIB
from vlm_pg.models.memory_choice import Need, decide, smallest
from vlm_pg.models.memory_sizes import LanguageShape, LanguageSizes, TowerShape, TowerSizes
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice

# Qwen2.5-VL-7B in bf16.
LANGUAGE = LanguageSizes(LanguageShape(3584, 28, 28, 4, 128, 18944, 152064), element=2)
TOWER = TowerSizes(TowerShape(32, 1280, 3420, patches_per_token=4, pixels=1176, out=3584), element=2)
HOUR = 230_000


def settings(**values: object) -> ModelSettings:
    return ModelSettings.model_validate({"path": "x", "gradient_checkpointing": True} | values)


def need(free_gib: float, rows: int = HOUR, tower: TowerSizes | None = TOWER) -> Need:
    return Need(LANGUAGE, tower, rows, rows, int(free_gib * GIB), "cuda:0")


def test_sizes_of_an_hour() -> None:
    """As one counts by hand: 28 x 3,584 numbers of 2 bytes a token, and 56 KiB a token of keys and values."""
    assert LANGUAGE.layer_inputs(1) == 28 * 3584 * 2
    assert LANGUAGE.keys_values(1) == 56 * 1024
    assert LANGUAGE.gradient_sums(1) == 2 * LANGUAGE.keys_values(1)
    assert LANGUAGE.attention_results(1) == 28 * (3584 * 2 + 28 * 4)
    everything = MemoryChoice(True, True, 4096, 0)
    assert LANGUAGE.offloaded(HOUR, everything) / GIB == pytest.approx(43 + 43.7 + 12.3 + 24.6, rel=0.01)


def test_what_fits_stays_as_it_is() -> None:
    decision = decide(settings(), need(1000))
    assert decision.choice == MemoryChoice() and decision.fits
    assert decision.line.startswith("memory: 1,000.0 GiB free on cuda:0; a stream of 230,000 tokens needs about ")
    assert decision.line.endswith(": nothing is offloaded or split")


def test_measures_come_one_by_one_and_are_named() -> None:
    """Less free memory, more measures; each set holds the one before it."""
    choices = [decide(settings(), need(free, tower=None)).choice for free in range(400, 20, -2)]
    counts = [bool(c.mlp_tile_rows) + c.offload_layer_inputs + c.offload_prefix_states for c in choices]
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3}
    assert all(c.mlp_tile_rows for c, count in zip(choices, counts, strict=True) if count)
    line = decide(settings(), need(70)).line
    assert "layer inputs offloaded (auto), keys and values of prefixes offloaded (auto)" in line
    assert "MLPs in tiles of 4,096 rows (auto)" in line and "GiB offloaded; the stream then needs " in line


def test_an_hour_fits_one_gpu() -> None:
    """What 80 GB leave beside weights and moments of an adapter."""
    decision = decide(settings(), need(62))
    assert decision.fits, decision.line
    assert decision.choice.offload_layer_inputs and decision.choice.mlp_tile_rows
    assert not decide(settings(offload_layer_inputs=False), need(62)).fits


def test_given_settings_stay() -> None:
    chosen = decide(settings(mlp_tile_rows=64, offload_layer_inputs=False, vision_piece_tokens=0), need(30)).choice
    assert (chosen.mlp_tile_rows, chosen.offload_layer_inputs, chosen.vision_piece_tokens) == (64, False, 0)
    assert chosen.offload_prefix_states
    line = decide(settings(mlp_tile_rows=64), need(1000)).line
    assert "MLPs in tiles of 64 rows (as set)" in line


def test_the_smallest_choice_is_all_that_settings_allow() -> None:
    assert smallest(settings()) == MemoryChoice(True, True, 4096, 1024)
    assert smallest(settings(gradient_checkpointing=False)) == MemoryChoice(False, False, 4096, 1024)
    fixed = {"offload_layer_inputs": False, "mlp_tile_rows": 0, "vision_piece_tokens": 0}
    assert smallest(settings(**fixed)) == MemoryChoice(offload_prefix_states=True)
    assert decide(settings(), need(5, tower=None)).choice == replace(smallest(settings()), vision_piece_tokens=0)


def test_what_does_not_fit_says_what_to_change() -> None:
    assert decide(settings(), need(5)).line.endswith("That may not fit: lower training.micro_batch_tokens")
    plain = decide(settings(gradient_checkpointing=False), need(62))
    assert not plain.fits and plain.choice == replace(MemoryChoice(), mlp_tile_rows=plain.choice.mlp_tile_rows)
    assert "That may not fit: set model.gradient_checkpointing=true, or lower training.mic" in plain.line


def test_pieces_get_smaller_with_memory() -> None:
    sizes = [decide(settings(train=PARTS), need(free)).choice.vision_piece_tokens for free in (3000, 62, 30, 20)]
    assert sizes[0] == 0 and sizes[1:] == sorted(sizes[1:], reverse=True) and sizes[-1] >= 1024


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3"])
def test_sizes_of_every_family(family: str) -> None:
    config = tiny_model(family).config
    known = family_of(config)
    shape, tower = LanguageShape.of(known, config), TowerShape.of(known, config)
    assert shape.hidden == 64 and shape.full_layers == (1 if family.startswith("qwen3_5") else shape.layers)
    assert shape.intermediate == {"qwen3_vl_moe": 64, "qwen3_5_moe": 96}.get(family, 128)
    if family == "qwen3":
        assert tower is None
    else:
        assert tower is not None and tower.blocks == 2 and tower.hidden == 32 and tower.intermediate == 64
        assert tower.out == 64 * (3 if family == "qwen3_vl_moe" else 1)


def test_settings_without_effect_are_refused() -> None:
    for name in ("offload_layer_inputs", "offload_prefix_states"):
        with pytest.raises(ValidationError, match=f"model.{name} is true and model.gradient_checkpointing is false"):
            ModelSettings.model_validate({"path": "x", name: True})
