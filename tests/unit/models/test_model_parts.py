"""Which weights are the tower's, the merger's and the language model's, and what ``model.train`` freezes."""

from __future__ import annotations

import re

import pytest
import torch
from pydantic import ValidationError

from tests.support.groups import tiny_policy
from tests.support.tiny import TEXT_FAMILY_NAMES, VL_FAMILY_NAMES, tiny_model
from vlm_pg.models.registry import FAMILIES
from vlm_pg.models.settings import PARTS, ModelSettings, Part

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


@pytest.mark.parametrize("train", [("tower",), ("merger",), ("merger", "language"), PARTS], ids="+".join)
def test_what_is_not_named_is_frozen(train: tuple[Part, ...]) -> None:
    policy = tiny_policy(train=train)
    for name, weight in policy.model.named_parameters():
        assert weight.requires_grad == (policy.family.part_of(name) in train), name
    assert policy.family.trained_parts(policy.model) == train
    assert policy.vision.trains == (train != ("language",)) == policy.settings.trains_vision


@pytest.mark.parametrize(
    "given, said",
    [
        ((), "train is []; it must name one part or more, each once. Parts are tower, merger, language"),
        (("merger", "merger"), "train is [merger, merger]; it must name one part or more, each once"),
        (("vision",), "Input should be 'tower', 'merger' or 'language'"),
    ],
)
def test_names_that_are_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
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
