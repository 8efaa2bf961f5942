"""Visual features of a step: cut from the tower's graph where the tower trains, and carried between data ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlm_pg.distributed import SINGLE_SP_RANK, RankLayout, SequenceGroup, exchange_rows, gather_objects, max_over_ranks
from vlm_pg.models.policy import Policy
from vlm_pg.types import Prompt, VisualFeatures


@dataclass(frozen=True)
class _Cut:
    """The tower's ``output`` for the media ``media_key``, and the leaf that passes use in its place.

    ``media_key`` "": a zero from the tower, which no pass reads.
    """

    output: torch.Tensor
    leaf: torch.Tensor
    media_key: str


class StepFeatures:
    """One run of the vision tower over prompts, whose copies in ``prompts`` carry its output.

    A frozen tower's output is what it is. A trained tower's is cut from its graph: gradients of all passes but the last
    add up in the leaves; the last pass works on ``connected`` features instead, whose backward adds what the leaves
    hold and goes on through the tower. Exact: d loss / d weights = (d loss / d features)(d features / d weights), and
    the update's last backward, which engines may treat apart from the others, reaches language model and tower alike.

    A trained tower is entered by all ranks or by none: a rank without frames to run it on takes a blank patch, for
    ranks that gather weights and reduce gradients together must do so in step.

    Args:
        sequence: processes that make the features of the same prompts together; each runs the tower on some frames.
        everyone: all processes, if a tower that trains has an equal part of all frames to do on each.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        sequence: SequenceGroup = SINGLE_SP_RANK,
        everyone: SequenceGroup = SINGLE_SP_RANK,
    ):
        self._policy = policy
        trains = policy.vision.trains
        here = trains and any(prompt.pixel_values is not None for prompt in prompts)
        # Agreed on before the tower is entered: under ZeRO-3 its forward is a series of collectives itself.
        runs = trains and max_over_ranks({"ran": float(here)}, policy.device)["ran"] > 0
        # A way into the tower where no feature leads there.
        self._zero: torch.Tensor | None = None
        if runs and everyone.size > 1:
            outputs, self._zero = policy.vision.encode_together(prompts, sequence, everyone)
        else:
            self._zero = policy.idle_vision_loss() if runs and not here else None
            outputs = policy.vision.encode(prompts, trains, keep_graph=True, sequence=sequence)
        # Groups with the same media share one output, so they share one leaf.
        self._cuts: dict[int, _Cut] = {}
        self._remote: _Remote | None = None
        self._connected: dict[int, torch.Tensor] = {}
        if trains:
            outputs = [self._cut(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        self.prompts = [replace(prompt, features=of) for prompt, of in zip(prompts, outputs, strict=True)]

    def _cut(self, prompt: Prompt, output: VisualFeatures) -> VisualFeatures:
        if output.features is None:
            return output
        cut = self._cuts.get(id(output.features))
        if cut is None:
            cut = _Cut(output.features, output.features.detach().requires_grad_(), prompt.content_key)
            self._cuts[id(output.features)] = cut
        return replace(output, features=cut.leaf, carries_graph=False)

    def connect(self) -> torch.Tensor | None:
        """Called before the update's last pass, which takes ``connected`` features; a zero to add to its last loss.

        Backward through that loss enters the tower once, with the gradients left in the leaves, here and on other
        ranks, and those of the pass itself, also where the pass reads none of the features. None where the tower is
        frozen.
        """
        if not self._policy.vision.trains:
            return None
        cuts = list(self._cuts.values())
        zero = self._zero if cuts or self._zero is not None else self._policy.idle_vision_loss()
        if zero is not None:
            cuts.append(_Cut(zero, torch.zeros_like(zero), ""))
        leaves = [cut.leaf for cut in cuts] + list(self._remote.leaves.values() if self._remote else ())
        zero, *tensors = _JoinLeaves.apply(cuts, self._remote, *(cut.output for cut in cuts))
        self._connected = {id(leaf): tensor for leaf, tensor in zip(leaves, tensors, strict=True)}
        return zero

    def connected(self, features: VisualFeatures | None) -> VisualFeatures | None:
        """The features of one of the prompts, after ``connect`` with the tower's graph behind them."""
        if features is None or id(features.features) not in self._connected:
            return features
        return replace(features, features=self._connected[id(features.features)], carries_graph=True)

    def exchanged(self, prompts: Sequence[Prompt], exchange: FeatureExchange) -> list[Prompt]:
        """Prompts whose media were encoded here or arrive by ``exchange``, with their features. A collective.

        Gradients of what arrived return to where it was encoded, in the last pass's backward.
        """
        vision = self._policy.vision
        made = {p.content_key: p.features for p in self.prompts if p.features and p.features.features is not None}
        tensors = {key: item.features for key, item in made.items() if item.features is not None}
        arrived, empty = exchange.send(tensors, self._policy.device)
        leaves = {key: tensor.requires_grad_(vision.trains) for key, tensor in arrived.items()}
        made |= {key: VisualFeatures(leaf, vision.version, carries_graph=False) for key, leaf in leaves.items()}
        self._remote = _Remote(exchange, leaves, empty)
        nothing = VisualFeatures(None, vision.version, carries_graph=False)
        return [
            replace(prompt, features=nothing if prompt.pixel_values is None else made[prompt.content_key])
            for prompt in prompts
        ]


@dataclass(frozen=True)
class _Remote:
    """``leaves``: of what other data ranks encoded, by media key; ``empty`` as in ``FeatureExchange.send``."""

    exchange: FeatureExchange
    leaves: Mapping[str, torch.Tensor]
    empty: torch.Tensor


class _JoinLeaves(torch.autograd.Function):
    """A zero, the outputs themselves and what came from elsewhere; backward adds what the leaves of each hold.

    Made after everything that runs before the last pass and before all of that pass, so autograd comes to it between
    the language model and the tower: on all ranks at the same point among their collectives. Where gradients return to
    other ranks, these wait there for each other's passes.
    """

    @staticmethod
    def forward(
        ctx: Any, cuts: Sequence[_Cut], remote: _Remote | None, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.cuts, ctx.remote = cuts, remote
        ctx.set_materialize_grads(False)
        zero = torch.zeros((), device=outputs[0].device)
        arrived = [] if remote is None else [leaf.detach() for leaf in remote.leaves.values()]
        return zero, *(output.view_as(output) for output in outputs), *arrived

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cuts, remote = ctx.cuts, ctx.remote
        own, of_arrived = grad_outputs[1 : 1 + len(cuts)], grad_outputs[1 + len(cuts) :]
        returned: Mapping[str, torch.Tensor] = {}
        if remote is not None:
            arrived = zip(remote.leaves.items(), of_arrived, strict=True)
            owed = {key: _owed(leaf, gradient) for (key, leaf), gradient in arrived}
            returned = remote.exchange.return_gradients(owed, remote.empty)
        results = [
            _owed(cut.leaf, gradient, returned.get(cut.media_key)) for cut, gradient in zip(cuts, own, strict=True)
        ]
        return None, None, *results


def _owed(leaf: torch.Tensor, *gradients: torch.Tensor | None) -> torch.Tensor:
    """The sum of the leaf's gradient, which is cleared, and of others; in fp32 where there are several.

    Zeros where there is none: the tower's backward must run on every rank that entered it, whatever reads its outputs.
    """
    left, leaf.grad = leaf.grad, None
    first, *others = [part for part in (left, *gradients) if part is not None] or [torch.zeros_like(leaf)]
    for other in others:
        first = first.to(torch.promote_types(leaf.dtype, torch.float32)) + other
    return first.to(leaf.dtype)


@dataclass(frozen=True)
class FeatureTransfer:
    """``rows`` features of the media ``media_key``, sent from one data rank to another."""

    media_key: str
    rows: int
    origin: int
    destination: int


class FeatureExchange:
    """Features between data ranks; the same transfers on every rank.

    All sequence ranks of a data rank hold all its features, and all of another one need what it gets. So each sends to
    the same sequence rank there and gets its gradient: the sum of these is the gradient of the passes there.
    """

    def __init__(self, ranks: RankLayout, transfers: Iterable[FeatureTransfer]):
        ordered = sorted(set(transfers), key=lambda p: (p.origin, p.destination, p.media_key))
        self.is_empty = not ordered
        # Of each process, in the order in which rows are sent.
        self._sends: list[list[FeatureTransfer]] = [[] for _ in range(ranks.world_size)]
        self._receives: list[list[FeatureTransfer]] = [[] for _ in range(ranks.world_size)]
        for transfer in ordered:
            for mine, other, of_processes in (
                (transfer.origin, transfer.destination, self._sends),
                (transfer.destination, transfer.origin, self._receives),
            ):
                if mine == ranks.data_rank:
                    of_processes[other * ranks.sequence_size + ranks.sequence_rank].append(transfer)

    @torch.no_grad()
    def send(
        self, features: Mapping[str, torch.Tensor], device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What other data ranks encoded, [rows, ...] by media key, and a tensor of no rows of that kind. A collective.

        Args:
            features: what was encoded here, [rows, ...] by media key.
        """
        if self.is_empty:
            return {}, torch.empty(0)
        sent = [features[transfer.media_key] for of_process in self._sends for transfer in of_process]
        # A rank that sends nothing does not know dtype and shape of the others' rows.
        kinds = gather_objects((tuple(sent[0].shape[1:]), sent[0].dtype) if sent else None)
        shape, dtype = next(kind for kind in kinds if kind is not None)
        empty = torch.empty((0, *shape), dtype=dtype, device=device)
        found = _exchanged(empty, sent, self._sends, self._receives)
        return {transfer.media_key: rows.clone() for transfer, rows in found}, empty

    @torch.no_grad()
    def return_gradients(self, gradients: Mapping[str, torch.Tensor], empty: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients that other data ranks add to features encoded here, in fp32. A collective.

        Args:
            gradients: of everything that arrived.
            empty: as ``send`` returned it.
        """
        sums: dict[str, torch.Tensor] = {}
        if self.is_empty:
            return sums
        sent = [gradients[transfer.media_key] for of_process in self._receives for transfer in of_process]
        for transfer, rows in _exchanged(empty, sent, self._receives, self._sends):
            known = sums.get(transfer.media_key)
            # bf16 has 8 bits of mantissa, and there may be many destinations.
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            sums[transfer.media_key] = wide if known is None else known + wide
        return sums


def _exchanged(
    empty: torch.Tensor,
    sent: Sequence[torch.Tensor],
    sends: Sequence[Sequence[FeatureTransfer]],
    receives: Sequence[Sequence[FeatureTransfer]],
) -> list[tuple[FeatureTransfer, torch.Tensor]]:
    """What each process receives of what all of them have sent."""
    counts = [[sum(transfer.rows for transfer in of_process) for of_process in side] for side in (sends, receives)]
    rows = exchange_rows(torch.cat([empty, *sent]), *counts)
    received = [transfer for of_process in receives for transfer in of_process]
    return list(zip(received, rows.split([transfer.rows for transfer in received]) if received else (), strict=True))
