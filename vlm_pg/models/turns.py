"""Generation with weights scattered over ranks, each of which is at another point.

Where weights are scattered (ZeRO-3), running a part of the model is a collective: its weights are gathered first, so
all ranks must run the same parts in the same order. In generation one rank still decodes when another is done, one
prefills while another samples. So before a part runs the ranks agree on the next one that some rank needs; ranks that
need it run it on their data, the others run it on one empty token and ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import min_over_ranks
from vlm_pg.models.contexts import TreeContext

if TYPE_CHECKING:
    from vlm_pg.models.network import Network

T = TypeVar("T")


class Turns:
    """The order of parts that all ranks follow together.

    Args:
        idle: for each part a run of it without effect; the same parts in the same order on every rank.
        device: where the ranks' backend exchanges numbers.

    A rank that is done calls ``finish``: it keeps running parts on nothing until all ranks are done.
    """

    def __init__(self, idle: Mapping[str, Callable[[], object]], device: torch.device):
        self._parts = list(idle)
        self._idle = dict(idle)
        self._device = device

    def run(self, part: str, work: Callable[[], T]) -> T:
        """``work()`` once all ranks have agreed on this part."""
        wanted = self._parts.index(part)
        while (chosen := self._agree(wanted)) != wanted:
            self._idle[self._parts[chosen]]()
        return work()

    def finish(self) -> None:
        """Run parts with the other ranks until all of them are done."""
        done = len(self._parts)
        while (chosen := self._agree(done)) != done:
            self._idle[self._parts[chosen]]()

    def _agree(self, wanted: int) -> int:
        return int(min_over_ranks({"part": wanted}, self._device)["part"])


def noop_modules(network: Network) -> dict[str, Callable[[], object]]:
    """A run without effect of each part: what a rank does while others need the part and it does not."""

    def decoder() -> torch.Tensor:
        token = torch.zeros(1, dtype=torch.int64, device=network.device)
        context = TreeContext(PrefixTree([1], [-1]), network.kernel_here)
        return network.run_layers(token, token.expand(3, 1), context)

    def head() -> torch.Tensor:
        width = network.model.get_input_embeddings().embedding_dim
        return network.model.lm_head(torch.zeros(1, width, device=network.device, dtype=network.dtype))

    parts: dict[str, Callable[[], object]] = {"decoder": decoder, "head": head}
    return {"vision": lambda: idle_vision(network), **parts} if network.family.reads_media else parts


def idle_vision(network: Network) -> torch.Tensor:
    """The tower on one empty visual token."""
    return network.family.encode_vision(network.model, *network.pixels.empty_token(network.device))
