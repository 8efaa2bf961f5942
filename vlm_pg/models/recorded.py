"""Forwards that sampling has made already, from which an update starts at its backward.

While the weights are those that sampled, an update's forward would compute every row again: prompt rows ran in the
prefill, response rows in decode steps. A checkpointed layer needs of its first run only its input, and here also
attention's output and log-sum-exp, which a recomputation takes over. So sampling records these (``ForwardRecorder``),
and in the update no layer has a first run (``RecordedStream.skip``): what it would return is never read, for the next
layer starts from its own recorded input. Log-probabilities and entropies are those of sampling, bit for bit.

T rows of a stream, D model dim, N query heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vlm_pg.attention.grouped import AttentionMemo
from vlm_pg.models.family import Family


@dataclass(eq=False)
class RecordedRows:
    """What the layers computed of n consecutive tokens of a sequence.

    ``inputs``: of each layer [n, D]. ``attention``: by full-attention layer the output [n, N, H] and the log-sum-exp
    [N, n]. ``output``: the last layer's [n, D], before the final norm. ``routes``: by layer with a mixture of experts
    those of each token, int64 [n, k]. Attention and routes in the last layer, and its output, are there for the last
    rows only where no others are read.
    """

    inputs: list[Tensor]
    attention: dict[int, tuple[Tensor, Tensor]]
    output: Tensor
    routes: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of_steps(cls, rows: Mapping[tuple[int, str], Tensor]) -> RecordedRows:
        """Of decode steps, [n, ...] by layer and what it is: "input" (behind the last layer its output), "out" and
        "lse" [n, N] of attention, "experts"."""
        *inputs, output = [rows[key] for key in sorted(rows) if key[1] == "input"]
        attention = {
            layer: (x, rows[layer, "lse"].T.contiguous()) for (layer, what), x in rows.items() if what == "out"
        }
        return cls(inputs, attention, output, {layer: x for (layer, what), x in rows.items() if what == "experts"})

    def __len__(self) -> int:
        return len(self.inputs[0])

    @property
    def nbytes(self) -> int:
        pairs = self.attention.values()
        tensors = (*self.inputs, self.output, *(x for pair in pairs for x in pair), *self.routes.values())
        return sum(x.nbytes for x in tensors)


@dataclass(eq=False)
class RecordedForward:
    """The forward of one rollout.

    ``prompt``: consecutive pieces of its prompt, shared with other rollouts. ``own``: pieces of the response's tokens
    but the last one, which is never read. ``logprobs``, ``entropies``: fp32 [R].
    """

    prompt: Sequence[RecordedRows]
    own: Sequence[RecordedRows]
    logprobs: Tensor
    entropies: Tensor

    def release(self) -> None:
        """Drop the tensors: they have been used, or will not be."""
        self.prompt, self.own = (), ()

    def __reduce__(self) -> Any:
        # Another process gets none: the tensors are larger than what they save there.
        return type(None), ()


class ForwardRecorder:
    """Collects what one pass computes: handed over by ``run_decoder`` and by the pass's attention context."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._attention: dict[int, tuple[Tensor, Tensor]] = {}
        self._routes: dict[int, Tensor] = {}

    def layer_input(self, index: int, hidden: Tensor) -> None:
        """[1, T, D] of layer ``index``, in order; behind the last layer its output [1, rows read, D]."""
        self._inputs.append(hidden[0])

    def attended(self, layer_index: int, out: Tensor, lse: Tensor) -> None:
        """Attention's output [rows, N, H] and log-sum-exp [N, rows]."""
        self._attention[layer_index] = (out, lse)

    def routed(self, layer_index: int, experts: Tensor) -> None:
        """A mixture's experts int64 [rows, k] of each token."""
        self._routes[layer_index] = experts

    def split(self, sizes: Sequence[int], read: Sequence[int]) -> Iterator[RecordedRows]:
        """The pass as pieces of these sizes. ``read``: of each how many of its last rows are read off the last layer,
        where that does not run on all rows."""
        *inputs, output = self._inputs
        start = first_read = 0
        for size, count in zip(sizes, read, strict=True):
            rows, last = slice(start, start := start + size), slice(first_read, first_read := first_read + count)

            def cut(x: Tensor, dim: int = 0, rows: slice = rows, last: slice = last) -> Tensor:
                chosen = rows if x.shape[dim] == sum(sizes) else last
                part = x[chosen] if dim == 0 else x[:, chosen]
                # A view would keep the whole pass alive.
                return part.clone() if len(sizes) > 1 else part

            attention = {index: (cut(out), cut(lse, 1)) for index, (out, lse) in self._attention.items()}
            routes = {index: cut(experts) for index, experts in self._routes.items()}
            yield RecordedRows([cut(x) for x in inputs], attention, cut(output), routes)


