"""Operations of training by what there is of: what work over ranks is balanced by (``vlm_pg/batching/balance.py``)."""

from __future__ import annotations

from vlm_pg.batching.cost import CostModel
from vlm_pg.bench.flops import ATTENTION_BACKWARD, LINEAR_BACKWARD, pair_flops, token_flops
from vlm_pg.plan.shape import ModelShape


def cost_model(shape: ModelShape, checkpointing: bool) -> CostModel:
    """Of forward, backward and recomputation; whole numbers, so that all ranks add up alike.

    A recomputed layer takes its attention from the first run. The output head's chunks are always computed again.
    """
    text, again = shape.language, 1 if checkpointing else 0
    return CostModel(
        token=round(token_flops(text) * (1 + LINEAR_BACKWARD + again)),
        pair=round(pair_flops(text) * (1 + ATTENTION_BACKWARD)),
        logit=round(2 * text.hidden * text.vocab * (2 + LINEAR_BACKWARD)),
    )
