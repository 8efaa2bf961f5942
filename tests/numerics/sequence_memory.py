"""Peak bytes of activations and bytes sent on one of several sequence ranks: python -m ... PREFIX CHECKPOINTING.

One group of eight responses behind a prefix, forward and backward; rows that are read, and rows that are not, can be
divided by four. Rank 0 prints a line of JSON: the largest peak of any rank, and what each rank sent to others.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.support.groups import tiny_policy
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import as_rank
from tests.support.tiny import tiny_model
from vlm_pg.distributed import RankLayout, SequenceGroup, gather_objects
from vlm_pg.models.loading import make_policy
from vlm_pg.models.micro_batches import pack_micro_batch, run_micro_batch
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import Prompt, ResponseGroup

RESPONSES = (64,) * 7 + (67,)
READ_ROWS = 1 + sum(length - 1 for length in RESPONSES)
LAYERS = 4
HEADS, KEY_VALUE_HEADS, HEAD_DIM = 8, 4, 32
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}


def small_model() -> Any:
    text = SHAPE | {"num_key_value_heads": KEY_VALUE_HEADS}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return tiny_model(text=text | {"rope_parameters": rope})


def small_settings(checkpointing: bool) -> ModelSettings:
    return ModelSettings(path="small", gradient_checkpointing=checkpointing, logits_chunk_mb=1)


def small_policy(checkpointing: bool) -> Policy:
    return make_policy(small_model(), tiny_policy().processor, small_settings(checkpointing))


def long_group(prefix: int) -> ResponseGroup:
    """``prefix`` rows that are not read, one more at whose end the responses begin."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 300, (prefix + 1,), generator=generator)
    prompt = Prompt("long", ids, torch.zeros_like(ids), torch.arange(prefix + 1).expand(3, -1))
    responses = (torch.randint(20, 300, (length,), generator=generator) for length in RESPONSES)
    return ResponseGroup(prompt, tuple(responses))


def measure(ranks: RankLayout, sequence: SequenceGroup) -> None:
    prefix, checkpointing = int(sys.argv[1]), sys.argv[2] == "True"
    policy = small_policy(checkpointing)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    streams = pack_micro_batch(policy, [long_group(prefix)], sequence=sequence)
    with LiveBytes() as live:
        run_micro_batch(policy, streams, None, lambda _, logprobs, entropies: logprobs.sum(), torch.Tensor.backward)
    found = gather_objects({"peak": live.peak, "sent": sequence.sent.total()})
    if ranks.is_rank0:
        print(json.dumps({"peak": max(f["peak"] for f in found), "sent": [f["sent"] for f in found]}))


if __name__ == "__main__":
    as_rank(measure)
