"""The plan's arithmetic: miniatures counted by hand, public models, what scatters over ranks, what to change first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vlm_pg.media.settings import MediaSettings
from vlm_pg.memory import GIB
from vlm_pg.models.memory_sizes import LanguageShape, LinearAttention, TowerShape
from vlm_pg.models.settings import PARTS, LoraSettings, ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.plan.activations import chunk_rows, recorded_bytes, token_bytes, tower_activations, update_activations
from vlm_pg.plan.command import TABLE, published_shape
from vlm_pg.plan.flops import sequence_parallel_bytes
from vlm_pg.plan.memory import (
    forward_limit,
    generation_bytes,
    gradient_bytes,
    largest_budget,
    largest_prefix,
    model_states,
    plan_memory,
    plan_to_fit,
    recorded_groups,
)
from vlm_pg.plan.report import published_lines, published_setup, size_text
from vlm_pg.plan.search import first_remedy, levers
from vlm_pg.plan.setup import TEXT_TOKENS, Setup, largest_prompt
from vlm_pg.plan.shape import ModelShape, Weights, published_config, shape_of
from vlm_pg.prompts.settings import PromptSettings

# D 8, two query heads and one key-value head of 4 (W 8, K 4), I 16.
TEXT = LanguageShape(hidden=8, layers=4, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
TOWER = TowerShape(2, hidden=6, intermediate=12, patches_per_token=4, pixels=24, out=8, gated=True)
TINY = ModelShape("tiny", TEXT, TOWER, Weights(tower=1000, language=5000, adapter=100, layer=1100, head=80, merger=300))
SEVEN = published_shape("Qwen2.5-VL-7B")
FP32 = Setup(element=4, checkpointing=False, prefix=100, response=9, generations=2, budget=1000)


def test_what_a_layer_keeps_of_a_token_counted_by_hand() -> None:
    """fp32: two norms of 12 D, queries, keys, values and output, log-sum-exp, four tensors of the MLP."""
    each = token_bytes(TINY, FP32)
    assert each.kept == 2 * 12 * 8 + 4 * (2 * 8 + 2 * 4) + 4 * 2 + 4 * 4 * 16
    assert (each.input, each.memo, each.keys_values) == (32, 4 * 8 + 8, 32)
    assert each.unread == 12 * 8 + 4 * 4 * 4
    half = token_bytes(TINY, replace(FP32, element=2))
    assert half.kept == 2 * 8 * 8 + 2 * (2 * 8 + 2 * 4) + 4 * 2 + 2 * 4 * 16
    # Frozen norms keep no normalised input.
    assert token_bytes(TINY, replace(FP32, lora=True)).kept == each.kept - 2 * 4 * 8
    per_head = token_bytes(replace(TINY, query_key_norms=True), FP32)
    assert per_head.kept == each.kept + (8 + 4) * 8


def test_an_update_counted_by_hand() -> None:
    """118 tokens of which 18 are read, in 4 layers; logits of 20 rows."""
    each = token_bytes(TINY, FP32)
    assert FP32.stream == 118
    found = update_activations(TINY, FP32)
    assert found["kept by layers"] == 3 * 118 * each.kept + 18 * each.kept + 100 * each.unread
    # The last MLP's tensors have gone when its layer's attention goes back.
    assert found["a layer's backward"] == 118 * max(each.mlp_backward, each.rest_backward - each.mlp)
    again = update_activations(TINY, replace(FP32, checkpointing=True))
    assert again == {
        "layer inputs": 3 * 118 * 32,
        "attention outputs": 2 * 118 * each.memo,
        "a layer's backward": 118 * max(each.kept + each.mlp_backward, each.kept - each.mlp + each.rest_backward),
    }


def test_the_moment_of_the_output_head() -> None:
    """A vocabulary of 1,000: logits of 20 rows three times, or 8 x 1,000 of the weight's gradient; 4 layers' inputs."""
    wide = replace(TINY, language=replace(TINY.language, vocab=1000))
    found = update_activations(wide, replace(FP32, checkpointing=True))
    each = token_bytes(wide, FP32)
    assert found == {
        "layer inputs": 4 * 118 * 32,
        "attention outputs": (3 * 118 + 18) * each.memo,
        "logits": 20 * 1000 * 12,
        "last hidden states": 18 * 8 * (4 + 3 * 4),
    }
    # Chunks of 5 rows, which add to one gradient of the weight.
    chunks = replace(FP32, checkpointing=True, logits_bytes=5 * 4000)
    assert update_activations(wide, chunks)["logits"] == 5 * 1000 * 12 + 1000 * 8 * 4
    # Scattered over ranks: the first two ones' gradients, and their sum.
    scattered = update_activations(wide, replace(chunks, stage=3, ranks=2))
    assert scattered["logits"] == 3 * 1000 * 8 * 4
    # Of two sequence ranks each has half of the rows, and all of the gradient.
    halves = update_activations(
        wide, replace(FP32, checkpointing=True, ranks=2, sequence_parallel=2, logits_bytes=5 * 4000)
    )
    assert halves["logits"] == 5 * 1000 * 12 + 1000 * 8 * 4


def test_chunks_of_logits_follow_long_streams() -> None:
    """A vocabulary of 1,000, so 4,000 bytes a row in fp32; 18 tokens that are read and two more predict 20 rows."""
    # An MLP of width 300 over 118 rows in fp32: 141,600 bytes, 35 rows; but of 20 no logits stay, so two chunks.
    wide = replace(TINY, language=replace(TINY.language, vocab=1000, intermediate=300))
    follow = replace(FP32, checkpointing=True, logits_bytes=5 * 4000, logits_follow=True)
    assert chunk_rows(wide, follow, 20) == 10
    # Entropies go back too: 17 rows, two chunks again; of 200 rows 12 chunks of 17.
    assert chunk_rows(wide, replace(follow, entropy_bonus=True), 200) == 17
    # Tiles of 20 rows: 24,000 bytes, 6 rows, in 4 even chunks. Two sequence ranks have 59 rows each: 17.
    tiles = replace(follow, measures=MemoryChoice(mlp_tile_rows=20))
    assert chunk_rows(wide, tiles, 20) == 5
    assert chunk_rows(wide, replace(follow, ranks=2, sequence_parallel=2), 200) == 17
    # Behind a prefix of its own a chunk's rows alone: 9 of 300 at 4 bytes are less than five rows of logits.
    assert chunk_rows(wide, replace(follow, budget=110), 20) == 5
    # A number, or nothing computed again.
    assert chunk_rows(wide, replace(follow, logits_follow=False), 20) == 5
    assert chunk_rows(wide, replace(follow, checkpointing=False), 20) == 5


def test_a_tied_heads_gradient_waits_for_that_of_the_embedding() -> None:
    """A vocabulary of 10 of width 8: through the backward of all layers; an adapter has none."""
    tied = replace(TINY, language=replace(TINY.language, tied=True, vocab=10))
    assert update_activations(tied, FP32)["gradient of tied embeddings"] == 10 * 8 * 4
    assert "gradient of tied embeddings" not in update_activations(tied, replace(FP32, lora=True))
    ranks = replace(FP32, ranks=2, sequence_parallel=2)
    assert update_activations(tied, ranks)["gradient of tied embeddings"] == 10 * 8 * 4


def test_a_group_beyond_the_budget_runs_in_chunks() -> None:
    """Prefix of 100 and chunks of 20 response tokens: the prefix's keys and values, and their gradients in fp32."""
    setup = Setup(element=2, checkpointing=True, prefix=100, response=9, generations=8, budget=120)
    assert setup.chunked and (setup.stream, setup.read_rows) == (120, 20)
    found = update_activations(TINY, setup)
    assert found["keys and values of prefixes"] == 4 * 100 * 16
    assert found["their gradients"] == 4 * 100 * 32
    assert not replace(setup, budget=200).chunked


