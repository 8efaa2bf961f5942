"""Operations of training by what there is of: what work over ranks is balanced by (``vlm_pg/batching/balance.py``)."""

from __future__ import annotations

from collections.abc import Collection

from vlm_pg.batching.cost import CostModel
from vlm_pg.bench.flops import ATTENTION_BACKWARD, LINEAR_BACKWARD, pair_flops, token_flops
from vlm_pg.models.settings import Part
from vlm_pg.plan.shape import ModelShape


def cost_model(shape: ModelShape, train: Collection[Part], checkpointing: bool) -> CostModel:
    """Of forward, backward and recomputation where these parts train; whole numbers, so that all ranks add up alike.

    A recomputed layer takes its attention from the first run. The output head's chunks are always computed again. A
    tower's attention, within windows or frames, is little beside its linear layers and left out.
    """
    text, again = shape.language, 1 if checkpointing else 0
    tower = 0.0
    if "tower" in train:
        tower = shape.weights.tower * (1 + LINEAR_BACKWARD + again)
    elif "merger" in train:
        tower = shape.weights.tower + shape.weights.merger * LINEAR_BACKWARD
    return CostModel(
        token=round(token_flops(text) * (1 + LINEAR_BACKWARD + again)),
        pair=round(pair_flops(text) * (1 + ATTENTION_BACKWARD)),
        patch=round(2 * tower),
        logit=round(2 * text.hidden * text.vocab * (2 + LINEAR_BACKWARD)),
    )
