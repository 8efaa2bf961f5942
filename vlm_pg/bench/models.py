"""Random models of a chosen size, for measurements that need no trained weights."""

from __future__ import annotations

from typing import Any

import torch

from vlm_pg.bench.shapes import SIZES


def random_model(
    size: str, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A Qwen2.5-VL with random weights and the language model's shape of that name; its vision tower is a stub.

    Weights are drawn on ``device``: equal there for equal seeds.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    shape = SIZES[size]
    sections = [shape.head_dim // 8, 3 * shape.head_dim // 16, 3 * shape.head_dim // 16]
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            "bos_token_id": None,
            "eos_token_id": shape.vocab - 1,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
        },
        vision_config={"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": shape.hidden},
        image_token_id=shape.vocab - 6,
        video_token_id=shape.vocab - 5,
        vision_start_token_id=shape.vocab - 4,
        vision_end_token_id=shape.vocab - 3,
        tie_word_embeddings=shape.tied,
    )
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(devices=cuda), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            return Qwen2_5_VLForConditionalGeneration(config)
        finally:
            torch.set_default_dtype(usual)
