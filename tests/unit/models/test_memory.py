"""The choice of ``auto``, from sizes and free memory alone, and its line."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from tests.support.live_bytes import LiveBytes
from tests.support.tiny import tiny_model, tiny_processor
from vlm_pg.bench.case import text_prompt
from vlm_pg.errors import ModelError
from vlm_pg.memory import GIB
from vlm_pg.models.loading import make_policy
from vlm_pg.models.memory_choice import Need, decide, smallest
from vlm_pg.models.memory_sizes import LanguageShape, LanguageSizes, TowerShape, TowerSizes
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice, RowTiles
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt, ResponseGroup

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


FRAME_TOKENS = 16
ROWS = 256


def policy_of(choice: MemoryChoice, family: str = "qwen2", train_vision: bool = False, **text: int) -> Policy:
    # Blocks of a trained tower are not recomputed by themselves: a piece has to be.
    settings = ModelSettings(
        path="tiny", train=PARTS if train_vision else ("language",), gradient_checkpointing=not train_vision
    )
    policy = make_policy(tiny_model(family, text=text), tiny_processor(family), settings)
    policy.use_memory(choice)
    policy.stream_memory.least_bytes = 2**12
    return policy


def video(policy: Policy, frames: int) -> Prompt:
    ids = torch.full((frames * FRAME_TOKENS,), policy.model.config.video_token_id)
    ids = torch.nn.functional.pad(ids, (1, 1), value=20)
    inputs = {"input_ids": ids[None], "mm_token_type_ids": 2 * (ids != 20)[None].long()}
    inputs |= {"pixel_values_videos": torch.randn(frames * 64, 3 * 2 * 14 * 14)}
    inputs |= {"video_grid_thw": torch.tensor([[frames, 8, 8]])}
    return prompt_from_processor(inputs | {"second_per_grid_ts": [1.0]}, policy.positions, "video")


def prepare(policy: Policy) -> None:
    """Gradients of weights are there beforehand: they count as nothing."""
    policy.vision.weights_changed()
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def peak(policy: Policy, group: ResponseGroup, chunk_tokens: int | None) -> int:
    """Most bytes alive in forward and backward of one group."""
    prepare(policy)
    with LiveBytes() as live:
        backward_in_chunks(
            policy, [group], lambda chunk: torch.stack([v.sum() for _, v in chunk[0]]).sum(), chunk_tokens
        )
    return live.peak


def group_of(tokens: int) -> ResponseGroup:
    """Two answers to a long prompt; of text, so that no pixels are the largest tensor."""
    ids = torch.arange(tokens) % 300 + 20
    return ResponseGroup(text_prompt("long", ids), (torch.arange(30, 34), torch.arange(40, 44)))


def test_one_tile_of_an_mlp_is_alive() -> None:
    """An MLP 64 times as wide as a hidden state would be all there is."""
    whole, tiled = (
        policy_of(MemoryChoice(), intermediate_size=4096),
        policy_of(MemoryChoice(mlp_tile_rows=32), intermediate_size=4096),
    )
    group = group_of(256)
    assert peak(tiled, group, None) < peak(whole, group, None) / 3
    # One tile: twice as many of them need no more for their intermediates.
    one_tensor = 256 * 4096 * 4
    assert peak(tiled, group_of(512), None) - peak(tiled, group, None) < one_tensor / 2


def per_layer(choice: MemoryChoice, chunk_tokens: int | None, **text: int) -> float:
    """By how many bytes the peak grows with each further layer."""
    few, many = (policy_of(choice, num_hidden_layers=layers, **text) for layers in (3, 7))
    group = group_of(ROWS)
    return (peak(many, group, chunk_tokens) - peak(few, group, chunk_tokens)) / 4


def test_inputs_of_further_layers_take_nothing() -> None:
    one_input = ROWS * 64 * 4
    assert per_layer(MemoryChoice(), None) > one_input  # and attention's result, which is as large
    assert per_layer(MemoryChoice(offload_layer_inputs=True), None) < one_input / 8


def test_keys_and_values_of_further_layers_take_nothing() -> None:
    keys_values = 2 * ROWS * 4 * 16 * 4
    heads = {"num_key_value_heads": 4}
    inputs_away = MemoryChoice(offload_layer_inputs=True)
    all_away = MemoryChoice(offload_layer_inputs=True, offload_prefix_states=True)
    assert per_layer(inputs_away, 3, **heads) > 0.9 * keys_values
    assert per_layer(all_away, 3, **heads) < keys_values / 8


def test_one_piece_of_a_trained_tower_is_alive() -> None:
    def tower_peak(policy: Policy, frames: int) -> int:
        prompt = video(policy, frames)
        prepare(policy)
        with LiveBytes() as live:
            (features,) = policy.vision.encode([prompt], with_graph=True)
            assert features.features is not None
            features.features.sum().backward()
        return live.peak

    for family in ("qwen2_5_vl", "qwen2_vl"):
        whole = policy_of(MemoryChoice(), family, train_vision=True)
        cut = policy_of(MemoryChoice(vision_piece_tokens=2 * FRAME_TOKENS), family, train_vision=True)
        patches, outputs = 64 * 3 * 2 * 14 * 14 * 4, FRAME_TOKENS * 64 * 4
        growth = [(tower_peak(policy, 24) - tower_peak(policy, 8)) / 16 for policy in (whole, cut)]
        # Each further frame: its pixels (moved to the device in one tensor), and its outputs with their gradient.
        assert growth[1] < 1.2 * (patches + 4 * outputs) < growth[0]


def test_a_copied_module_in_tiles_has_its_own_weights() -> None:
    mlp = policy_of(MemoryChoice(mlp_tile_rows=2)).language_model.layers[0].mlp
    hidden = torch.randn(1, 7, 64)
    expected = mlp.vlm_pg_whole_forward(hidden)
    copied = deepcopy(mlp)
    for parameter in mlp.parameters():
        parameter.data.zero_()
    assert torch.allclose(copied(hidden), expected, atol=1e-6) and not mlp(hidden).any()


def test_modules_that_are_never_cut_are_left_alone() -> None:
    layer = policy_of(MemoryChoice(offload_layer_inputs=True)).language_model.layers[0]
    assert all("forward" not in vars(module) for module in (layer.mlp, layer.input_layernorm))


def test_an_mlp_that_returns_more_than_a_tensor_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"returned tuple; in tiles of rows it must be a tensor\. Set model.mlp_tile_ro"
    ):
        RowTiles(2).run(lambda rows: (rows, rows), torch.randn(5, 3))  # type: ignore[arg-type, return-value]
