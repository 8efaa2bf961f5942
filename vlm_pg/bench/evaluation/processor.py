"""A processor for a model with random weights: Qwen2.5-VL's own, around a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

from vlm_pg.bench.case import SPECIAL_IDS

_CONTROL_TOKENS = {
    # id, counted from the end of the vocabulary: those of `random_model`
    "<|im_end|>": 1,
    "<|im_start|>": 2,
    "<|vision_end|>": 3,
    "<|vision_start|>": 4,
    "<|video_pad|>": 5,
    "<|image_pad|>": 6,
    "<|endoftext|>": 7,
    "<|vision_pad|>": 8,
}
_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_processor(vocab_size: int) -> Any:
    """Every byte is a token; all other ids are words that no text is cut into, so that any answer can be read."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2_5_VLProcessor, Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"_{number}_" for number in range(len(letters), vocab_size - SPECIAL_IDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    unused = {f"<|unused_{number}|>": number for number in range(9, SPECIAL_IDS + 1)}
    control = {token: vocab_size - place for token, place in (_CONTROL_TOKENS | unused).items()}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary | control,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in control if token not in ("<|im_end|>", "<|endoftext|>")],
        padding_side="left",
        model_max_length=131072,
    )
    pixels = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=pixels),
        chat_template=_TEMPLATE,
    )
