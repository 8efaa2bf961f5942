"""Forwards that sampling has made already, from which an update starts at its backward.

While the weights are those that sampled, an update's forward would compute every row again: prompt rows ran in the
prefill, response rows in decode steps. A checkpointed layer needs of its first run only its input, and here also
attention's output and log-sum-exp, which a recomputation takes over. So sampling records these (``ForwardRecorder``),
and in the update no layer has a first run (``RecordedStream.skip``): what it would return is never read, for the next
layer starts from its own recorded input. Log-probabilities and entropies are those of sampling, bit for bit.

Sequence ranks exchange the rows that they compute, one layer at a time (``RowExchange``).

T rows of a stream, D model dim, N query heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlm_pg.attention.grouped import AttentionMemo
from vlm_pg.models.offloading import OffloadTarget
from vlm_pg.models.stream_share import Division, Indices, rows_to_heads
from vlm_pg.types import Kind, RecordedRows

Put = Callable[[Tensor], Any]


class ForwardRecorder:
    """Collects what one pass computes: handed over by ``run_decoder`` and by the pass's attention context.

    Args:
        sizes: rows of each piece of the pass.
        read: of each how many of its last rows are read off the last layer, where that does not run on all rows.
        puts: for each how its rows are kept, copied; None: they are not.
    """

    def __init__(self, sizes: Sequence[int], read: Sequence[int], puts: Sequence[Put | None]):
        self.pieces = [RecordedRows(size) for size in sizes]
        self._sizes, self._read, self._puts = sizes, read, puts

    def layer_input(self, index: int, hidden: Tensor) -> None:
        """[1, T, D] of layer ``index``, in order; behind the last layer its output [1, rows read, D]."""
        self._keep((index, "input"), hidden[0])

    def attended(self, layer_index: int, out: Tensor, lse: Tensor) -> None:
        """Attention's output [rows, N, H] and log-sum-exp [N, rows]."""
        self._keep((layer_index, "out"), out)
        self._keep((layer_index, "lse"), lse.T)

    def routed(self, layer_index: int, experts: Tensor) -> None:
        """A mixture's experts int64 [rows, k] of each token."""
        self._keep((layer_index, "experts"), experts)

    def _keep(self, kind: Kind, x: Tensor) -> None:
        sizes = self._sizes if len(x) == sum(self._sizes) else self._read
        parts = x[: sum(sizes)].split(list(sizes))  # the last layer runs on one row where none is read
        for piece, part, put in zip(self.pieces, parts, self._puts, strict=True):
            if put is not None:
                # A tensor of the pass's own is kept as it is, where no other piece would keep it alive.
                piece.keep(kind, part, torch.Tensor.detach if put is torch.clone and len(parts) == 1 else put)


class RecordingMemo(AttentionMemo):
    """Hands one layer's result to a recorder."""

    def __init__(self, recorder: ForwardRecorder, layer_index: int):
        super().__init__()
        self._recorder, self._layer_index = recorder, layer_index

    def put(self, out: Tensor, lse: Tensor) -> None:
        self._recorder.attended(self._layer_index, out, lse)


class RouterHook:
    """Forward hook of one mixture's router: collects its choice for a recorder, or replaces it by ``routes``.

    Routers return logits, weights of the chosen experts and their indices (transformers' ``...TopKRouter``). In row
    tiles (``RowTiles``) they are called for one tile after the other.

    ``seen``: the experts of each call of this pass; None: nothing is recorded. ``routes``: int64 [rows, k] that the
    layer takes; None: its own.
    """

    def __init__(self, mixture: Any):
        self._mixture = mixture
        self.seen: list[Tensor] | None = None
        self.routes: Tensor | None = None

    def __call__(self, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, experts = outputs
        if self.seen is not None:
            self.seen.append(experts)
        if self.routes is None:
            return None
        tiles = getattr(self._mixture, "vlm_pg_tiles", None)
        experts = self.routes.narrow(0, 0 if tiles is None else tiles.start, len(logits))
        chosen = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), experts

    def take_seen(self, rows: int) -> Tensor:
        """int64 [rows, k] of a layer that has run; a tile without rows ran on one that is not there."""
        assert self.seen is not None
        experts = torch.cat(self.seen) if len(self.seen) > 1 else self.seen[0]
        self.seen = []
        return experts[:rows]


