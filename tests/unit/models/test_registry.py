"""Every registered family: its parts can be reached and frozen, and what cannot be shared exactly is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import vlm_pg
from tests.support.groups import KINDS, Case, make_case, plain_model, random_group, tiny_policy
from tests.support.tiny import FAMILY_NAMES, TEXT_FAMILY_NAMES, VL_FAMILY_NAMES, tiny_model, tiny_processor
from vlm_pg.errors import ModelError
from vlm_pg.models.loading import make_policy
from vlm_pg.models.registry import FAMILIES, family_of
from vlm_pg.models.settings import PARTS, ModelSettings, Part
from vlm_pg.types import MediaRef, Sample


def test_what_is_registered() -> None:
    with_tower = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
    text_alone = {"qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"}
    assert set(FAMILIES) == with_tower | text_alone
    assert {name for name, family in FAMILIES.items() if family.reads_media} == with_tower == set(VL_FAMILY_NAMES)
    assert set(FAMILY_NAMES) == set(FAMILIES), "a family without a tiny model is a family without tests"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_folder_loads_as_its_family(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    tiny_processor(name).save_pretrained(tmp_path)
    policy = vlm_pg.load_policy(tmp_path, device="cpu")
    assert policy.family is FAMILIES[name]
    assert type(policy.model) is type(model)
    assert policy.tokenizer.get_vocab() == tiny_processor("qwen2").get_vocab()
    if policy.family.reads_media:
        assert type(policy.processor) is type(tiny_processor(name))
        assert policy.pixel_factor == (28 if name in ("qwen2_vl", "qwen2_5_vl") else 32)
    for key, value in model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[key], value), key


@pytest.mark.parametrize("name", VL_FAMILY_NAMES)
def test_idle_ranks_touch_the_whole_tower(name: str) -> None:
    policy = tiny_policy(train_vision=True, family=name)
    policy.idle_vision_loss().backward()
    tower = policy.family.vision_tower(policy.model)
    assert [n for n, parameter in tower.named_parameters() if parameter.grad is None] == []


def test_another_policys_tower_can_be_shared() -> None:
    policy, other = tiny_policy(), tiny_policy()
    prompt = make_case(policy, "image", seed=0).prompt
    policy.use_tower_of(other)
    assert policy.model.model.visual is other.model.model.visual
    assert policy.vision.encode([prompt])[0] is other.vision.encode([prompt])[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VL_FAMILY_NAMES)
def test_transformers_positions_are_its_own(name: str, kind: str) -> None:
    """What transformers computes for prompt + response in one sequence."""
    policy = tiny_policy(family=name, positions="transformers")
    case = make_case(policy, kind, seed=3, seconds_per_frame=60.0)
    group = random_group(policy, case, [5], seed=0)
    sequence = torch.cat([case.inputs["input_ids"], group.responses[0][None]], dim=1)
    types = torch.nn.functional.pad(case.inputs["mm_token_type_ids"], (0, 5))
    oracle = plain_model(policy)
    names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    grids = {field: case.inputs[field] for field in names if case.inputs.get(field) is not None}
    if kind == "text":
        expected = torch.arange(sequence.shape[1]).expand(3, -1)
    else:
        expected = oracle.model.get_rope_index(sequence, types, **grids)[0][:, 0]
    # The last response token is predicted but never read.
    assert torch.equal(policy.pack([group]).positions_3T, expected[:, :-1])


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_moe"])
def test_the_balancing_loss_is_off_with_a_note(name: str) -> None:
    policy = make_policy(tiny_model(name, output_router_logits=True), tiny_processor(name))
    assert policy.model.config.get_text_config().output_router_logits is False
    assert policy.family.notes == (
        "mixture of experts: the auxiliary balancing loss is off (it depends on how often a prefix is repeated)",
    )


def test_another_family_is_refused_with_those_that_are_not() -> None:
    config = tiny_model().config
    config.model_type = "qwen9_vl"
    registered = (
        "qwen2, qwen2_5_vl, qwen2_vl, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, "
        "qwen3_vl, qwen3_vl_moe"
    )
    with pytest.raises(ModelError, match=f"'qwen9_vl' is not supported; supported are {registered}"):
        family_of(config)


# Qwen3-MoE's config has no list of layer types, and the window in every layer.
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
LAYERS = ["linear_attention", "full_attention", "full_attention", "other_attention"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("qwen2_5_vl", {"attention_dropout": 0.1}, r"attention_dropout=0\.1; sharing a prefix is exact only at 0"),
        ("qwen2_vl", WINDOW | {"max_window_layers": 0}, "sliding-window"),
        ("qwen3_moe", WINDOW, "sliding-window"),
        ("qwen2", {"layer_types": LAYERS[:2]}, "layer_types linear_attention; for qwen2 allowed are full_attention"),
        ("qwen3_5", {"layer_types": LAYERS}, "layer_types other_attention; .* allowed are full_attention, linear_att"),
    ],
)
def test_configurations_that_cannot_be_shared_are_refused(name: str, text: dict[str, Any], message: str) -> None:
    config = tiny_model(name, **{key: value for key, value in text.items() if key != "layer_types"}).config
    if "layer_types" in text:
        config.get_text_config().layer_types = text["layer_types"]
    with pytest.raises(ModelError, match=message):
        family_of(config)


@pytest.mark.parametrize("name", TEXT_FAMILY_NAMES)
def test_a_text_model_has_no_tower_and_no_media_tokens(name: str) -> None:
    policy = tiny_policy(family=name)
    assert policy.family.vision_tower(policy.model) is None
    assert policy.media_token_ids == ()
    assert policy.tokenizer is policy.processor
    assert "reads text alone" in policy.family.describe_positions("qwen")
    prompt = make_case(policy, "text", seed=0).prompt
    assert torch.equal(prompt.positions_3P, torch.arange(prompt.num_tokens).expand(3, -1))
    with pytest.raises(
        ModelError, match=rf"model\.train is \[tower, merger, language\], but tiny \({name}\) has no vision tower"
    ):
        tiny_policy(family=name, train_vision=True)


def test_a_text_model_refuses_media_by_its_name() -> None:
    policy = tiny_policy(family="qwen3")
    picture = make_case(tiny_policy(), "image", seed=0).prompt
    refused = r"the model in memory \(qwen3\) has no vision tower and reads text alone\. Use a Qwen-VL"
    with pytest.raises(ModelError, match=rf"Prompt 'image-0' has images or videos, but {refused}"):
        policy.logprobs([random_group(policy, Case(picture, {}), [3], seed=0)])
    with pytest.raises(ModelError, match=rf"Got 1 image\(s\) or video\(s\) to encode, but {refused}"):
        policy.vision.encode([picture])
    media = (picture.grid_thw, picture.media_kinds, ())
    with pytest.raises(ModelError, match=rf"The prompt has images or videos, but {refused}"):
        policy.positions(picture.input_ids, picture.mm_token_type_ids, *media)
    samples = [
        Sample("1", "?", (), (), "A", "exact", "", ""),
        Sample("2", "?", (MediaRef("image", "a.png"),), (), "A", "exact", "", ""),
    ]
    policy.check_samples(samples[:1], "train.jsonl")
    with pytest.raises(ModelError, match=rf"1 of 2 questions in train\.jsonl have .* first is '2'\), but {refused}"):
        policy.check_samples(samples, "train.jsonl")
    tiny_policy().check_samples(samples, "train.jsonl")


# By hand: prefixes of the merger's weights; the rest below model.visual is the tower's.
MERGERS = dict.fromkeys(VL_FAMILY_NAMES, ("model.visual.merger.",))
MERGERS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ("model.visual.merger.", "model.visual.deepstack_merger_list."))


@pytest.mark.parametrize("name", VL_FAMILY_NAMES)
def test_parts_of_every_family(name: str) -> None:
    family, model = FAMILIES[name], tiny_model(name)
    found: dict[Part, list[str]] = {part: [] for part in PARTS}
    for weight, _ in model.named_parameters():
        found[family.part_of(weight)].append(weight)
    assert all(weight.startswith(MERGERS[name]) for weight in found["merger"])
    assert all(weight.startswith("model.visual.") for weight in found["tower"])
    assert not any("merger" in weight for weight in found["tower"])
    assert any("patch_embed" in weight for weight in found["tower"])
    assert any("blocks.1." in weight for weight in found["tower"])
    assert not any("visual" in weight for weight in found["language"])
    assert family.parts == PARTS and all(found.values())
    assert (
        model.get_input_embeddings().weight
        is dict(model.named_parameters())["model.language_model.embed_tokens.weight"]
    )
    assert family.part_of("model.language_model.embed_tokens.weight") == family.part_of("lm_head.weight") == "language"


@pytest.mark.parametrize("name", TEXT_FAMILY_NAMES)
def test_a_text_model_is_all_language(name: str) -> None:
    family = FAMILIES[name]
    assert family.parts == ("language",)
    assert {family.part_of(weight) for weight, _ in tiny_model(name).named_parameters()} == {"language"}


@pytest.mark.parametrize(
    "given, message",
    [
        ((), "train is []; it must name one part or more, each once. Parts are tower, merger, language"),
        (("merger", "merger"), "train is [merger, merger]; it must name one part or more, each once"),
        (("vision",), "Input should be 'tower', 'merger' or 'language'"),
    ],
)
def test_names_that_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ModelSettings.model_validate({"path": "x", "train": given})
    assert ModelSettings.model_validate({"path": "x", "train": ["language", "tower"]}).train == ("tower", "language")


@pytest.mark.parametrize("family", VL_FAMILY_NAMES)
@pytest.mark.parametrize("train", [("merger", "language"), ("tower", "merger")], ids="+".join)
def test_backward_ends_at_frozen_blocks_with_checkpointing_too(family: str, train: tuple[Part, ...]) -> None:
    """transformers lets what a tower's first layer gives want a gradient: then all blocks would go back for nothing."""
    policy = tiny_policy(family=family, train=train, gradient_checkpointing=True)
    tower = policy.family.vision_tower(policy.model)
    on_the_graph: list[bool] = []
    for block in tower.blocks:
        block.register_forward_pre_hook(lambda _, given: on_the_graph.append(given[0].requires_grad))
    pixels = policy.pixels
    values = pixels.channels * pixels.temporal_patch_size * pixels.patch_size**2
    features = policy.run_tower(torch.randn(96, values), torch.tensor([[2, 8, 6]]))
    assert on_the_graph == ["tower" in train] * len(tower.blocks)
    features.sum().backward()
    reached = {policy.family.part_of(name) for name, p in policy.model.named_parameters() if p.grad is not None}
    assert reached == set(train) - {"language"}
