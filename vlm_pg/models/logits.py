"""Log-probabilities of chosen tokens without ever holding all logits.

A 150k vocabulary in fp32 is 0.6 MB a token. Rows go through the output head in chunks whose logits are recomputed in
backward. A chunk's results are stored: the second time only the product of the head runs.

Where the head is nothing but a product with its weight (``plain_weight``), all chunks are one operation of autograd,
and add their parts of the weight's gradient to one buffer. As operations of their own, the gradients of the first two
and their sum exist at one time: three times the vocabulary by the width, 3 GiB at 7B in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from vlm_pg.models.kernel_trials import Trial, faults, with_gradients
from vlm_pg.models.weights import is_sharded


def chunk_bytes(least: int, mlp_tensor: int, entropy_graph: bool = False) -> int:
    """Bytes of fp32 logits that a chunk may have where layers are recomputed in backward, after the head's.

    Of a chunk three such tensors exist at a time (six with gradients of entropies); of a recomputed layer at least
    gate, up and the gradient of their product. So a chunk as large as one of these never sets the peak of a pass.

    Args:
        least: smallest chunk, in bytes.
        mlp_tensor: bytes of the rows that a layer's MLP takes at a time, at its inner width.
    """
    return max(least, mlp_tensor // (2 if entropy_graph else 1))


def rows_of_chunks(rows: int, least: int, most: int) -> int:
    """Rows of a chunk, of ``rows``, where a small chunk has ``least`` rows and a large one ``most``.

    Rows that fit into a small chunk are one piece, whose logits stay until backward. Otherwise no logits stay, so there
    are two or more pieces of about equal length.
    """
    if rows <= least:
        return least
    return max(least, -(-rows // max(2, -(-rows // most))))


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_rows: int,
    least_chunks: int = 1,
    entropy_graph: bool = False,
    weight: Tensor | None = None,
    fused: bool = False,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        head: maps [rows, D] to [rows, V]; calls the module, so that its hooks run.
        hidden: [R, D].
        targets: int64 [R]; or [R, 1 + k], for log-probabilities of further tokens.
        temperature: divides the logits.
        chunk_rows: rows whose logits are held at one time.
        least_chunks: calls of the head at least, with empty ones behind the others; where weights are sharded over
            ranks every call is a collective, so all ranks must make equally many.
        entropy_graph: leave the entropies on the graph, for an entropy bonus.
        weight: [V, D], where ``head`` is only a product with it, without hooks on its calls.
        fused: use ``fused_logits``, one kernel forward and one backward, where there is no ``logits_fault``; not for
            ``entropy_graph`` without ``weight``.
        known: the results, recorded when the targets were sampled; computed is their gradient.

    Returns:
        fp32 log-probabilities, as ``targets`` (differentiable), and entropies in nats [R] (detached without
        ``entropy_graph``).
    """
    if targets.dim() > 1:
        # The other operations know one gradient a row.
        entropy_graph, fused = True, False
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (1.0 leaves logits as they are).")
    if weight is not None and torch.is_grad_enabled() and (known is not None or hidden.shape[0] > chunk_rows):
        found = _OfAllChunks.apply(hidden, weight, targets, temperature, chunk_rows, entropy_graph, fused, known)
        return found[0], -found[1]
    pieces = list(zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True))
    pieces += [(hidden[:0], targets[:0])] * (least_chunks - len(pieces))
    rows = _Rows(temperature, fused)

    def chunk(h: Tensor, t: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
        # With gradients of entropies logits are needed in fp32 again, so autograd keeps everything itself.
        logits = head(h)
        return (
            _values_on_graph(logits, t, temperature) if entropy_graph else _TargetLogprobs.apply(logits, t, rows, piece)
        )

    if len(pieces) == 1 or not torch.is_grad_enabled():
        parts = [chunk(h, t, _Piece(i * chunk_rows)) for i, (h, t) in enumerate(pieces)]
    else:
        parts = [
            checkpoint(chunk, h, t, _Piece(i * chunk_rows, True), use_reentrant=False, preserve_rng_state=False)
            for i, (h, t) in enumerate(pieces)
        ]
    logprobs, negated_entropies = zip(*parts, strict=True)
    of_all = torch.cat(logprobs)
    if not entropy_graph:
        of_all = _AllLogprobs.apply(of_all, rows)
    entropies = -torch.cat(negated_entropies)
    if known is None:
        return of_all, entropies
    return _Known.apply(of_all, known[0]), _Known.apply(entropies, known[1])


class _Known(torch.autograd.Function):
    """Values that are known, with the gradient of ``computed``."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, known: Tensor) -> Tensor:
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


@dataclass
class _Rows:
    """What backward needs of all rows, computed for all at once: a few numbers a row would be a few kernels a chunk.

    ``of_targets`` [R]: the logits' gradients at the targets, in the logits' ``dtype``.
    """

    temperature: float
    fused: bool = False
    dtype: torch.dtype | None = None
    of_targets: Tensor | None = None


@dataclass
class _Piece:
    """A chunk's first row and, between its forward and its recomputation, its log-probabilities and negated entropies;
    the recomputation needs the graph alone."""

    start: int
    remembers: bool = False
    values: tuple[Tensor, Tensor] | None = None


class _AllLogprobs(torch.autograd.Function):
    """The log-probabilities of all chunks as they are. Backward hands each chunk its rows' gradient by -temperature."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, rows: _Rows) -> Tensor:
        ctx.save_for_backward(logprobs)
        ctx.rows = rows
        return logprobs.view_as(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (logprobs,) = ctx.saved_tensors
        rows = ctx.rows
        negated, rows.of_targets = _for_all_rows(grad_outputs[0], logprobs, rows.temperature, rows.dtype)
        return negated, None


class _TargetLogprobs(torch.autograd.Function):
    """Logits [rows, V] -> fp32 log-probabilities of the targets [rows]; negated entropies [rows] without a gradient.

    Of z = logits / temperature the log-probability of target y is log p_y with p = softmax(z). Its gradient is
    d log p_y / d logits_j = ((j = y) - p_j) / temperature: one softmax, and one product, rounded once. The upstream
    gradient has been through ``_AllLogprobs``.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: _Rows, piece: _Piece) -> tuple[Tensor, Tensor]:
        if piece.values is not None:
            logprobs, negated_entropies = piece.values
            piece.values = None
        else:
            logprobs, negated_entropies = _values(logits, targets, rows.temperature, rows.fused)
            if piece.remembers:
                # Views of their own: what autograd marks as outputs of this call must not be given to another one.
                piece.values = logprobs.detach(), negated_entropies.detach()
        rows.dtype = logits.dtype
        ctx.save_for_backward(logits, targets, logprobs)
        ctx.rows, ctx.start = rows, piece.start
        ctx.mark_non_differentiable(negated_entropies)
        # No zeros are made for the entropies, which have no gradient.
        ctx.set_materialize_grads(False)
        return logprobs, negated_entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return None, None, None, None
        logits, targets, logprobs = ctx.saved_tensors
        rows, negated = ctx.rows, grad_outputs[0]
        of_targets = rows.of_targets[ctx.start : ctx.start + len(targets)]
        if rows.fused:
            return _fused_gradient(logits, rows.temperature, targets, logprobs, negated, of_targets), None, None, None
        return _logits_gradient(logits, targets, negated, of_targets, rows.temperature), None, None, None


def _for_all_rows(
    upstream: Tensor, logprobs: Tensor, temperature: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Of the log-probabilities' gradient ``upstream`` [R]: itself by -temperature, and the logits' at the targets in
    ``dtype``."""
    negated = upstream.float() / -temperature
    # 1 - p of a target that is nearly certain would be lost in half precision.
    of_targets = torch.empty_like(logprobs, dtype=dtype)
    torch.mul(logprobs.expm1(), negated, out=of_targets)
    return negated, of_targets


def _logits_gradient(
    logits: Tensor, targets: Tensor, negated: Tensor, of_targets: Tensor, temperature: float
) -> Tensor:
    """As the logits, from what ``_for_all_rows`` gives of these rows."""
    grad = torch.empty_like(logits)
    torch.mul(_scaled(logits, temperature).softmax(-1), negated[:, None], out=grad)
    return grad.scatter_(1, targets[:, None], of_targets[:, None])


class _OfAllChunks(torch.autograd.Function):
    """Hidden [R, D], weight [V, D] -> fp32 log-probabilities [R] and negated entropies [R] of logits = hidden weight^T.

    d / d hidden = G weight and d / d weight = G^T hidden, with G the gradient of the logits. Chunk after chunk is added
    to the latter by the product itself, which sums in fp32 and rounds to the weight's dtype once a chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
        entropy_graph: bool,
        fused: bool,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if known is None:
            pieces = zip(hidden.split(chunk_rows), targets.split(chunk_rows), strict=True)
            found = [_values(F.linear(h, weight), t, temperature, fused) for h, t in pieces]
            logprobs, negated_entropies = (torch.cat(values) for values in zip(*found, strict=True))
        else:
            logprobs, negated_entropies = known[0].view_as(known[0]), -known[1]
        ctx.save_for_backward(hidden, weight, targets, logprobs, negated_entropies)
        ctx.temperature, ctx.chunk_rows, ctx.entropy_graph, ctx.fused = temperature, chunk_rows, entropy_graph, fused
        if not entropy_graph:
            ctx.mark_non_differentiable(negated_entropies)
        return logprobs, negated_entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, logprobs, negated_entropies = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        per_row: list[Tensor] = []
        if not ctx.entropy_graph:
            negated, of_targets = _for_all_rows(grad_outputs[0], logprobs, ctx.temperature, hidden.dtype)
            per_row = [logprobs, negated, of_targets]
        elif ctx.fused:
            negated, of_targets = _for_all_rows(grad_outputs[0], logprobs, ctx.temperature, torch.float32)
            of_entropies = grad_outputs[1].float() / ctx.temperature
            of_targets += logprobs.exp() * (logprobs - negated_entropies) * of_entropies
            per_row = [logprobs, negated, of_targets, negated_entropies, of_entropies]
        for first in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(first, first + ctx.chunk_rows)
            logits = F.linear(hidden[rows], weight)
            if ctx.fused:
                grad = _fused_gradient(logits, ctx.temperature, targets[rows], *(values[rows] for values in per_row))
            elif ctx.entropy_graph:
                with torch.enable_grad():
                    logits = logits.detach().requires_grad_()
                    values = _values_on_graph(logits, targets[rows], ctx.temperature)
                    (grad,) = torch.autograd.grad(values, logits, [g[rows] for g in grad_outputs])
                del values
            else:
                grad = _logits_gradient(logits, targets[rows], negated[rows], of_targets[rows], ctx.temperature)
            del logits
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[rows])
            if ctx.needs_input_grad[1]:
                if of_weight is None:
                    of_weight = grad.T.mm(hidden[rows])
                else:
                    torch.addmm(of_weight, grad.T, hidden[rows], out=of_weight)
            del grad  # freed before the next chunk's logits
        return of_hidden, of_weight, None, None, None, None, None, None


def _fused_gradient(logits: Tensor, temperature: float, targets: Tensor, *rows: Tensor) -> Any:
    """As ``_logits_gradient``; ``rows``: what ``logits_gradient`` takes behind the targets."""
    from vlm_pg.models.fused_logits import logits_gradient

    return logits_gradient(logits, temperature, targets.contiguous(), *rows)


@cache
def logits_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why ``fused_logits`` cannot be used for logits of this dtype there; None where it agrees with torch's operators.

    Checked once, log-probabilities, entropies and both gradients, on random logits.
    """
    if device.type != "cuda":
        return f"they are on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        # A log-sum-exp of fp32 costs some bits that a softmax of fp32 has.
        return f"they are {str(dtype).removeprefix('torch.')}; the kernels are for bfloat16 and float16"
    return judged(device, dtype)


@torch.inference_mode(False)
def judged(device: torch.device, dtype: torch.dtype) -> str | None:
    """The fault of the kernels on random logits on any device, or None."""
    vocabulary, temperature = 5000, 0.7
    targets = torch.tensor([0, 17, vocabulary - 1], device=device)
    # A product with it leaves logits, and their gradients, as they are.
    unit = torch.eye(vocabulary, device=device, dtype=dtype)

    def run(logits: Tensor, entropy_graph: bool, fused: bool) -> Any:
        return _OfAllChunks.apply(logits, unit, targets, temperature, 2, entropy_graph, fused)[: 1 + entropy_graph]

    def truth(logits: Tensor, entropy_graph: bool) -> Any:
        logprobs = (logits / temperature).log_softmax(-1)
        found = logprobs.gather(-1, targets[:, None])[:, 0], (logprobs.exp() * logprobs).sum(-1)
        return found[: 1 + entropy_graph]

    def trials() -> Iterator[Trial]:
        logits = 4 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        for entropies in (False, True):
            by, usual = (partial(run, entropy_graph=entropies, fused=fused) for fused in (True, False))
            name = "entropies" if entropies else "log-probabilities"
            yield from with_gradients(name, by, usual, {"logits": logits}, partial(truth, entropy_graph=entropies))

    return faults({"logits": trials}).get("logits")


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32 [rows, V]."""
    if temperature == 1.0:
        return logits.float()
    # Beside a number the quotient would be rounded to the logits' dtype; beside an fp32 tensor it comes in fp32.
    return (logits / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)).float()


def _values(logits: Tensor, targets: Tensor, temperature: float, fused: bool = False) -> tuple[Tensor, Tensor]:
    if fused:
        from vlm_pg.models.fused_logits import token_statistics

        found, entropies = token_statistics(logits, temperature, targets.contiguous())
        return found, -entropies
    logprobs = _scaled(logits, temperature).log_softmax(-1)
    negated_entropies = logprobs.exp().mul_(logprobs).sum(-1)
    return _at(targets, logprobs), negated_entropies


def _values_on_graph(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = _scaled(logits, temperature).log_softmax(-1)
    return _at(targets, logprobs), (logprobs.exp() * logprobs).sum(-1)


def _at(targets: Tensor, logprobs: Tensor) -> Tensor:
    """Of [rows, V] those of the targets, [rows] or [rows, 1 + k]."""
    return logprobs.gather(-1, targets) if targets.dim() > 1 else logprobs.gather(-1, targets[:, None])[:, 0]


def plain_weight(head: Any) -> Tensor | None:
    """The weight of an output head that is only a product with it; None with a bias, an adapter or hooks on its calls
    (accelerate, ZeRO-3), and under autocast."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    is_plain = type(head) is torch.nn.Linear and "forward" not in vars(head) and not is_sharded(head)
    if not is_plain or head.bias is not None or any(getattr(head, name) for name in hooks):
        return None
    weight = head.weight
    return None if torch.is_autocast_enabled(weight.device.type) else weight
