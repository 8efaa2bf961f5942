"""A run whose loss reports one more metric, as somebody's own loss would: python -m ... ARGUMENTS of vlm-pg train."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import vlm_pg.training.passes as passes
from vlm_pg.cli import main
from vlm_pg.metrics import Chart, Metric

original_loss = passes.policy_loss


def own_loss(logprobs: torch.Tensor, *rest: Any, **how: Any) -> tuple[torch.Tensor, dict[Metric, torch.Tensor]]:
    """Each token of rank r counts as r + 1."""
    loss, metrics = original_loss(logprobs, *rest, **how)
    counted = torch.tensor(float(len(logprobs) * (int(os.environ["RANK"]) + 1)))
    return loss, {Metric("made_up", "apples per token", chart=Chart("Apples")): counted, **metrics}


if __name__ == "__main__":
    passes.policy_loss = own_loss
    sys.exit(main(["train", *sys.argv[1:]]))
