"""Attention contexts of training and scoring, and states of prefixes that have run.

The states are keys and values of each layer, states of linear layers, and last hidden states. Chunks of responses see
them cut from the prefixes' graph: each chunk's backward adds its gradient to a sum in fp32, and
a last backward carries the sums through the prefixes. Keys and values, and their sums, may be offloaded between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlm_pg.attention.grouped import AttentionMemo, grouped_attention
from vlm_pg.attention.kernels import Kernel
from vlm_pg.attention.plan import AttentionPlan, full_plan
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.errors import ModelError
from vlm_pg.models.linear_attention import LinearLayout, LinearStates, linear_attention_over_tree
from vlm_pg.models.offloading import Offloaded, OffloadLane, OffloadTarget
from vlm_pg.models.recorded import ForwardRecorder, RecordedStream, RecordingMemo
from vlm_pg.models.stream_share import Division, StreamShare, heads_to_rows, rows_to_heads

KeysValues = tuple[Tensor, Tensor]
# Layer, and which of its two states; -1 for the prompts' last hidden states.
Key = tuple[int, int]
LAST_HIDDEN: Key = (-1, 0)


class GradientSums:
    """By state, in fp32, the sum of its gradients over chunks.

    Args:
        target: where the sums of ``offloaded`` lie between two additions.
    """

    def __init__(self, target: OffloadTarget | None = None):
        self._target = target
        self._sums: dict[Key, Tensor | Offloaded] = {}
        self.offloaded: set[Key] = set()
        # A sum is multiplied by this when it is taken.
        self.factor: Tensor | float = 1.0

    def add(self, key: Key, gradient: Tensor) -> None:
        before = self.pop(key)
        if before is None:
            before = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            before += gradient
        self._sums[key] = before
        if self._target is not None and key in self.offloaded:
            self._sums[key] = self._target.put(before)

    def pop(self, key: Key) -> Tensor | None:
        """The sum, not yet multiplied by ``factor``; None if no chunk added to it."""
        found = self._sums.pop(key, None)
        return found if isinstance(found, Tensor | None) else found.get()

    def __contains__(self, key: Key) -> bool:
        return key in self._sums


class StateStore:
    """The states of every layer of the prefixes.

    Args:
        target: where keys and values are offloaded; None: they stay on the device.
    """

    def __init__(self, target: OffloadTarget | None = None):
        self._target = target
        self.sums = GradientSums(target)
        # On the prefixes' graph.
        self.held: dict[Key, Tensor] = {}
        # Of prefixes whose forward was recorded: without a graph. Their layers' only run adds the sums, in backward.
        self.recorded: dict[Key, Tensor] = {}
        self._away: dict[Key, tuple[Offloaded, bool]] = {}
        self._last_read = -1

    def hold(self, layer: int, first: Tensor, second: Tensor) -> None:
        """Store states that are not offloaded."""
        self.held |= {(layer, 0): first, (layer, 1): second}

    def put(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store keys and values [prefix rows, K, H]; returns those that the prefixes' own attention must use."""
        if self._target is None:
            self.hold(layer, k, v)
            return k, v
        return self._offload(self._target, (layer, 0), k), self._offload(self._target, (layer, 1), v)

    def _offload(self, target: OffloadTarget, key: Key, state: Tensor) -> Tensor:
        with_graph = state.requires_grad and torch.is_grad_enabled()
        self._away[key] = (target.put(state), with_graph)
        if not with_graph:
            return state
        # Backward passes here anyway, one layer at a time; no tensor of the graph needs to be held until then.
        self.sums.offloaded.add(key)
        return _AddSum.apply(state, self.sums, key)

    def __getitem__(self, layer: int) -> KeysValues:
        """The layer's states for a chunk: same values, gradients summed up here."""
        following = layer + 1 if layer > self._last_read else layer - 1
        self._last_read = layer
        pair = self._cut((layer, 0)), self._cut((layer, 1))
        for stored, _ in (self._away[key] for key in ((following, 0), (following, 1)) if key in self._away):
            stored.fetch()
        return pair

    def _cut(self, key: Key) -> Tensor:
        if key in self.recorded:
            return cut(self.recorded[key], True, self.sums, key)
        if key in self.held:
            state = self.held[key]
            return cut(state, state.requires_grad, self.sums, key)
        stored, with_graph = self._away[key]
        return cut(stored.get(), with_graph, self.sums, key)


