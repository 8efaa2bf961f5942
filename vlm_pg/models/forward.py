"""Hidden states and log-probabilities of packed batches, with every sequence rank on its share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vlm_pg.attention.registration import AttentionContext
from vlm_pg.models.network import Network, check_features
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch
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
