"""A model class built like Qwen2.5-VL is one entry in the registry: it is then scored, sampled from and trained.

The made-up one has another model type, other media tokens, and 8-pixel patches merged 3 x 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

import vlm_pg
from data_pipelines.embedded import main as prepare_embedded
from tests.support.groups import (
    KINDS,
    batched_logprobs,
    gradient_errors,
    make_case,
    positions_4P,
    random_group,
    weighted_sum,
)
from tests.support.runs import ROOT, read_lines
from tests.support.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from vlm_pg.config import load_config
from vlm_pg.errors import ModelError
from vlm_pg.models.family import Family, MediaToken
from vlm_pg.models.policy import Policy
from vlm_pg.models.registry import FAMILIES, register_family
from vlm_pg.models.settings import PARTS, ModelSettings
from vlm_pg.rollout.engine import RolloutEngine, stop_token_ids
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.main import train

MODEL_TYPE = "made_up_vl"
# Qwen's media tokens and those of the made-up model.
NAMES = {
    "<|image_pad|>": "[picture]",
    "<|video_pad|>": "[film]",
    "<|vision_start|>": "[see]",
    "<|vision_end|>": "[seen]",
}


class MadeUpConfig(Qwen2_5_VLConfig):
    model_type = MODEL_TYPE


class MadeUpModel(Qwen2_5_VLForConditionalGeneration):
    config_class = MadeUpConfig


class MadeUpProcessor(Qwen2_5_VLProcessor):
    pass


ENTRY = Family(
    MODEL_TYPE,
    MadeUpModel,
    video_time="seconds",
    media_tokens=(
        MediaToken("[picture]", "image_token_id", "image"),
        MediaToken("[film]", "video_token_id", "video"),
        MediaToken("[see]", "vision_start_token_id"),
        MediaToken("[seen]", "vision_end_token_id"),
    ),
)


def register_with_transformers() -> None:
    AutoConfig.register(MODEL_TYPE, MadeUpConfig, exist_ok=True)
    AutoModelForImageTextToText.register(MadeUpConfig, MadeUpModel, exist_ok=True)
    AutoProcessor.register(MadeUpConfig, MadeUpProcessor, exist_ok=True)


def made_up_processor() -> MadeUpProcessor:
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES.values()])
    template = CHAT_TEMPLATE
    for qwens, own in NAMES.items():
        template = template.replace(qwens, own)
    return MadeUpProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=8, merge_size=3),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens={"image_token": "[picture]", "video_token": "[film]"},
            padding_side="left",
        ),
        video_processor=Qwen2VLVideoProcessor(patch_size=8, merge_size=3, cap_pixels_per_frame=False),
        chat_template=template,
    )


def made_up_model(processor: MadeUpProcessor) -> Any:
    """Random weights; equal for equal calls."""
    vision = {"patch_size": 8, "spatial_merge_size": 3, "window_size": 48}
    qwens = tiny_model("qwen2_5_vl", vocab_size=len(processor.tokenizer), vision=vision)
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(fields, processor.tokenizer.convert_tokens_to_ids(list(NAMES.values())), strict=True))
    model = MadeUpModel(MadeUpConfig(**{**qwens.config.to_dict(), "model_type": MODEL_TYPE, **ids}))
    model.load_state_dict(qwens.state_dict())
    model.generation_config = qwens.generation_config
    return model.eval()


def save_made_up(folder: Path) -> Path:
    processor = made_up_processor()
    made_up_model(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


SPREAD = "def spread(response):\n    return sum(map(ord, response)) % 7 / 7\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_with_transformers()
    return save_made_up(tmp_path_factory.mktemp("made_up"))


@pytest.fixture(autouse=True)
def entry() -> Iterator[None]:
    register_family(ENTRY)
    yield
    del FAMILIES[MODEL_TYPE]


def load(folder: Path) -> Policy:
    settings = ModelSettings(path=str(folder), train=PARTS)
    return vlm_pg.load_policy(folder, device="cpu", settings=settings)


def test_without_the_entry_the_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, MODEL_TYPE)
    with pytest.raises(ModelError, match=r"'made_up_vl' is not supported; .*register the family in"):
        load(folder)


def test_another_entry_for_a_model_type_is_refused() -> None:
    register_family(replace(ENTRY))  # the same facts once more
    message = "'made_up_vl' is registered already, with other facts. Give the new family a model_type of its own"
    with pytest.raises(ModelError, match=re.escape(message)):
        register_family(replace(ENTRY, video_time="grids"))


def test_facts_are_the_kins_own(folder: Path) -> None:
    policy, processor = load(folder), made_up_processor()
    assert policy.family is FAMILIES[MODEL_TYPE] is ENTRY
    assert policy.pixel_factor == 24
    ids = processor.tokenizer.convert_tokens_to_ids(["[picture]", "[film]", "[see]", "[seen]"])
    assert set(policy.media_token_ids) == set(ids) and min(ids) >= 300
    prompt = make_case(policy, "image+video", seed=1).prompt
    patches = int(prompt.grid_thw.prod(-1).sum()) if prompt.grid_thw is not None else 0
    assert prompt.num_visual_tokens * 9 == patches > 0


def test_shared_scoring_equals_repeated_scoring(folder: Path) -> None:
    """Transformers' own forward over prompt + response: values and every gradient, the tower's too."""
    policy = load(folder)
    oracle = made_up_model(made_up_processor())
    cases = [make_case(policy, kind, seed=index) for index, kind in enumerate(KINDS)]
    groups = [random_group(policy, case, [3, 7, 1], seed=index) for index, case in enumerate(cases)]
    ours = policy.logprobs(groups)
    theirs = [batched_logprobs(oracle, case, group.responses) for case, group in zip(cases, groups, strict=True)]
    for a, b in zip(ours, theirs, strict=True):
        assert max(float((one - other).detach().abs().max()) for one, other in zip(a, b, strict=True)) < 1e-5
    weighted_sum(ours).backward()
    weighted_sum(theirs).backward()
    errors = gradient_errors(policy.model, oracle)
    assert any("visual.merger" in name for name in errors) and max(errors.values()) < 1e-4, errors


def test_an_idle_rank_touches_the_whole_tower(folder: Path) -> None:
    policy = load(folder)
    policy.idle_vision_loss().backward()
    assert all(parameter.grad is not None for parameter in policy.model.model.visual.parameters())


def test_a_rollout_equals_generate(folder: Path) -> None:
    policy = load(folder)
    oracle = made_up_model(made_up_processor())
    engine = RolloutEngine(policy, RolloutSettings(num_generations=2, temperature=0.0, max_new_tokens=12), seed=0)
    cases = [make_case(policy, kind, seed=index) for index, kind in enumerate(KINDS)]
    for case, rollouts in zip(cases, engine.generate([case.prompt for case in cases], step=0), strict=True):
        inputs = {name: value for name, value in case.inputs.items() if name != "video_metadata"}
        expected = oracle.generate(
            **inputs,
            position_ids=positions_4P(case.prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(stop_token_ids(policy)),
            suppress_tokens=list(policy.media_token_ids),
        )[0, inputs["input_ids"].shape[1] :].tolist()
        assert [rollout.token_ids.tolist() for rollout in rollouts] == [expected] * 2


def test_it_trains(folder: Path, tmp_path: Path) -> None:
    assert prepare_embedded(["--out", str(tmp_path), "--train", "8", "--eval", "8"]) == 0
    (tmp_path / "spread.py").write_text(SPREAD)
    changes = [
        f"model.path={folder}",
        f"data.train={tmp_path}/train.jsonl",
        "data.eval={}",
        f"run.dir={tmp_path}/run",
        f"reward.functions=[{{function: '{tmp_path}/spread.py:spread'}}]",
        "media.workers=0",
        # 72 pixels are 3 visual tokens of this family; of Qwen's they would be 2.5.
        "media.min_pixels=5184",
        "media.max_pixels=5184",
        "rollout.num_generations=4",
        "rollout.max_new_tokens=6",
        "training.steps=2",
        "training.prompts_per_step=2",
        "eval.headline_set=null",
        "eval.controls=[]",
        "eval.control_sets=[]",
        "eval.before=false",
        "eval.after=false",
        "observe.trackers=[]",
        "observe.report=false",
    ]
    assert train(load_config(ROOT / "configs" / "embedded.yaml", changes)) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] > 0 and line["sharing_ratio"] > 1 for line in lines)
    saved = load(tmp_path / "run" / "checkpoints" / "step-000002")
    before = load(folder)
    changed = [
        name
        for (name, one), other in zip(saved.model.named_parameters(), before.model.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert any("visual.merger" in name for name in changed) and any("language_model" in name for name in changed)
