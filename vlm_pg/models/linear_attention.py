"""Gated linear attention (Qwen3.5) over a tree: a node starts from the state its parent ended in.

Such a layer reads a token through a short causal convolution and a recurrent state, so what a response needs of its
prefix is small and of fixed size: the last inputs of the convolution and the state after the last token. Both are
computed once per node and handed to every child, with gradient.

Shape letters: C convolution channels, W convolution width, Hk, Hv key and value heads, dk, dv their sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vlm_pg.distributed import SequenceGroup
from vlm_pg.models.layer_globals import set_forward
from vlm_pg.models.stream_share import StreamShare, heads_of, heads_to_rows, rows_to_heads

# Of the L2 norm of queries and keys, as in transformers and FLA.
NORM_EPSILON = 1e-6
# transformers' (and FLA's) gated delta rule works in chunks of this many tokens and fills the last one up itself; nodes
# with equally many chunks go through it together, so nothing is padded beyond that.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class LinearStates:
    """State at the end of each of n nodes.

    ``conv_tail`` [n, W - 1, C]: last inputs of the convolution. ``recurrent`` fp32 [n, Hv, dk, dv].
    """

    conv_tail: Tensor
    recurrent: Tensor


@dataclass(frozen=True)
class LinearHeads:
    """Heads of a linear-attention layer and their sizes; the convolution's channels are queries, keys, values."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, mixer: Any) -> LinearHeads:
        return cls(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)

    def channels(self, size: int, rank: int) -> Tensor:
        """The convolution's channels of the heads that ``rank`` of ``size`` sequence ranks works on, int64."""
        found, first = [], 0
        keys = (self.key_heads, self.key_size)
        for heads, width in (keys, keys, (self.value_heads, self.value_size)):
            mine = heads_of(heads, size, rank)
            found.append(torch.arange(first + mine.start * width, first + mine.stop * width))
            first += heads * width
        return torch.cat(found)

    def own(self, states: LinearStates, sequence: SequenceGroup) -> LinearStates:
        """This sequence rank's heads of whole states."""
        channels = self.channels(sequence.size, sequence.rank).to(states.conv_tail.device, non_blocking=True)
        mine = heads_of(self.value_heads, sequence.size, sequence.rank)
        return LinearStates(states.conv_tail[..., channels], states.recurrent[:, mine])

    def gathered(self, states: LinearStates, sequence: SequenceGroup) -> LinearStates:
        """Whole states from those of each sequence rank's heads, on all of them."""
        parts = [
            sequence.gather_rows(part.movedim(axis, 0), [part.shape[axis]] * sequence.size, reduce=False)
            for part, axis in ((states.conv_tail, -1), (states.recurrent, 1))
        ]
        channels = torch.cat([self.channels(sequence.size, rank) for rank in range(sequence.size)])
        # Key heads that several ranks have are equal on them.
        everything = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        whole = parts[0].new_empty(everything, *parts[0].shape[1:])
        whole[channels.to(whole.device, non_blocking=True)] = parts[0]
        return LinearStates(whole.movedim(0, -1), parts[1].movedim(0, 1))


@dataclass(frozen=True)
class _Bucket:
    """Nodes of one level with equally many chunks: ``rows`` int64 [nodes, padded length] (T where there is none)."""

    nodes: tuple[int, ...]
    rows: Tensor
    filled: Tensor