def hook_routers(language_model: Any) -> dict[int, RouterHook]:
    """A hook on each layer's router, by layer; made once."""
    if not hasattr(language_model, "vlm_pg_router_hooks"):
        hooks = {}
        for index, layer in enumerate(language_model.layers):
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                gate.register_forward_hook(hook := RouterHook(layer.mlp))
                hooks[index] = hook
        language_model.vlm_pg_router_hooks = hooks
    return language_model.vlm_pg_router_hooks


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` (exclusive) of some recorded rows."""

    recorded: RecordedRows
    start: int
    stop: int

    def of(self, kind: Kind) -> Tensor:
        """These rows of one of its tensors, which may be there for the last rows only."""
        kept = self.recorded.tensors[kind]
        rows = kept if isinstance(kept, Tensor) else kept.get()
        return rows.narrow(0, self.start - self.recorded.num_tokens + len(rows), self.stop - self.start)


def row_ranges(pieces: Sequence[RecordedRows], start: int, stop: int) -> list[RowRange]:
    """Tokens ``start`` to ``stop`` of a sequence that was recorded in consecutive pieces."""
    found, first = [], 0
    for piece in pieces:
        begin, end = max(start, first), min(stop, first + piece.num_tokens)
        if begin < end:
            found.append(RowRange(piece, begin - first, end - first))
        first += piece.num_tokens
    return found


class RowExchange:
    """Sends recorded rows from the sequence rank that holds them to the one that computes them.

    Args:
        parts: the rows in stream order; those held by other ranks have no tensors here.
        holders: for each part the sequence rank that holds its tensors.
        division: which rank computes which rows.
        kinds: ``Network.recorded_kinds``.
    """

    def __init__(
        self,
        parts: Sequence[RowRange],
        holders: Sequence[int],
        division: Division,
        kinds: Mapping[Kind, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
    ):
        sequence = division.sequence
        self.division, self._kinds, self._device = division, kinds, device
        self._held = [part for part, holder in zip(parts, holders, strict=True) if holder == sequence.rank]
        holder_of = np.repeat(holders, [part.stop - part.start for part in parts])
        runs, holds = division.owner[holder_of == sequence.rank], holder_of[division.mine]
        self._outgoing = Indices(runs.argsort(kind="stable"))
        self._send, self._receive = (np.bincount(x, minlength=sequence.size).tolist() for x in (runs, holds))
        self._in_order = Indices(holds.argsort(kind="stable").argsort())

    def of(self, kind: Kind) -> Tensor:
        """[mine, ...]: the rows that this rank computes. A collective."""
        shape, dtype = self._kinds[kind]
        held = torch.cat([torch.empty(0, *shape, dtype=dtype, device=self._device), *(x.of(kind) for x in self._held)])
        sent = held.index_select(0, self._outgoing.on(self._device))
        received = self.division.sequence.send(sent, self._send, self._receive)
        return received.index_select(0, self._in_order.on(self._device))


@dataclass(eq=False)
class RecordedStream:
    """The recorded forward of a packed stream.

    ``rows``: all T rows, ``read``: those that are read off the last layer, in stream order. ``logprobs``,
    ``entropies``: fp32 [R] of the targets. ``exchanges``: of ``rows`` and ``read`` between sequence ranks.
    ``injected``: further results of the layer that runs in backward, and their gradients. ``in_tiles``: enters the
    number of tiles that ranks have agreed on.
    """

    rows: Sequence[RowRange]
    read: Sequence[RowRange]
    logprobs: Tensor
    entropies: Tensor
    exchanges: tuple[RowExchange, RowExchange] | None = None
    injected: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    in_tiles: Callable[[], AbstractContextManager[None]] = nullcontext

    def over_ranks(self, rows: Division, read: Division, kinds: Any, device: torch.device) -> RecordedStream:
        """The same stream, of which a sequence rank computes its share. A collective."""
        held = rows.sequence.gather([bool(part.recorded.tensors) for part in (*self.rows, *self.read)])
        holders = np.argmax(held, axis=0).tolist()  # the first that has it
        of_rows, of_read = holders[: len(self.rows)], holders[len(self.rows) :]
        exchanges = (
            RowExchange(self.rows, of_rows, rows, kinds, device),
            RowExchange(self.read, of_read, read, kinds, device),
        )
        return replace(self, exchanges=exchanges)

    def of(self, kind: Kind, of_read: bool) -> Tensor:
        """[rows, ...] that this rank computes, all or those that are read; one of zeros where it has none."""
        if self.exchanges is None:
            return torch.cat([part.of(kind) for part in (self.read if of_read else self.rows)])
        found = self.exchanges[of_read].of(kind)
        return found if len(found) else found.new_zeros(1, *found.shape[1:])

    def inputs(self, index: int) -> Tensor:
        """[1, T, D] of layer ``index``; offloaded tensors of the layer before are prefetched."""
        for rows in {part.recorded for part in self.rows}:
            for kind in ((index - 1, what) for what in ("input", "out", "lse", "experts")):
                if not isinstance(kept := rows.tensors.get(kind), Tensor | None):
                    kept.fetch()
        return self.of((index, "input"), False)[None]

    def output(self, index: int) -> Tensor:
        """[1, rows read, D] behind the last layer ``index``."""
        return self.of((index + 1, "input"), True)[None]

    def known(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``logprobs`` and ``entropies`` there."""
        return self.logprobs.to(device, non_blocking=True), self.entropies.to(device, non_blocking=True)

    def memo(self, layer_index: int, of_read: bool) -> AttentionMemo:
        """Attention's result in a layer, for all rows or those that are read; on a sequence rank that of its heads."""
        memo = AttentionMemo()
        out, lse = (self.of((layer_index, what), of_read) for what in ("out", "lse"))
        if self.exchanges is not None:
            division = self.exchanges[of_read].division
            out, lse = rows_to_heads((out, division), (lse[..., None], division))
            lse = lse[..., 0]
        memo.put(out, lse.T.contiguous())
        return memo

    def skip(self, one: LayerRun, hidden: Tensor) -> Tensor:
        """What a layer returns, without running it, with values only if it is the last; its backward runs it from the
        recorded input.

        Args:
            hidden: [1, T, D], whose values are not used.
        """
        root = None
        if hidden.requires_grad or any(weight.requires_grad for weight in one.layer.parameters()):
            root = torch.zeros((), requires_grad=True)
        return _SkippedLayer.apply(hidden, root, self, one)


class LayerRun(NamedTuple):
    """How a layer runs: ``run`` [1, T, D] -> [1, rows, D].

    ``of_read``: its MLP runs on the rows that are read. ``hook``: of its router.
    """

    layer_index: int
    last: bool
    of_read: bool
    layer: torch.nn.Module
    hook: RouterHook | None
    run: Callable[[Tensor], Tensor]


class _SkippedLayer(torch.autograd.Function):
    """As ``torch.utils.checkpoint`` with ``use_reentrant``: gradients of weights are accumulated in this backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, root: Tensor | None, stream: RecordedStream, one: LayerRun) -> Tensor:
        ctx.stream, ctx.one = stream, one
        return stream.output(one.layer_index) if one.last else hidden.new_zeros(()).expand_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        stream, (index, _, of_read, layer, hook, run) = ctx.stream, ctx.one
        given = stream.inputs(index).requires_grad_(ctx.needs_input_grad[0])
        checkpoints = getattr(layer, "gradient_checkpointing", False)
        layer.gradient_checkpointing = False  # this is its only run
        if hook is not None:
            hook.routes = stream.of((index, "experts"), of_read)
        try:
            with stream.in_tiles(), torch.enable_grad():
                out = run(given)
            results, gradients = zip((out, grad_outputs[0]), *stream.injected, strict=True)
            stream.injected.clear()
            torch.autograd.backward(results, gradients)  # tiles run again
        finally:
            layer.gradient_checkpointing = checkpoints
            if hook is not None:
                hook.routes = None
        return given.grad, None, None, None


class ForwardBudget:
    """Memory that recorded forwards may take in one place.

    Args:
        limit: bytes.
        bytes_per_token: of all layers, ``Network.recorded_bytes``.
        target: where tensors are offloaded; None: they stay on the device.
    """

    def __init__(self, limit: int, bytes_per_token: int, target: OffloadTarget | None = None):
        self.limit, self.bytes_per_token, self.target = limit, bytes_per_token, target
        self.put: Put = torch.clone if target is None else target.put
        self._booked = 0
        self._rows: WeakSet[RecordedRows] = WeakSet()

    @property
    def used(self) -> int:
        """Bytes that are recorded, and booked for rollouts that are still sampled."""
        return self._booked + sum(rows.nbytes for rows in self._rows)

    @property
    def room(self) -> int:
        """Bytes that are not used."""
        return max(0, self.limit - self.used)

    def book(self, tokens: int) -> bool:
        """Whether so many more tokens fit; then they are booked until they are released."""
        more = tokens * self.bytes_per_token
        fits = self.used + more <= self.limit
        self._booked += more * fits
        return fits

    def release(self, tokens: int) -> None:
        """So many booked tokens have been computed, or will not be."""
        self._booked -= tokens * self.bytes_per_token

    def count(self, rows: Iterable[RecordedRows]) -> None:
        """Count what is recorded until it is freed."""
        self._rows.update(rows)