def test_sequence_ranks_divide_activations_and_not_states() -> None:
    setup = replace(FP32, ranks=4, stage=2, bucket=10)
    alone, together = (sum(update_activations(TINY, replace(setup, sequence_parallel=s)).values()) for s in (1, 4))
    assert together == alone / 4
    assert model_states(TINY, setup) == model_states(TINY, replace(setup, sequence_parallel=4))


def test_states_of_each_engine_counted_by_hand() -> None:
    """5,000 trained weights of 6,100 (an adapter's are loaded, too)."""
    torch_states = model_states(TINY, Setup(element=2))
    assert torch_states == {"weights": 12_200, "fp32 weights": 20_000, "optimizer": 40_000}
    assert gradient_bytes(TINY, Setup(element=2)) == {"gradients": 30_000}
    two = Setup(element=2, stage=2, ranks=4, bucket=100)
    assert model_states(TINY, two) == {"weights": 12_200, "fp32 weights": 5_000, "optimizer": 10_000}
    assert gradient_bytes(TINY, two) == {"gradients": 5_000 + 2 * 1100, "buckets": 200}
    three = model_states(TINY, replace(two, stage=3))
    assert (three["weights"], three["weights gathered from other ranks"]) == (3_050, 12_200 * 3 / 4)
    assert "optimizer" not in model_states(TINY, replace(two, offload_optimizer=True))
    assert model_states(TINY, replace(two, lora=True))["optimizer"] == 800 / 4
    assert model_states(TINY, replace(two, reference=True))["reference policy"] == 10_000
    assert model_states(TINY, replace(two, train=PARTS, reference=True))["reference policy"] == 12_000