class LinearLayout:
    """Rows of a tree's nodes as the linear layers need them; made once per stream.

    Args:
        lengths, parents: the tree's nodes, breadth first.
        known: nodes that are not in the stream because their states are known, in the order of those states.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], known: Sequence[int], device: torch.device):
        self.parents = tuple(parents)
        self.known = {node: index for index, node in enumerate(known)}
        self.present = tuple(node for node in range(len(lengths)) if node not in self.known)
        self.lengths = tuple(lengths)
        sizes = [lengths[node] for node in self.present]
        self.num_rows = sum(sizes)
        self.starts = dict(zip(self.present, (0, *accumulate(sizes)), strict=False))
        self.device = device
        self._conv_indices: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._channels: dict[LinearHeads, Tensor] = {}

    def channels(self, heads: LinearHeads, sequence: SequenceGroup) -> Tensor:
        """``LinearHeads.channels`` of this process, on the device; a stream belongs to one sequence group."""
        if heads not in self._channels:
            here = heads.channels(sequence.size, sequence.rank)
            self._channels[heads] = here.to(self.device, non_blocking=True)
        return self._channels[heads]

    def conv_indices(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """How the convolution's input is laid out, as indices into (one zero row, known tails, stream rows).

        Returns:
            The input: before each node the ``width - 1`` inputs that precede it on its path.
            For each stream row its index in the convolution's output.
            For each present node the last ``width - 1`` inputs up to its end, [present, width - 1].
        """
        if width not in self._conv_indices:
            tail = width - 1
            first_row = 1 + len(self.known) * tail
            ends = {node: list(range(1 + i * tail, 1 + (i + 1) * tail)) for node, i in self.known.items()}
            source: list[int] = []
            outputs: list[int] = []
            for node in self.present:
                parent = self.parents[node]
                before = ends[parent] if parent >= 0 else [0] * tail
                start = first_row + self.starts[node]
                rows = list(range(start, start + self.lengths[node]))
                outputs.extend(range(len(source), len(source) + len(rows)))
                source.extend(before + rows)
                ends[node] = (before + rows)[-tail:]
            tails = [ends[node] for node in self.present]
            self._conv_indices[width] = self._to_device(source), self._to_device(outputs), self._to_device(tails)
        return self._conv_indices[width]

    @cached_property
    def levels(self) -> list[list[_Bucket]]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        buckets: dict[tuple[int, int], list[int]] = {}
        for node in self.present:
            buckets.setdefault((depths[node], -(-self.lengths[node] // CHUNK_TOKENS)), []).append(node)
        levels: list[list[_Bucket]] = [[] for _ in range(max(depths) + 1)]
        for (depth, chunks), nodes in sorted(buckets.items()):
            length = max(self.lengths[node] for node in nodes) if chunks == 1 else chunks * CHUNK_TOKENS
            rows = np.full((len(nodes), length), self.num_rows)
            for row, node in zip(rows, nodes, strict=True):
                row[: self.lengths[node]] = np.arange(self.lengths[node]) + self.starts[node]
            filled = np.flatnonzero(rows < self.num_rows)
            levels[depth].append(_Bucket(tuple(nodes), self._to_device(rows), self._to_device(filled)))
        return levels

    def _to_device(self, indices: Any) -> Tensor:
        """int64, copied without a synchronization."""
        return torch.from_numpy(np.asarray(indices, dtype=np.int64)).to(self.device, non_blocking=True)

    @cached_property
    def back_to_stream(self) -> Tensor:
        """Order that brings the buckets' filled rows, one bucket after the other, back into stream order."""
        rows = [bucket.rows.flatten()[bucket.filled] for level in self.levels for bucket in level]
        return torch.cat(rows).argsort()


def linear_attention_over_tree(
    mixer: Any,
    hidden: Tensor,
    layout: LinearLayout,
    known: LinearStates | None = None,
    share: StreamShare | None = None,
) -> tuple[Tensor, LinearStates]:
    """transformers' gated delta layer with every node continuing its parent.

    Args:
        mixer: transformers' ``Qwen3_5GatedDeltaNet`` or its mixture-of-experts twin.
        hidden: [rows, D], the present nodes' tokens in stream order.
        layout: the tree.
        known: states of ``layout.known``.
        share: this sequence rank's share of the stream: its rows of ``hidden``, and of the states its heads.

    Returns:
        [rows, D], and the states at the end of the present nodes.
    """
    qkv = mixer.in_proj_qkv(hidden)
    beta = mixer.in_proj_b(hidden).sigmoid()
    decay = -mixer.A_log.float().exp() * F.softplus(mixer.in_proj_a(hidden).float() + mixer.dt_bias)
    channels, value_dim = None, mixer.value_dim
    if share is not None:
        qkv, decay, beta = _all_rows(mixer, qkv, decay, beta, share)
        sequence = share.rows.sequence
        channels = layout.channels(LinearHeads.of(mixer), sequence)
        value_dim = decay.shape[1] * mixer.head_v_dim
    rows = qkv.shape[0]
    qkv, conv_tail = _convolution(mixer, qkv, layout, known, channels)
    key_dim = (qkv.shape[1] - value_dim) // 2
    query, key, value = qkv.split([key_dim, key_dim, value_dim], dim=-1)
    value = value.reshape(rows, -1, mixer.head_v_dim)
    query, key = (per_value_head(x.reshape(rows, -1, mixer.head_k_dim), value.shape[1]) for x in (query, key))
    core, recurrent = _delta_rule(mixer, (query, key, value, decay, beta), layout, known)
    if share is not None:
        core = heads_to_rows(core, share.rows)
    z = mixer.in_proj_z(hidden).reshape(-1, mixer.head_v_dim)
    normed = mixer.norm(core.reshape(-1, mixer.head_v_dim), z).reshape(hidden.shape[0], -1)
    return mixer.out_proj(normed), LinearStates(conv_tail, recurrent)


