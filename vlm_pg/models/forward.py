"""Forward passes of packed batches: hidden states and log-probabilities, with every sequence rank on its share.

Groups beyond memory: the prefixes run once, responses follow in chunks, one backward goes through the prefixes.
Exact: d loss / d weights = (d loss / d states)(d states / d weights) plus the chunks' own part, with the states of
``PrefixStates``. Memory is one prefix and one chunk, whatever the number of responses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlm_pg.attention.plan import reading_plan
from vlm_pg.attention.registration import AttentionContext
from vlm_pg.models.contexts import ChunkContext, PrefixContext
from vlm_pg.models.network import Network, check_features
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch
from vlm_pg.models.prefix_states import PrefixStates, StateStore
from vlm_pg.models.stream_share import StreamShare

Batch = PackedBatch | PrefixBatch | ChunkBatch


class Rows(NamedTuple):
    """What layers run on: ``input_ids`` int64 [T], ``positions_3T`` int64 [3, T], ``media_rows`` int64 [M] that take
    ``features`` [M, ...], and those on the host."""

    input_ids: Tensor
    positions_3T: Tensor
    media_rows: Tensor | None
    features: Tensor | None
    media_rows_on_host: np.ndarray | None


def read_hidden(
    network: Network,
    batch: Batch,
    context: AttentionContext,
    features: Tensor | None = None,
    whole_layers: bool = False,
) -> Tensor:
    """As ``hidden_of_rows``, of a packed batch.

    Args:
        features: of the groups, joined group by group: media that groups share enter the stream once.
    """
    media_rows = on_host = None
    if not isinstance(batch, ChunkBatch):
        media_rows, on_host = batch.media_rows, batch.media_rows_on_host
        if features is not None and batch.feature_rows is not None:
            features = features[batch.feature_rows]
    rows = Rows(batch.input_ids, batch.positions_3T, media_rows, features, on_host)
    return hidden_of_rows(network, rows, context, batch.share, whole_layers)


def hidden_of_rows(
    network: Network, rows: Rows, context: AttentionContext, share: StreamShare | None, whole_layers: bool = False
) -> Tensor:
    """Last hidden states [rows read, D] of the rows that this rank computes.

    Args:
        whole_layers: as ``Network.run_layers``.
    """
    ids, positions, media_rows, features, on_host = rows
    if share is None:
        return network.hidden_states(ids, positions, context, features, media_rows, whole_layers)
    if features is not None and media_rows is not None:
        check_features(media_rows, features)
        assert on_host is not None
        media_rows, features = share.media(on_host, features)
    own_ids, own_positions = share.rows.take(ids), share.rows.take(positions, dim=1)
    if not len(own_ids):
        own_ids, own_positions = ids[:1], positions[:, :1]
    return network.hidden_states(own_ids, own_positions, context, features, media_rows, whole_layers)[: share.num_read]


def target_logprobs(
    network: Network, batch: PackedBatch | ChunkBatch, hidden: Tensor, temperature: float, entropy_graph: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities fp32 [R] of all targets and entropies, on every sequence rank.

    Each rank's output head works on what its own rows predict. Losses need whole responses, and all ranks compute the
    same one; so each sends its own rows the gradient of its own targets.

    Args:
        hidden: [rows read, D], of this rank.
    """
    if batch.share is None:
        chosen, stream_rows = hidden[batch.predict_rows], len(batch.input_ids)
        return network.token_logprobs(chosen, batch.targets, temperature, entropy_graph, stream_rows)
    targets, rows = batch.share.predictions(batch.predict_rows_on_host)
    mine = network.token_logprobs(
        hidden[rows.on(hidden.device)],
        targets.take(batch.targets),
        temperature,
        entropy_graph,
        len(batch.share.rows.mine),
    )
    logprobs, entropies = (targets.gather(values) for values in mine)
    return logprobs, entropies


def run_prefixes(network: Network, batch: PrefixBatch, features: Tensor | None) -> PrefixStates:
    """The prefixes of some groups through the model once."""
    states = StateStore(network.stream_memory.prefix_target if network.checkpointing else None)
    context = PrefixContext(
        states,
        batch.tree,
        network.kernel_here,
        reading_plan(batch.tree, batch.reads),
        network.checkpointing,
        batch.share,
    )
    hidden = read_hidden(network, batch, context, features)
    context.close()
    return PrefixStates(hidden, states)


def run_chunk(
    network: Network, batch: ChunkBatch, states: PrefixStates, temperature: float = 1.0, entropy_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities fp32 [R] of the chunk's response tokens and entropies, as ``Policy.forward`` gives them."""
    hidden = last_hidden = states.last_hidden_for_chunk()
    if batch.input_ids.shape[0]:
        context = ChunkContext(
            batch.tree,
            reading_plan(batch.tree, batch.reads),
            batch.node_of_prefix,
            states.layers,
            network.kernel_here,
            network.checkpointing,
            batch.share,
        )
        hidden = torch.cat([last_hidden, read_hidden(network, batch, context)])
    return target_logprobs(network, batch, hidden, temperature, entropy_graph)


def run_back(network: Network, states: PrefixStates, loss_scale: float, every_weight: bool) -> Tensor:
    """``states.surrogate_loss``; with ``every_weight`` its backward also reaches an untied output head, with zeros."""
    loss = states.surrogate_loss(loss_scale)
    head = network.model.lm_head
    tied = getattr(head, "weight", None) is network.model.get_input_embeddings().weight
    if every_weight and not tied and any(parameter.requires_grad for parameter in head.parameters()):
        loss = loss + network.logits(states.last_hidden.detach()[:1]).float().sum() * 0.0
    return loss