def test_frozen_parts_have_no_gradient_and_no_optimizer_state() -> None:
    """Of 1,000 weights of the tower 300 are the merger's; the language model has 5,000, a layer of it 1,100."""
    for train, weights, layer in (
        (("tower",), 700, 0),
        (("merger",), 300, 0),
        (("tower", "merger"), 1000, 0),
        (("merger", "language"), 5300, 1100),
        (PARTS, 6000, 1100),
    ):
        two = Setup(element=2, stage=2, ranks=2, train=train)
        states = model_states(TINY, two)
        assert states == {"weights": 12_200, "fp32 weights": 2 * weights, "optimizer": 4 * weights}
        assert gradient_bytes(TINY, two) == {"gradients": 2 * weights + 2 * layer, "buckets": 0}
        assert gradient_bytes(TINY, Setup(element=4, train=train)) == {"gradients": 4 * weights}


def test_weights_in_4_bits() -> None:
    """4,096 of 6,100 weights: half a byte, a byte for 64 and four for 64 x 256; the largest layer is written out."""
    small = replace(TINY, weights=replace(TINY.weights, linear=4096, largest=600))
    states = model_states(small, Setup(element=2, lora=True, quantize=True))
    assert states["weights"] == 2 * (6100 - 4096) + 2048 + 64 + 1
    assert states["a layer's weights written out"] == 1200
    assert model_states(small, Setup(element=2, lora=True))["weights"] == 12_200
    seven = published_shape("Qwen2.5-VL-7B").weights
    assert seven.linear / 1e9 == pytest.approx(6.5, rel=0.01) and seven.largest == 3584 * 18944


def test_linear_attention_keeps_more_than_attention_does() -> None:
    """Of Qwen3.5's four layers three are linear, with fp32 chunks; a recomputed one is of the larger kind."""
    linear = LinearAttention(3, key_heads=1, value_heads=2, key_dim=4, value_dim=4, conv_width=4)
    shape = replace(TINY, language=replace(TEXT, linear=linear))
    full, mixed = token_bytes(TINY, FP32), token_bytes(shape, FP32)
    kept = full.kept - 4 * (2 * 8 + 2 * 4) - 4 * 2 + 2 * (40 * 4 + 36 * 4 + 1128) + 6 * 8
    assert mixed.recomputed == kept and mixed.kept == (full.kept + 3 * kept) / 4
    assert mixed.keys_values == full.keys_values / 4 and mixed.memo == full.memo / 4


def test_a_frozen_language_model_keeps_no_inputs_of_its_linear_layers() -> None:
    """fp32: norms keep their input alone, MLPs the gate, its activation and the other half."""
    each, frozen = token_bytes(TINY, FP32), token_bytes(TINY, replace(FP32, train=("merger",)))
    assert frozen.kept == each.kept - 2 * 2 * 4 * 8 - 4 * 16
    assert frozen.keys_values == each.keys_values and frozen.input == each.input


def test_behind_frozen_blocks_the_graph_is_the_mergers() -> None:
    setup = replace(FP32, patches=40, prompts=3, train=("merger", "language"))
    found = tower_activations(TINY, setup)
    assert found["merger's graph"] == 120 * 6 * 4 * 4
    assert found["visual features"] == 2 * 120 * 8 * 4 / 4 and "tower's graph" not in found
    phases = plan_memory(TINY, setup).phases
    assert "tower's backward" not in phases and "pixels" not in phases["update"]


