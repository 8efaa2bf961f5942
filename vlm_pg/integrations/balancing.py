"""The router's balancing loss of a mixture of experts, as if every prefix had been repeated for each of its responses.

The loss (https://huggingface.co/papers/2101.03961, equations 4 to 6) counts tokens. So a shared token counts as often
as it would have been repeated, and the last token of a response, which nothing else needs to read, is read.

Shape letters: T stream tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from vlm_pg.attention.plan import reading_plan
from vlm_pg.models.packing import PackedBatch
from vlm_pg.types import ResponseGroup


def with_last_tokens_read(groups: Sequence[ResponseGroup]) -> list[ResponseGroup]:
    """One more token behind each response, which is predicted for nothing: so the last real one is in the stream."""
    return [
        ResponseGroup(group.prompt, tuple(torch.cat([response, response[-1:]]) for response in group.responses))
        for group in groups
    ]


def without_last_tokens(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Values of the real tokens of a batch made ``with_last_tokens_read``."""
    lengths = torch.tensor([length for lengths in batch.response_lengths for length in lengths])
    real = torch.ones(int(lengths.sum()), dtype=torch.bool)
    real[lengths.cumsum(0) - 1] = False
    return values[real.to(values.device)]


def repetitions(batch: PackedBatch, counted: Sequence[bool]) -> torch.Tensor:
    """fp32 [T]: how often each stream token would be in the repeated batch.

    Args:
        batch: made ``with_last_tokens_read``.
        counted: per response in order, whether its own tokens count; its prompt's always do.
    """
    tree = batch.tree
    lengths = [length for lengths in batch.response_lengths for length in lengths]
    # The second token of a response is predicted by its first, with which its node begins.
    second = torch.tensor([0, *lengths[:-1]]).cumsum(0) + 1
    read_rows = reading_plan(tree, batch.reads).rows
    predicting = batch.predict_rows.cpu()[second]
    first_rows = predicting.tolist() if read_rows is None else [read_rows[index] for index in predicting.tolist()]
    node_at = {start: node for node, start in enumerate(tree.starts)}
    times = [0.0] * len(tree.lengths)
    for row, counts in zip(first_rows, counted, strict=True):
        node = node_at[row]
        times[node] = float(counts)
        while (node := tree.parents[node]) >= 0:
            times[node] += 1.0
    return torch.repeat_interleave(torch.tensor(times), torch.tensor(tree.lengths))


@contextmanager
def recorded_router_logits(routers: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
    """The list fills with each layer's router logits [T, E], on the graph, while the model runs inside."""
    logits: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        logits.append(output[0])

    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balancing_loss(logits: Sequence[torch.Tensor], times: torch.Tensor, text_config: Any) -> torch.Tensor:
    """transformers' own loss of tokens that count ``times`` [T] each."""
    experts, chosen = text_config.num_experts, text_config.num_experts_per_tok
    of_layers: Any = tuple(logits)
    loss = load_balancing_loss_func(of_layers, experts, chosen, times[None].to(logits[0].device))
    assert isinstance(loss, torch.Tensor)
    return loss
