"""Ours: the prefix once, the responses behind it, through ``Policy.logprobs``."""

from __future__ import annotations

import torch

from vlm_pg.attention.integration import ATTENTION_NAME
from vlm_pg.bench.contestants.base import Case, set_attention
from vlm_pg.types import Prompt, ResponseGroup


class Grouped:
    name = "grouped"

    def unavailable_because(self, device: torch.device) -> str | None:
        return None

    def step(self, case: Case) -> float:
        set_attention(case, ATTENTION_NAME)
        loss = case.loss(case.policy.logprobs([response_group(case)])[0])
        loss.backward()
        return loss.item()


def response_group(case: Case) -> ResponseGroup:
    """The case as the policy takes it."""
    ids = case.prefix.cpu()
    prompt = Prompt("bench", ids, torch.zeros_like(ids), torch.arange(len(ids)).expand(3, -1))
    return ResponseGroup(prompt, tuple(response.cpu() for response in case.responses))