def test_what_trains_less_saves_memory() -> None:
    setup = Setup(train=PARTS, prefix=16_000, patches=60_000, budget=17_000, response=700, stage=3, ranks=8, prompts=4)
    options = levers(SEVEN, setup)["parts to train"]
    assert [option.overrides for option in options] == ["model.train=[merger,language]", "model.train=[language]"]
    peaks = [plan_memory(SEVEN, replace(setup, **option.changes)).peak for option in options]
    assert sorted([plan_memory(SEVEN, setup).peak, *peaks], reverse=True) == [plan_memory(SEVEN, setup).peak, *peaks]


def test_generation_holds_one_group_at_least() -> None:
    found = generation_bytes(TINY, FP32)
    assert found["keys and values of one group"] == (100 + 2 * 9) * 4 * 2 * 4 * 4
    divided = generation_bytes(TINY, replace(FP32, ranks=2, sequence_parallel=2))
    assert divided["keys and values of one group"] == (100 + 9) * 4 * 2 * 4 * 4
    parts = generation_bytes(TINY, replace(FP32, ranks=2, sequence_parallel=2, divides_prompts=True))
    saved = divided["keys and values of one group"] - parts["keys and values of one group"]
    assert saved / divided["keys and values of one group"] == pytest.approx(50 / 109)
    # A rank without rollouts would have no part in it.
    few = replace(FP32, ranks=4, sequence_parallel=4)
    assert generation_bytes(TINY, replace(few, divides_prompts=True)) == generation_bytes(TINY, few)
    alone = generation_bytes(TINY, replace(FP32, share_prefix=False))
    assert alone["keys and values of one group"] == 2 * (100 + 9) * 4 * 2 * 4 * 4


def test_recorded_forwards_counted_by_hand() -> None:
    """fp32: inputs of 4 layers, an output, attention of 4 layers; of a prompt neither the output nor the last one."""
    assert recorded_bytes(TINY, FP32) == (4 * (5 * 8 + 4 * (8 + 2)), 4 * (4 * 8 + 3 * (8 + 2)))
    assert recorded_bytes(SEVEN, Setup())[0] == pytest.approx(412e3, rel=1e-3)
    # Booked are 100 + 2 x 10 tokens a group, recorded 100 + 2 x 9.
    three = replace(FP32, prompts=3, room_for_forwards=2.9 * 120 * 320)
    assert recorded_groups(TINY, three) == (2, 100 * 248 + 18 * 320)
    # Two sequence ranks sample two groups each, but a single one together.
    ranks = replace(three, ranks=2, sequence_parallel=2)
    assert recorded_groups(TINY, replace(ranks, prompts=4))[0] == recorded_groups(TINY, ranks)[0] == 2
    assert recorded_groups(TINY, replace(ranks, prompts=1))[0] == 0
    assert recorded_groups(TINY, replace(ranks, divides_prompts=True))[0] == 0
    phases = plan_memory(TINY, three).phases
    assert phases["generation"]["recorded forwards"] == 2 * (100 * 248 + 18 * 320)


def test_an_update_of_recorded_forwards_begins_at_its_backward() -> None:
    """Of its one running layer the input is joined; it is computed again, whether layers are checkpointed or not."""
    each = token_bytes(TINY, FP32)
    running = 118 * (each.kept + max(each.mlp_backward, each.rest_backward - each.mlp) + each.input)
    assert running == 118 * (each.kept - each.mlp + each.input + max(each.mlp + each.mlp_backward, each.rest_backward))
    for checkpointing in (False, True):
        recorded = replace(FP32, checkpointing=checkpointing, room_for_forwards=1e6)
        found = plan_memory(TINY, recorded).phases["update"]
        assert {part: found[part] for part in ("a layer's backward", "recorded forwards")} == {
            "a layer's backward": running,
            "recorded forwards": 100 * 248 + 18 * 320,
        }
        assert not found.keys() & {"layer inputs", "attention outputs", "kept by layers"}
    # A second update of the step, and groups without room, compute their forward when records are gone.
    alone = sum(plan_memory(TINY, FP32).phases["update"].values())
    assert sum(plan_memory(TINY, replace(FP32, room_for_forwards=1e6)).phases["update"].values()) < alone
    for more in ({"updates": 2}, {"prompts": 2, "room_for_forwards": 120 * 320.0}):
        later = replace(FP32, room_for_forwards=1e6, budget=118)
        assert sum(plan_memory(TINY, replace(later, **more)).phases["update"].values()) == alone


