"""A made-up kin of Qwen2.5-VL: another model type, other media tokens, 8-pixel patches merged 3 x 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

from tests.support.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from vlm_pg.models.family import Family, MediaToken

MODEL_TYPE = "made_up_vl"
# Qwen's names, and the kin's.
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


def kin_processor() -> MadeUpProcessor:
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


def kin_model(processor: MadeUpProcessor) -> Any:
    """Random weights; equal for equal calls."""
    vision = {"patch_size": 8, "spatial_merge_size": 3, "window_size": 48}
    qwens = tiny_model("qwen2_5_vl", vocab_size=len(processor.tokenizer), vision=vision)
    fields = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = dict(zip(fields, processor.tokenizer.convert_tokens_to_ids(list(NAMES.values())), strict=True))
    model = MadeUpModel(MadeUpConfig(**{**qwens.config.to_dict(), "model_type": MODEL_TYPE, **ids}))
    model.load_state_dict(qwens.state_dict())
    model.generation_config = qwens.generation_config
    return model.eval()


def save_kin(folder: Path) -> Path:
    processor = kin_processor()
    kin_model(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