@dataclass
class PrefixStates:
    """What responses need of prefixes that have run; chunks see it with gradients cut, whose sums stay here.

    ``last_hidden`` [prompt ends, D]: final hidden states of the rows the prefix batch reads, on the prefixes' graph.
    ``layers``: per decoder layer keys and values [prefix rows, K, H], or the linear layer's states per node.

    A sequence rank has the hidden states of its own rows, and its own heads of all keys, values and states.
    """

    last_hidden: Tensor
    layers: StateStore

    def last_hidden_for_chunk(self) -> Tensor:
        """Same values, gradients summed up here in fp32."""
        return cut(self.last_hidden, self.last_hidden.requires_grad, self.layers.sums, LAST_HIDDEN)

    def surrogate_loss(self, loss_scale: float = 1.0) -> Tensor:
        """A scalar, zero in value, whose backward runs through the prefixes with the chunks' gradient sums.

        Args:
            loss_scale: factor of losses in the caller's ``backward``; the chunks' gradients were scaled already.
        """
        sums = self.layers.sums
        # The last layer's hidden states are always part of it, so that backward reaches every weight of the prefixes,
        # and with them every node where offloaded states add their sums.
        states = {LAST_HIDDEN: self.last_hidden} | {
            key: state for key, state in self.layers.held.items() if key in sums
        }
        return _InjectGradient.apply(sums, tuple(states), loss_scale, *states.values())


def cut(state: Tensor, with_graph: bool, sums: GradientSums, key: Key) -> Tensor:
    """The same values; their gradient is added to ``sums`` and goes no further."""
    if not with_graph or not torch.is_grad_enabled():
        return state.detach()
    anchor = torch.zeros((), device=state.device, requires_grad=True)
    return _CollectGradient.apply(anchor, state.detach(), sums, key)


class _CollectGradient(torch.autograd.Function):
    """Identity whose backward adds to a sum and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, state: Tensor, sums: GradientSums, key: Key) -> Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        ctx.sums.add(ctx.key, grad_outputs[0])
        return None, None, None, None


class _AddSum(torch.autograd.Function):
    """Identity whose backward adds the chunks' sum."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, sums: GradientSums, key: Key) -> Tensor:
        ctx.sums, ctx.key = sums, key
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grad_outputs[0]
        left = ctx.sums.pop(ctx.key)
        if left is not None:
            gradient = left.mul_(ctx.sums.factor).add_(gradient).to(gradient.dtype)
        return gradient, None, None