@pytest.mark.parametrize("more", [{}, {"checkpointing": False}, {"train": PARTS}, {"budget": 8767, "prompts": 1}])
def test_recorded_forwards_make_no_run_too_large(more: dict[str, Any]) -> None:
    setup = Setup(prefix=8000, patches=30_000, budget=20_000, prompts=4, stage=3, ranks=8)
    setup, found = replace(setup, **more), set()
    assert plan_memory(SEVEN, replace(setup, room_for_forwards=0.0)) == plan_memory(SEVEN, setup)
    for gib in (16, 24, 32, 40, 60, 80, 141, 200):
        kept = replace(setup, room_for_forwards=forward_limit(SEVEN, setup, gib))
        assert plan_to_fit(SEVEN, kept, gib).fits(gib) == plan_to_fit(SEVEN, setup, gib).fits(gib)
        found.add(recorded_groups(SEVEN, kept)[0])
        assert forward_limit(SEVEN, replace(setup, keep_forward=1e3), gib) <= 1e3
    assert len(found) > 1


def test_a_trained_tower_keeps_its_graph_of_all_prompts() -> None:
    setup = replace(FP32, patches=40, prompts=3)
    assert "tower's graph" not in tower_activations(TINY, setup)
    one, three = (tower_activations(TINY, replace(setup, train=PARTS, prompts=n))["tower's graph"] for n in (1, 3))
    assert three == 3 * one


def test_bytes_that_sequence_parallelism_sends() -> None:
    """8 rows of 4 ranks: 2 rows of 2 + 2 query heads and 2 x 4 key-value heads of 4, three quarters of them sent."""
    once = 2 * 4 * (2 * 2 + 2 * 4) * 3 // 4 * 2
    assert sequence_parallel_bytes(TEXT, 8, 4, 2, checkpointing=False) == 2 * once
    assert sequence_parallel_bytes(TEXT, 8, 4, 2, checkpointing=True) == 3 * once
    assert sequence_parallel_bytes(TEXT, 8, 1, 2, checkpointing=True) == 0


@pytest.mark.parametrize("name,billions", list(zip(TABLE, (3.75, 8.29, 33.45, 73.4), strict=True)))
def test_weights_of_public_models(name: str, billions: float) -> None:
    """Published sizes, towers included, in billions of parameters (the safetensors index of each checkpoint)."""
    weights = published_shape(name).weights
    assert (weights.tower + weights.language) / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_adapter_is_counted_as_it_is_made() -> None:
    """Rank 8 on the q_proj of 28 layers: A and B of 3,584 each."""
    settings = ModelSettings(path="7b", lora=LoraSettings(rank=8, target_modules=("q_proj",)))
    assert shape_of(published_config("Qwen2.5-VL-7B"), settings).weights.adapter == 28 * 8 * 2 * 3584


def test_the_largest_prefix_and_budget_are_the_last_that_fit() -> None:
    setup = published_setup(SEVEN, 64, 8)
    prefix = largest_prefix(SEVEN, setup, 80)
    assert prefix > 20_000

    def fits(tokens: int) -> bool:
        patches = setup.patches + 4 * (tokens - setup.prefix)
        changed = replace(setup, prefix=tokens, patches=patches, budget=tokens + setup.response)
        return plan_to_fit(SEVEN, changed, 80).fits(80)

    assert fits(prefix) and not fits(prefix + 1)
    budget = largest_budget(SEVEN, setup, 80)
    assert budget > setup.budget
    assert plan_to_fit(SEVEN, replace(setup, budget=budget), 80).fits(80)
    assert largest_budget(SEVEN, replace(setup, stage=0, ranks=1), 80) == 0