def _all_rows(
    mixer: Any, qkv: Tensor, decay: Tensor, beta: Tensor, share: StreamShare
) -> tuple[Tensor, Tensor, Tensor]:
    """Of this sequence rank's rows and all heads -> of all rows and its heads; [rows, C], [rows, Hv], [rows, Hv]."""
    key_dim, rows = mixer.key_dim, share.rows
    query, key, value = qkv.split([key_dim, key_dim, mixer.value_dim], dim=-1)
    query, key = (x.unflatten(-1, (-1, mixer.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, mixer.head_v_dim))
    parts = rows_to_heads(*((x, rows) for x in (query, key, value, decay[..., None], beta[..., None])))
    return torch.cat([x.flatten(1) for x in parts[:3]], dim=-1), parts[3][..., 0], parts[4][..., 0]


def per_value_head(heads: Tensor, value_heads: int) -> Tensor:
    """[..., Hk, dk] -> [..., Hv, dk]: each key head serves consecutive value heads. transformers' rule does this itself
    in some releases and leaves it to the caller in others; heads repeated beforehand are right for both."""
    return heads.repeat_interleave(value_heads // heads.shape[-2], dim=-2)


def _convolution(
    mixer: Any, qkv: Tensor, layout: LinearLayout, known: LinearStates | None, channels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution along every path: [rows, C] -> [rows, C], and the nodes' tails.

    ``channels``: which of the layer's channels these are; None for all.
    """
    from transformers.activations import ACT2FN

    width = mixer.conv1d.kernel_size[0]
    source, outputs, tails = layout.conv_indices(width)
    known_tails = [] if known is None else [known.conv_tail.flatten(0, 1)]
    inputs = torch.cat([qkv.new_zeros(1, qkv.shape[1]), *known_tails, qkv])
    stream = inputs[source].to(mixer.conv1d.weight.dtype).transpose(0, 1)[None]
    # Called as a module, so that hooks that gather sharded weights run; its own zero padding (width - 1) is cut off.
    convolved = mixer.conv1d(stream) if channels is None else mixer.conv1d(stream, channels)
    out = convolved[0, :, width - 1 : stream.shape[-1]].transpose(0, 1)
    return ACT2FN[mixer.activation](out[outputs]).to(qkv.dtype), inputs[tails]


def _delta_rule(
    mixer: Any, inputs: tuple[Tensor, ...], layout: LinearLayout, known: LinearStates | None
) -> tuple[Tensor, Tensor]:
    """The recurrence level by level: [rows, Hv, dv] and the present nodes' last states [present, Hv, dk, dv]."""
    padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs]
    # transformers' own function: a fused kernel where one is installed, else its torch code.
    own_rule = getattr(mixer, "chunk_gated_delta_rule", None)
    chunk_rule = own_rule or sys.modules[type(mixer).__module__].torch_chunk_gated_delta_rule
    states: dict[int, Tensor] = {}
    if known is not None:
        states.update({node: known.recurrent[index] for node, index in layout.known.items()})
    outputs = []
    for level in layout.levels:
        for bucket in level:
            query, key, value, decay, beta = (x[bucket.rows] for x in padded)
            parents = [layout.parents[node] for node in bucket.nodes]
            initial = torch.stack([states[parent] for parent in parents]) if parents[0] >= 0 else None
            # A padded token has beta 0 and decay 1: the state does not change.
            options = {"initial_state": initial, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            out, last = chunk_rule(query, key, value, g=decay, beta=beta, **options)
            states.update(zip(bucket.nodes, last.unbind(), strict=True))
            outputs.append(out.flatten(0, 1)[bucket.filled])
    core = torch.cat(outputs)[layout.back_to_stream]
    return core, torch.stack([states[node] for node in layout.present])


def route_linear_layers(language_model: torch.nn.Module) -> None:
    """Route linear-attention layers to the call's ``attention_context``; without one they stay transformers' own."""
    mixer: Any
    for mixer in language_model.modules():
        if hasattr(mixer, "in_proj_qkv") and hasattr(mixer, "conv1d") and not hasattr(mixer, "vlm_pg_routed"):
            set_forward(mixer, _forward)
            set_forward(mixer.conv1d, _conv_forward)
            mixer.vlm_pg_routed = True


def _conv_forward(self: Any, stream: Tensor, channels: Tensor | None = None, padded: bool = True) -> Tensor:
    """The depthwise convolution, of some channels or without padding if so chosen: through a call of the module, so
    that hooks that gather sharded weights run."""
    if channels is None and padded:
        return type(self).forward(self, stream)
    weight, bias = self.weight, self.bias
    if channels is not None:
        weight, bias = weight[channels], None if bias is None else bias[channels]
    return F.conv1d(stream, weight, bias, padding=self.padding if padded else 0, groups=len(weight))


def _forward(self: Any, hidden_states: Tensor, *args: Any, attention_context: Any = None, **kwargs: Any) -> Tensor:
    if attention_context is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    return attention_context.mix_linear(int(self.layer_idx), self, hidden_states.squeeze(0))[None]
