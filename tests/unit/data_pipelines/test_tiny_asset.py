"""The shipped tiny model is a real Qwen2.5-VL that answers in the right form and reads the video poorly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipelines.flashes import COLOURS, SEEN_ORDERS, UNSEEN_ORDERS
from scripts.build_tiny_model import save_start, tokenizer_texts
from scripts.tiny_model.cold_start import CONFIG, Recipe, learn_lookup, learn_video, write_sets
from scripts.tiny_model.parts import CONTROL_TOKENS, TAG_TOKENS, build_processor, build_tokenizer
from vlm_pg.cli import main
from vlm_pg.config import dump_config, load_config
from vlm_pg.data.records import read_records
from vlm_pg.rewards import RewardSettings, score
from vlm_pg.types import Sample

REPOSITORY = Path(__file__).parents[3]
ASSET = REPOSITORY / "assets" / "tiny-qwen2_5-vl"


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(ASSET)


def test_the_folder_is_small_and_safe() -> None:
    files = [path for path in ASSET.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja", ".md"}
    assert all(weight.dtype == torch.float32 for weight in load_file(ASSET / "model.safetensors").values())


def test_it_is_of_qwens_own_classes_with_the_sizes_of_its_family(model: Any, processor: Any) -> None:
    assert type(processor).__name__ == "Qwen2_5_VLProcessor" and model.config.model_type == "qwen2_5_vl"
    assert 200_000 < sum(weight.numel() for weight in model.parameters()) < 5_000_000
    vision = model.config.vision_config
    assert (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) == (14, 2, 2)
    assert model.config.text_config.vocab_size == len(processor.tokenizer)


def test_control_tokens_are_one_special_token_each_and_tags_are_one_visible_token(processor: Any) -> None:
    tokenizer = processor.tokenizer
    for token in (*CONTROL_TOKENS, *TAG_TOKENS):
        assert len(tokenizer(token).input_ids) == 1, token
    text = "".join(TAG_TOKENS)
    assert tokenizer.decode(tokenizer(text + "<|im_end|>").input_ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_ids_in_the_configs_are_those_of_the_tokenizer(model: Any, processor: Any) -> None:
    token_id = processor.tokenizer.convert_tokens_to_ids
    assert model.config.image_token_id == token_id("<|image_pad|>")
    assert model.config.video_token_id == token_id("<|video_pad|>")
    assert model.config.vision_start_token_id == token_id("<|vision_start|>")
    assert model.generation_config.eos_token_id[0] == token_id("<|im_end|>")
    assert model.generation_config.pad_token_id == token_id("<|endoftext|>")


@pytest.mark.parametrize("text", ["Which colour is shown first?", " naïve 日本語 🙂\n\n\t1,234.5", "<b>x</b>"])
def test_any_text_round_trips(processor: Any, text: str) -> None:
    assert processor.tokenizer.decode(processor.tokenizer(text).input_ids) == text


def test_colours_are_whole_tokens(processor: Any) -> None:
    for colour in COLOURS:
        assert len(processor.tokenizer(f" {colour}").input_ids) == 1


def test_the_chat_template_places_images_videos_text_and_system(processor: Any) -> None:
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Why?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    assert processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few clips of its own kind, none of which it was trained on, and records of both stages."""
    folder = tmp_path_factory.mktemp("clips")
    write_sets(Recipe(seed=977, clips=8, held_out_clips=96, wrong_videos=8, lookup_records=64), folder)
    return folder


def test_it_answers_in_the_right_form_and_weakly(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"data.eval.{name}={sets / f'{name}.jsonl'}" for name in ("held_out", "unseen")]
    own = [f"run.dir={tmp_path / 'run'}", "eval.headline_set=held_out", "media.workers=0"]
    config = load_config(CONFIG, ["data.eval={}", *names, *own])
    (tmp_path / "eval.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path)  # where results of models without a run go
    assert main(["eval", str(ASSET), "--config", str(tmp_path / "eval.yaml")]) == 0
    (result,) = tmp_path.rglob("result.json")
    found = json.loads(result.read_text())["sets"]
    assert all(one["format_rate"] > 0.95 for one in found.values())
    assert 0.3 < found["held_out"]["accuracy"] < 0.65  # 96 clips: about 0.05 around the value on many
    assert found["unseen"]["accuracy"] < 0.6


def test_its_readme_states_a_weak_start() -> None:
    seen, unseen = map(float, re.findall(r"\d\.\d{3}", (ASSET / "README.md").read_text()))
    assert Recipe.target_accuracy <= seen <= Recipe.highest_accuracy and unseen < 0.55


def test_the_builder_makes_the_same_tokenizer_again(processor: Any) -> None:
    again = build_processor(build_tokenizer(tokenizer_texts(load_config(CONFIG).prompt, 0)))
    assert again.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
    assert again.chat_template == processor.chat_template


def test_responses_earn_the_full_reward_and_held_out_orders_are_never_taught(sets: Path) -> None:
    for name, orders in (("train", SEEN_ORDERS), ("held_out", SEEN_ORDERS), ("unseen", UNSEEN_ORDERS)):
        samples, _ = read_records(sets / f"{name}.jsonl")
        assert {listed_in(sample) for sample in samples} <= set(orders)
        for sample in samples[:20]:
            assert score(sample, sample.response, RewardSettings()).parts == {"accuracy": 1.0, "format": 1.0}
    lookups, _ = read_records(sets / "lookup.jsonl")
    assert len(lookups) == 64 and not {listed_in(sample) for sample in lookups} & set(UNSEEN_ORDERS)
    assert any(len(set(listed_in(sample))) < 4 for sample in lookups), "with repeats"
    for sample in lookups:
        assert score(sample, sample.response, RewardSettings()).parts == {"accuracy": 1.0, "format": 1.0}


def listed_in(sample: Sample) -> tuple[str, ...]:
    return tuple(sample.process.removeprefix("<think> ").partition(",")[0].split())


@pytest.mark.matrix
def test_cold_start_is_reproducible_trains_the_tower_in_its_second_stage_only_and_says_when_it_failed(
    sets: Path, tmp_path: Path
) -> None:
    recipe = Recipe(seed=977, batch=8, lookup_steps=2, video_steps=4, check_every=2)
    start, weights = tmp_path / "start", []
    torch.manual_seed(0)
    save_start(start, recipe)
    for number in range(2):
        folder = tmp_path / str(number)
        shutil.copytree(sets, folder)
        with pytest.raises(RuntimeError, match=r"after 2 steps the look-up's loss is \d\.\d{3} nat per token"):
            learn_lookup(recipe, start, folder)
        checkpoint = folder / "lookup/checkpoints/step-000002"
        before, after = (load_file(path / "model.safetensors") for path in (start, checkpoint))
        changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
        assert changed and not any("visual" in name for name in changed)
        with pytest.raises(RuntimeError, match=r"greedy accuracy was never between 0\.43 and 0\.5: .*Change the seed"):
            learn_video(recipe, checkpoint, folder)
        weights.append(load_file(folder / "video/checkpoints/step-000004/model.safetensors"))
        name = next(name for name in after if name.endswith("visual.patch_embed.proj.weight"))
        assert not torch.equal(weights[-1][name], after[name])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