def test_a_7b_on_24_gib_fits_with_an_adapter_beside_4_bits() -> None:
    """Everything was to train: neither setting is enough alone, nor the adapter without 4 bits."""
    setup = Setup(train=PARTS, prefix=8000, patches=30_000, budget=8767, response=767, reference=True)
    remedy = first_remedy(SEVEN, setup, 24)
    assert remedy is not None and remedy.overrides == "model.train=[language] model.lora.quantize=nf4"
    assert not remedy.setup.reference and remedy.setup.train == ("language",)


def test_what_a_run_does_by_itself_is_counted_where_it_must() -> None:
    hour = published_setup(SEVEN, 3600, 8)
    as_set, with_all = plan_memory(SEVEN, hour), plan_to_fit(SEVEN, hour, 80)
    assert not as_set.fits(80) and with_all.fits(80)
    # Two layers' at hand, of 28 or, where a layer's backward takes most, of 27.
    of_layers = as_set.phases["update"]["layer inputs"] / with_all.phases["update"]["layer inputs"]
    assert 2 * of_layers == pytest.approx(27) or 2 * of_layers == pytest.approx(28)
    assert with_all.peak > plan_memory(SEVEN, replace(hour, prefix=hour.prefix // 2, measures=hour.allowed)).peak
    # Where everything fits nothing is put away.
    small = published_setup(SEVEN, 64, 8)
    assert plan_to_fit(SEVEN, small, 80) == plan_memory(SEVEN, small)


def test_sequence_ranks_that_heads_cannot_be_divided_over_are_not_named() -> None:
    """28 query heads: four ranks, not eight."""
    for gpu in (10, 20, 40):
        remedy = first_remedy(SEVEN, published_setup(SEVEN, 3600, 64), gpu)
        assert remedy is None or remedy.setup.sequence_parallel <= 4
    # 6 value heads and 2 key heads of linear attention beside them: two.
    linear = replace(SEVEN.language, linear=LinearAttention(3, 2, 6, 4, 4, 4))
    for shape, expected in ((SEVEN, ["SP 2", "SP 4"]), (replace(SEVEN, language=linear), ["SP 2"])):
        assert [option.short for option in levers(shape, Setup(ranks=64))["sequence parallelism"]] == expected


def test_the_table_of_public_models() -> None:
    lines = list(published_lines([SEVEN], 80))
    assert lines[2] == "| model | frames | prompt | 1 GPU | 8 GPUs | 64 GPUs |"
    assert [line.split(" | ")[1] for line in lines[4:]] == ["64", "256", "1,024", "3,600"]
    sizes = (3 * GIB, 0.02 * GIB, 0.004 * GIB, 5000.0)
    assert [size_text(size, 2) for size in sizes] == ["3.00 GiB", "0.02 GiB", "4.10 MiB", "4.88 KiB"]
    # 20 bytes a weight on one GPU are too many for 7B.
    assert "(1" in lines[4].split(" | ")[3]


def test_prompts_are_divided_where_a_plan_would_not_fit() -> None:
    shape, setup = SEVEN, Setup(prefix=1_000_000, response=1, generations=4, ranks=4, sequence_parallel=4, stage=3)
    setup = replace(setup, budget=1_000_001, offload_optimizer=True, offload_parameters=True, may_divide_prompts=True)
    whole, parts = (plan_to_fit(shape, setup, gib).phases["generation"] for gib in (1e6, 20.0))
    name = "keys and values of one group"
    assert parts[name] / whole[name] == pytest.approx(1 / 4, rel=1e-3)
    never = plan_to_fit(shape, replace(setup, may_divide_prompts=False), 20.0)
    assert never.phases["generation"][name] == whole[name]


@pytest.mark.parametrize(
    ("media", "visual"),
    [
        ({"max_frames": 65}, 32 * 128),
        ({"max_frames": 64, "video_tokens": 3000}, 3000),
        ({"max_frames": 64, "video_tokens": 5000}, 32 * 128),
        ({"frames": "uniform", "num_frames": 8, "max_frames": 64}, 4 * 128),
    ],
)
def test_the_largest_prompt_has_the_largest_video_that_is_shown(media: dict[str, Any], visual: int) -> None:
    settings = MediaSettings(max_pixels=128 * 28 * 28, **media)
    config = SimpleNamespace(media=settings, prompt=PromptSettings(max_prompt_tokens=10_000))
    assert largest_prompt(config, SEVEN.tower) == (visual + TEXT_TOKENS, 4 * visual)
