"""Tiny Qwen models of every family (real classes, random weights) and their processors, built in memory at once."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VL_FAMILY_NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TEXT_FAMILY_NAMES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
FAMILY_NAMES = VL_FAMILY_NAMES + TEXT_FAMILY_NAMES
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As the templates of Qwen's text models: a turn's content is a string.
TEXT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "Which colour is shown first? Which colour is shown last? Answer with the letter of the right option.",
    "A. red B. green C. blue D. yellow. How many times does the light blink? What happens in the video?",
    "<think>red, green, blue, yellow. The first one is red.</think><answer>A</answer>",
    "First think inside <think> </think>, then give the final answer inside <answer> </answer>.",
    "Describe the picture in a few words. The person turns the pan, and the picture moves to the left.",
)


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred tokens with Qwen's special tokens; any text round-trips. Shared."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        padding_side="left",
    )


def tiny_processor(family: str = "qwen2_5_vl") -> Any:
    """The family's own processor around ``tiny_tokenizer``; for text models a tokenizer.

    Merge 2, two frames a temporal patch; patch 14 (Qwen2-VL, Qwen2.5-VL) or 16 (Qwen3-VL and later).
    """
    import transformers

    if family in TEXT_FAMILY_NAMES:
        tokenizer = deepcopy(tiny_tokenizer())
        tokenizer.chat_template = TEXT_CHAT_TEMPLATE
        return tokenizer
    if family in ("qwen2_vl", "qwen2_5_vl"):
        name, patch_size = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}[family], 14
        video_processor: Any = transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    else:
        name, patch_size = "Qwen3VLProcessor", 16
        video_processor = transformers.Qwen3VLVideoProcessor(cap_pixels_per_frame=False)
    return getattr(transformers, name)(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=patch_size),
        tokenizer=tiny_tokenizer(),
        video_processor=video_processor,
        chat_template=CHAT_TEMPLATE,
    )


def _token_id(token: str) -> int:
    token_id = tiny_tokenizer().convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


# class prefix of each family, and what its language part has beside the common sizes
_CLASSES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
}
_ONE_AXIS_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE = _ONE_AXIS_ROPE | {"mrope_section": [2, 3, 3]}
_INTERLEAVED_ROPE = _ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
_QWEN3 = {"head_dim": 16, "num_hidden_layers": 3, "rope_parameters": _INTERLEAVED_ROPE}
_QWEN3_5 = {
    # With 64 ** -0.5 transformers' own answers differ by 1e-5 between one sequence and a padded batch of it.
    "initializer_range": 0.08,
    "head_dim": 32,  # half of it is rotated
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": _INTERLEAVED_ROPE | {"partial_rotary_factor": 0.5},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN3_TEXT = _QWEN3 | {"rope_parameters": _ONE_AXIS_ROPE}
_TEXT_EXTRAS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3 | _EXPERTS,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5 | _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen2": {"rope_parameters": _ONE_AXIS_ROPE},
    "qwen3": _QWEN3_TEXT,
    "qwen3_moe": _QWEN3_TEXT | _EXPERTS,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5 | _EXPERTS | {"shared_expert_intermediate_size": 32},
}


def _text_config(family: str, **overrides: Any) -> dict[str, Any]:
    hidden_size = overrides.get("hidden_size", 64)
    common = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": hidden_size,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "initializer_range": hidden_size**-0.5,
        "bos_token_id": _token_id("<|endoftext|>"),
        "eos_token_id": _token_id("<|im_end|>"),
        "pad_token_id": _token_id("<|endoftext|>"),
        "rope_parameters": _ROPE,
    }
    return deepcopy(common | _TEXT_EXTRAS[family] | overrides)


def _vision_config(family: str, out_hidden_size: int, **overrides: Any) -> dict[str, Any]:
    width = overrides.get("embed_dim" if family == "qwen2_vl" else "hidden_size", 32)
    common = {
        "depth": 2,
        "num_heads": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": width**-0.5,
    }
    if family == "qwen2_vl":
        return common | {"embed_dim": width, "hidden_size": out_hidden_size, "mlp_ratio": 2} | overrides
    common |= {"hidden_size": width, "intermediate_size": 64, "out_hidden_size": out_hidden_size}
    if family == "qwen2_5_vl":
        windows = {"patch_size": 14, "tokens_per_second": 2, "window_size": 56, "fullatt_block_indexes": [1]}
        return common | windows | overrides
    common |= {"patch_size": 16, "num_position_embeddings": 36}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        common["deepstack_visual_indexes"] = [0, 1]
    return common | overrides


def tiny_model(
    family: str = "qwen2_5_vl",
    *,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    tie_word_embeddings: bool = True,
    **overrides: Any,
) -> Any:
    """A random ``...ForConditionalGeneration`` (text models: ``...ForCausalLM``) in fp32 and eval mode.

    Equal for equal arguments.

    Two to four language layers (hidden 64, 4 query heads, 2 key-value heads) and two vision blocks. Qwen2.5-VL has one
    block with windows of 2x2 merged patches and one with full attention; Qwen3-VL hands features of both blocks to its
    first two decoder layers; Qwen3.5 has three linear-attention layers and one of full attention; mixtures have four
    experts, two of which see a token. ``text`` and ``vision`` replace entries of the two sub-configs, ``overrides``
    entries of the text config as well (``tiny_model(num_hidden_layers=3)``). The global random state is left as it was.
    """
    import torch
    import transformers

    text_config = _text_config(family, **(text or {}), **overrides)
    if family in TEXT_FAMILY_NAMES:
        kind, name = "ForCausalLM", "TextConfig" if family.endswith("_text") else "Config"
        parts: dict[str, Any] = text_config
    else:
        kind, name = "ForConditionalGeneration", "Config"
        parts = {
            "text_config": text_config,
            "vision_config": _vision_config(family, text_config["hidden_size"], **(vision or {})),
            "image_token_id": _token_id("<|image_pad|>"),
            "video_token_id": _token_id("<|video_pad|>"),
            "vision_start_token_id": _token_id("<|vision_start|>"),
            "vision_end_token_id": _token_id("<|vision_end|>"),
        }
    config = getattr(transformers, f"{_CLASSES[family]}{name}")(**parts, tie_word_embeddings=tie_word_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_CLASSES[family]}{kind}")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # not zero, so that a dropped one is noticed
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("A_log"):  # slow decay, so that a state reaches from a prompt into its responses
                torch.nn.init.uniform_(parameter, 0.01, 0.2).data.log_()
    model.generation_config.eos_token_id = text_config["eos_token_id"]
    model.generation_config.pad_token_id = text_config["pad_token_id"]
    return model.eval()
