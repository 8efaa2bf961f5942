"""Keys and values of a long prompt on sequence ranks, whole and in parts: python -m ... PROMPT_TOKENS.

Rank 0 prints a line of JSON: the most on any rank of the bytes that the store held, of those that were booked, and of
all live tensors at the peak of a ``generate`` call; and a sum over the tokens that were sampled.
"""

from __future__ import annotations

import json
import sys

import torch

import vlm_pg.rollout.engine as generation
from tests.numerics.sequence_memory import SHAPE
from tests.support.groups import tiny_policy
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import as_rank
from tests.support.tiny import tiny_model
from vlm_pg.distributed import RankLayout, SequenceGroup, gather_objects
from vlm_pg.models.loading import make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import Prompt

LAYERS, PREFILL_TOKENS = 12, 128


class SeenStore(PrefixStore):
    """Notes the bytes that it holds once its last layer is written."""

    stored = 0

    def write(self, layer_index: int, *rest: object) -> None:
        super().write(layer_index, *rest)  # type: ignore[arg-type]
        tensors = [*self.keys.values(), *self.values.values()]
        SeenStore.stored = max(SeenStore.stored, sum(tensor.untyped_storage().nbytes() for tensor in tensors))


def measured(prompt: Prompt, divide_prefix: str, sequence: SequenceGroup) -> dict[str, float]:
    heads = {"num_key_value_heads": 8, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    model = tiny_model(text=SHAPE | heads | {"rope_parameters": rope})
    policy = make_policy(model, tiny_policy().processor, ModelSettings(path="small"))
    settings = RolloutSettings(
        num_generations=4, max_new_tokens=4, prefill_tokens=PREFILL_TOKENS, divide_prefix=divide_prefix
    )
    engine = generation.RolloutEngine(policy, settings, seed=1)
    SeenStore.stored = 0
    with LiveBytes() as live:
        (rollouts,) = engine.generate([prompt], 0, sequence)
    tokens = sum(int(rollout.token_ids.sum()) for rollout in rollouts)
    own = {"stored": SeenStore.stored, "booked": engine.stats.peak_bytes, "peak": live.peak}
    of_ranks = gather_objects(own)
    return {name: max(one[name] for one in of_ranks) for name in own} | {"tokens": sum(gather_objects(tokens))}


def compare(ranks: RankLayout, sequence: SequenceGroup) -> None:
    generation.PrefixStore = SeenStore  # type: ignore[misc]
    length = int(sys.argv[1])
    ids = torch.randint(20, 300, (length,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt("long", ids, torch.zeros_like(ids), torch.arange(length).expand(3, -1))
    found = {how: measured(prompt, how, sequence) for how in ("never", "always")}
    if ranks.is_rank0:
        print(json.dumps(found | {"prefill_tokens": PREFILL_TOKENS}))


if __name__ == "__main__":
    as_rank(compare)