class _InjectGradient(torch.autograd.Function):
    """Zero with given gradients: sum(state * gradient) without its products."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, keys: tuple[Key, ...], loss_scale: float, *states: Tensor) -> Tensor:
        ctx.sums, ctx.keys, ctx.loss_scale = sums, keys, loss_scale
        ctx.shapes = [(state.shape, state.dtype) for state in states]
        return torch.zeros((), device=states[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        # A reference to the loss must not keep the sums alive: in fp32, as large as the prefixes' keys and values.
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("The gradients in PrefixStates were used already; run the prefixes again.")
        sums.factor = grad_outputs[0] / ctx.loss_scale
        results = []
        for key, (shape, dtype) in zip(ctx.keys, ctx.shapes, strict=True):
            left = sums.pop(key)
            if left is None:
                left = torch.zeros(shape, dtype=dtype, device=grad_outputs[0].device)
            results.append(left.mul_(sums.factor).to(dtype))
        return None, None, None, *results


class StreamContext:
    """State shared by all layers of one pass.

    Args:
        prefix_nodes: nodes of the tree that are not in the stream; their states are known.
        share: this sequence rank's share of the stream; None where it has all of it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        kernel: Kernel,
        prefix_nodes: Sequence[int] = (),
        remember: bool = False,
        share: StreamShare | None = None,
    ):
        self.tree, self.kernel, self.share = tree, kernel, share
        self.prefix_nodes = tuple(prefix_nodes)
        self._remember = remember
        self._memos: dict[int, AttentionMemo] = {}
        self._layout: LinearLayout | None = None
        self._wants_gradients = torch.is_grad_enabled()
        # Offloads tensors that recomputations of this pass read; None: they stay on the device.
        self.lane: OffloadLane | None = None
        self.recorder: ForwardRecorder | None = None
        self.recorded: RecordedStream | None = None

    def _check_grad_mode(self) -> None:
        """Raise ModelError in a layer that runs without the gradients that the forward wants.

        Reentrant checkpointing runs a layer without gradients first, and again in backward on detached inputs. A layer
        behind a shared prefix gets part of its inputs through its context; their gradients would reach no weight.
        """
        if self._wants_gradients and not torch.is_grad_enabled():
            raise ModelError(
                "A decoder layer runs without gradients in a forward that wants them. Reentrant checkpointing "
                "(use_reentrant=True) does so, and its gradients would be wrong behind a shared prefix. Enable "
                "checkpointing with use_reentrant=False."
            )

    def keep_keys_values(self, layer_index: int, k: Tensor, v: Tensor) -> None:
        """Called with keys and values [rows, K, H] of all rows in the stream, where one rank has them all."""

    def _own_heads(self, layer_index: int, queries: tuple[Tensor, Division], k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """q (with its rows), k, v of this sequence rank's rows and all heads -> of all rows and its heads."""
        assert self.share is not None
        return rows_to_heads(queries, (k, self.share.rows), (v, self.share.rows))

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        """Called with the linear layers' states at the end of the nodes in the stream."""

    def mix_linear(self, layer_index: int, mixer: Any, hidden: Tensor) -> Tensor:
        self._check_grad_mode()
        out, states = self.mixed(layer_index, mixer, hidden)
        self.keep_states(layer_index, states)
        return out

    def mixed(self, layer_index: int, mixer: Any, hidden: Tensor) -> tuple[Tensor, LinearStates]:
        """A linear-attention layer's output, and its states at the end of the nodes in the stream."""
        if self._layout is None:
            self._layout = LinearLayout(self.tree.lengths, self.tree.parents, self.prefix_nodes, hidden.device)
        known = self._known_states(layer_index)
        return linear_attention_over_tree(mixer, hidden, self._layout, known, self.share)

    def _known_states(self, layer_index: int) -> LinearStates | None:
        return None

    def _memo(self, layer_index: int) -> AttentionMemo | None:
        if self.recorder is not None:
            return RecordingMemo(self.recorder, layer_index)
        if not self._remember or not torch.is_grad_enabled():
            return None
        return self._memos.setdefault(layer_index, AttentionMemo(None if self.lane is None else self.lane.put))


class TreeContext(StreamContext):
    """One packed stream, differentiable.

    Args:
        last_plan: the rows whose hidden states are used; the last layer has queries of these only. None: of all rows.
        remember: store each layer's attention output for the recomputation under checkpointing.
    """

    def __init__(
        self,
        tree: PrefixTree,
        kernel: Kernel,
        last_plan: AttentionPlan | None = None,
        remember: bool = False,
        share: StreamShare | None = None,
    ):
        super().__init__(tree, kernel, remember=remember, share=share)
        self.last_plan = last_plan
        self._full_plan = full_plan(tree)
        self._unread: dict[int, KeysValues] = {}

    def split_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows of this rank that are read off the last layer, and the others."""
        assert self.last_plan is not None
        return (self.share or self.last_plan).split_rows(device)

    def supply_unread(self, layer_index: int, keys_values: KeysValues) -> None:
        """Keys and values [unread rows, K, H] of a layer that runs on the read rows only."""
        self._unread[layer_index] = keys_values

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._check_grad_mode()
        plan, share = self._full_plan, self.share
        rows = share.rows if share is not None else None
        unread = self._unread.get(layer_index)
        if unread is not None:
            assert self.last_plan is not None
            plan = self.last_plan
            rows = share.read if share is not None else None
            whole = partial(_interleave, plan=plan) if share is None else share.interleave
            k, v = (whole(*pair) for pair in ((k, unread[0]), (v, unread[1])))
            # A recomputation needs the values only. The graph references this context (through the checkpointed call),
            # so the context must not reference the graph: a forward without a backward would never be freed.
            self._unread[layer_index] = (unread[0].detach(), unread[1].detach())
        if rows is not None:
            q, k, v = self._own_heads(layer_index, (q, rows), k, v)
        else:
            self.keep_keys_values(layer_index, k, v)
        k, v = self.stored(layer_index, k, v)
        recorded = self.recorded
        memo = self._memo(layer_index) if recorded is None else recorded.memo(layer_index, unread is not None)
        out = grouped_attention(q, k, v, plan, scale, self.kernel, memo)
        return out if rows is None else heads_to_rows(out, rows)

    def stored(self, layer_index: int, k: Tensor, v: Tensor) -> KeysValues:
        """Keys and values [rows, K, H] for attention to use in place of these."""
        return k, v


class PrefixContext(TreeContext):
    """The prefixes alone; every layer's states for the responses go into ``states``, on the graph."""

    def __init__(self, states: StateStore, *args: Any):
        super().__init__(*args)
        self._states: StateStore | None = states
        self._sums = states.sums

    def close(self) -> None:
        """Release the graph; recomputations store nothing from now on."""
        self._states = None

    def recorded_states(self, layer_index: int, first: Tensor, second: Tensor) -> None:
        """States of a layer that runs in backward only."""
        assert self._states is not None
        self._states.recorded |= {(layer_index, 0): first.detach(), (layer_index, 1): second.detach()}

    def stored(self, layer_index: int, k: Tensor, v: Tensor) -> KeysValues:
        if self.recorded is not None:
            return _AddSum.apply(k, self._sums, (layer_index, 0)), _AddSum.apply(v, self._sums, (layer_index, 1))
        # A recomputed layer calls this again; the graph is the first run's.
        return (k, v) if self._states is None else self._states.put(layer_index, k, v)

    def keep_states(self, layer_index: int, states: LinearStates) -> None:
        if self.recorded is not None:
            for number, state in enumerate((states.conv_tail, states.recurrent)):
                # Below the first trained weight a state has no graph.
                if (gradient := self._sums.pop((layer_index, number))) is not None and state.requires_grad:
                    self.recorded.injected.append((state, gradient.mul_(self._sums.factor).to(state.dtype)))
        elif self._states is not None:
            self._states.hold(layer_index, states.conv_tail, states.recurrent)


class ChunkContext(StreamContext):
    """Some responses behind prefixes that have already run: only response rows are in the stream.

    Args:
        tree: prefix nodes and response nodes together.
        plan: queries of all response rows.
        prefix_nodes: indices in ``tree`` of the prefix nodes, in the order in which their states are stored.
        prefix_states: by layer the states that ``PrefixContext`` stored: keys and values of all prefix rows, or states
            per node.
    """

    def __init__(
        self,
        tree: PrefixTree,
        plan: AttentionPlan,
        prefix_nodes: Sequence[int],
        prefix_states: Any,
        kernel: Kernel,
        remember: bool = False,
        share: StreamShare | None = None,
    ):
        super().__init__(tree, kernel, prefix_nodes, remember, share)
        self.plan, self.prefix_states = plan, prefix_states

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._check_grad_mode()
        share = self.share
        if share is not None:
            q, k, v = self._own_heads(layer_index, (q, share.rows), k, v)
        else:
            self.keep_keys_values(layer_index, k, v)
        prefix_k, prefix_v = self.prefix_states[layer_index]
        k, v = (_interleave(own, prefix, self.plan) for own, prefix in ((k, prefix_k), (v, prefix_v)))
        memo = self._memo(layer_index) if self.recorded is None else self.recorded.memo(layer_index, False)
        out = grouped_attention(q, k, v, self.plan, scale, self.kernel, memo)
        return out if share is None else heads_to_rows(out, share.rows)

    def _known_states(self, layer_index: int) -> LinearStates:
        return LinearStates(*self.prefix_states[layer_index])


def _interleave(chosen: Tensor, others: Tensor, plan: AttentionPlan) -> Tensor:
    """Rows with queries and rows without, back in stream order: [queries, ...], [others, ...] -> [T, ...]."""
    if not others.shape[0]:
        return chosen
    rows = plan.rows
    assert rows is not None
    if rows[0] == others.shape[0] and rows[-1] == plan.num_keys - 1:
        return torch.cat([others, chosen])
    return torch.cat([chosen, others])[plan.stream_order(chosen.device)]