class RecordingMemo(AttentionMemo):
    """Hands one layer's result to a recorder."""

    def __init__(self, recorder: ForwardRecorder, layer_index: int):
        super().__init__()
        self._recorder, self._layer_index = recorder, layer_index

    def put(self, out: Tensor, lse: Tensor) -> None:
        self._recorder.attended(self._layer_index, out, lse)


class RouterHook:
    """Forward hook of one mixture's router: hands its choice to ``recorder``, or replaces it by that of ``recorded``.

    Routers return logits, weights of the chosen experts and their indices (transformers' ``...TopKRouter``).
    """

    def __init__(self, layer_index: int):
        self.layer_index = layer_index
        self.recorder: Any = None
        self.recorded: RecordedStream | None = None

    def __call__(self, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, experts = outputs
        if self.recorder is not None:
            self.recorder.routed(self.layer_index, experts)
        if self.recorded is None:
            return None
        experts = self.recorded.routes(self.layer_index, len(logits))
        chosen = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), experts


def hook_routers(language_model: Any) -> dict[int, RouterHook]:
    """A hook on each layer's router, by layer; made once."""
    if not hasattr(language_model, "vlm_pg_router_hooks"):
        hooks = {}
        for index, layer in enumerate(language_model.layers):
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                gate.register_forward_hook(hook := RouterHook(index))
                hooks[index] = hook
        language_model.vlm_pg_router_hooks = hooks
    return language_model.vlm_pg_router_hooks


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` (exclusive) of some recorded rows."""

    recorded: RecordedRows
    start: int
    stop: int

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """These rows of one of its tensors, which may be there for the last rows only."""
        missing = len(self.recorded) - x.shape[dim]
        return x.narrow(dim, self.start - missing, self.stop - self.start)


def row_ranges(pieces: Sequence[RecordedRows], start: int, stop: int) -> list[RowRange]:
    """Tokens ``start`` to ``stop`` of a sequence that was recorded in consecutive pieces."""
    found, first = [], 0
    for piece in pieces:
        begin, end = max(start, first), min(stop, first + len(piece))
        if begin < end:
            found.append(RowRange(piece, begin - first, end - first))
        first += len(piece)
    return found


@dataclass(eq=False)
class RecordedStream:
    """The recorded forward of a packed stream.

    ``rows``: all T rows, ``read``: those that are read off the last layer, in stream order. ``logprobs``,
    ``entropies``: fp32 [R] of the targets. ``injected``: further results of the layer that runs in backward, and their
    gradients. ``anchor``: requires a gradient while it runs, for operations that must be on a path to one.
    """

    rows: Sequence[RowRange]
    read: Sequence[RowRange]
    logprobs: Tensor
    entropies: Tensor
    injected: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    anchor: Tensor | None = None

    def inputs(self, index: int) -> Tensor:
        """[1, T, D] of layer ``index``."""
        return torch.cat([part.of(part.recorded.inputs[index]) for part in self.rows])[None]

    def known(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``logprobs`` and ``entropies`` there."""
        return self.logprobs.to(device, non_blocking=True), self.entropies.to(device, non_blocking=True)

    def memo(self, layer_index: int, of_read: bool) -> AttentionMemo:
        """Attention's result in a layer, for all rows or those that are read."""
        pairs = [(part, part.recorded.attention[layer_index]) for part in (self.read if of_read else self.rows)]
        memo = AttentionMemo()
        memo.put(
            torch.cat([part.of(out) for part, (out, _) in pairs]),
            torch.cat([part.of(lse, 1) for part, (_, lse) in pairs], 1),
        )
        return memo

    def routes(self, layer_index: int, count: int) -> Tensor:
        """A mixture's experts int64 [count, k], of all rows or of those that are read."""
        parts = self.rows if count == sum(part.stop - part.start for part in self.rows) else self.read
        return torch.cat([part.of(part.recorded.routes[layer_index]) for part in parts])

    def skip(
        self,
        index: int,
        last: bool,
        layer: torch.nn.Module,
        hook: RouterHook | None,
        run: Callable[[Tensor], Tensor],
        hidden: Tensor,
    ) -> Tensor:
        """What layer ``index`` returns, without running it; its backward runs it from the recorded input.

        Args:
            last: it is the last layer, whose output is needed; of others one without values is returned.
            hook: of its router.
            run: the layer, [1, T, D] -> [1, rows, D].
            hidden: [1, T, D], whose values are not used.
        """
        weights = [weight for weight in layer.parameters() if weight.requires_grad]
        return _SkippedLayer.apply(hidden, self, index, last, layer, hook, run, *weights)


class _SkippedLayer(torch.autograd.Function):
    """The weights are inputs, so that autograd adds up their gradients and hooks on them see the sums, as always."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        stream: RecordedStream,
        index: int,
        last: bool,
        layer: torch.nn.Module,
        hook: RouterHook | None,
        run: Callable[[Tensor], Tensor],
        *weights: Tensor,
    ) -> Tensor:
        ctx.stream, ctx.index, ctx.layer, ctx.hook, ctx.run = stream, index, layer, hook, run
        ctx.save_for_backward(*weights)
        if last:
            return torch.cat([part.of(part.recorded.output) for part in stream.read])[None]
        return hidden.new_zeros(()).expand_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.stream.inputs(ctx.index)
        ctx.stream.anchor = torch.zeros((), device=given.device, requires_grad=True)
        inputs = (given.requires_grad_(ctx.needs_input_grad[0]), *ctx.saved_tensors)
        checkpoints = getattr(ctx.layer, "gradient_checkpointing", False)
        ctx.layer.gradient_checkpointing = False  # this is its only run
        if (hook := ctx.hook) is not None:
            hook.recorded = ctx.stream
        try:
            with torch.enable_grad():
                out = ctx.run(given)
        finally:
            ctx.layer.gradient_checkpointing = checkpoints
            if hook is not None:
                hook.recorded = None
        needed = [x for x in inputs if x.requires_grad] + [ctx.stream.anchor]
        results, given_gradients = zip((out, grad_outputs[0]), *ctx.stream.injected, strict=True)
        ctx.stream.injected.clear()
        gradients = iter(torch.autograd.grad(results, needed, given_gradients, allow_unused=True))
        of_hidden, *of_weights = [next(gradients) if x.requires_grad else None for x in inputs]
        return of_hidden, None, None, None, None, None, None, *of_weights


class ForwardBudget:
    """Memory that recorded forwards may take.

    Args:
        limit: bytes.
        bytes_per_token: of all layers, ``recorded_bytes``.
    """

    def __init__(self, limit: int, bytes_per_token: int):
        self.limit, self.bytes_per_token = limit, bytes_per_token
        self._booked = 0
        self._rows: WeakSet[RecordedRows] = WeakSet()

    @property
    def used(self) -> int:
        """Bytes that are recorded, and booked for rollouts that are still sampled."""
        return self._booked + sum(rows.nbytes for rows in self._rows)

    def book(self, prompt_tokens: int, response_tokens: int) -> bool:
        """Whether so many more tokens fit; then responses are booked until they are released."""
        more = response_tokens * self.bytes_per_token
        if self.used + more + prompt_tokens * self.bytes_per_token > self.limit:
            return False
        self._booked += more
        return True

    def release(self, response_tokens: int) -> None:
        """So many booked tokens are sampled, or will not be."""
        self._booked -= response_tokens * self.bytes_per_token

    def count(self, rows: Iterable[RecordedRows]) -> None:
        """Count what is recorded until it is freed."""
        self._rows.update(rows)


def recorded_bytes(family: Family, config: Any, itemsize: int) -> int:
    """Bytes a token: the layers' inputs and the last one's output, attention's outputs and fp32 log-sum-exps."""
    heads, _, head_dim = family.head_shape(config)
    kinds = family.layer_kinds(config)
    hidden = (len(kinds) + 1) * config.get_text_config().hidden_size * itemsize
    return hidden + kinds.count("full_attention") * heads * (head_dim * itemsize + 4)
