"""The tiny Qwen2.5-VL without training: its tokenizer, processor, and random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
CONTROL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Whole tokens, but part of the text: decoding must show them.
TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
NUM_TEXT_TOKENS = 480
_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 128 * 28 * 28}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """A byte-level BPE of a few hundred tokens learnt from ``texts``; any text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=NUM_TEXT_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    learnt = json.loads(bpe.to_str())["model"]
    vocabulary = dict(learnt["vocab"])
    for token in CONTROL_TOKENS:
        vocabulary[token] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in learnt["merges"]],  # type: ignore[misc]  # pairs, whatever its hint says
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[token for token in CONTROL_TOKENS if token not in (END_OF_TEXT, END_OF_TURN)],
        padding_side="left",
        model_max_length=32768,
    )
    tokenizer.add_tokens(list(TAG_TOKENS))
    return tokenizer


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLProcessor:
    """Qwen's own processor around the tokenizer: patches of 14x14 pixels, 2x2 merged, two frames a temporal patch."""
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=_PIXELS),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=_PIXELS, cap_pixels_per_frame=False),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights from torch's global generator: 0.25 million parameters, fp32."""
    token_id: Any = tokenizer.convert_tokens_to_ids
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=_text_config(len(tokenizer), token_id(END_OF_TEXT), token_id(END_OF_TURN)),
            vision_config=_vision_config(),
            image_token_id=token_id("<|image_pad|>"),
            video_token_id=token_id("<|video_pad|>"),
            vision_start_token_id=token_id("<|vision_start|>"),
            vision_end_token_id=token_id("<|vision_end|>"),
            tie_word_embeddings=True,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=token_id(END_OF_TEXT),
        eos_token_id=[token_id(END_OF_TURN), token_id(END_OF_TEXT)],
        pad_token_id=token_id(END_OF_TEXT),
        do_sample=False,
    )
    return model


def _text_config(vocab_size: int, end_of_text: int, end_of_turn: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        # Qwen's 0.02 suits thousands of channels; with 64 it starts so small that nothing is learnt for long.
        "initializer_range": 64**-0.5,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    }


def _vision_config() -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        # Clips show one temporal patch a second. With one position a second too, "the patch after the one I named last"
        # is the same distance at every step of an answer, which attention learns far sooner than the usual two.
        "tokens_per_second": 1,
        "window_size": 112,
        "fullatt_block_indexes": [0],
        "out_hidden_size": 64,
        "initializer_range": 32**-0.5,
    }
