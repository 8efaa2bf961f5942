"""Ours with the prefix run once and the responses in chunks: memory does not grow with their number."""

from __future__ import annotations

import torch

from vlm_pg.attention.integration import ATTENTION_NAME
from vlm_pg.bench.contestants.base import Case, set_attention
from vlm_pg.bench.contestants.grouped import response_group
from vlm_pg.bench.work import CHUNK_TOKENS
from vlm_pg.models.chunked import backward_in_chunks


class GroupedChunked:
    name = "grouped-chunked"

    def unavailable_because(self, device: torch.device) -> str | None:
        return None

    def step(self, case: Case) -> float:
        set_attention(case, ATTENTION_NAME)

        def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
            return torch.stack([case.weights[index] * values.mean() for index, values in chunk[0]]).sum()

        return backward_in_chunks(case.policy, [response_group(case)], loss_of, CHUNK_TOKENS).item()
