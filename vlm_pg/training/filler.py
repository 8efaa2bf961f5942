"""What a rank computes when it has nothing to compute but the others do."""

from __future__ import annotations

import torch

from vlm_pg.models.policy import Policy
from vlm_pg.rollout.engine import stop_token_ids
from vlm_pg.types import Prompt, ResponseGroup


def filler_group(policy: Policy) -> ResponseGroup:
    """The smallest group there is: two tokens of text and a response of two; its loss is multiplied by zero."""
    token = torch.tensor([stop_token_ids(policy)[0]] * 2)
    prompt = Prompt(
        sample_id="filler",
        input_ids=token,
        mm_token_type_ids=torch.zeros(2, dtype=torch.int64),
        positions_3P=torch.arange(2).expand(3, -1),
    )
    return ResponseGroup(prompt, (token,))
