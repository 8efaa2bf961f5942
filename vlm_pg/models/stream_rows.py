"""What each sequence rank puts into the layers of a packed stream, and the log-probabilities of what comes out."""

from __future__ import annotations

import torch

from vlm_pg.attention.registration import AttentionContext
from vlm_pg.models.network import Network, check_features
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch

Batch = PackedBatch | PrefixBatch | ChunkBatch


def read_hidden(
    network: Network,
    batch: Batch,
    context: AttentionContext,
    features: torch.Tensor | None = None,
    whole_layers: bool = False,
) -> torch.Tensor:
    """Last hidden states [rows read, D] of the rows that this rank computes.

    Args:
        features: of the groups, joined group by group: media that groups share enter the stream once.
        whole_layers: as ``Network.run_layers``.
    """
    media_rows = None
    if not isinstance(batch, ChunkBatch):
        media_rows = batch.media_rows
        if features is not None and batch.feature_rows is not None:
            features = features[batch.feature_rows]
    share = batch.share
    if share is None:
        stream = (batch.input_ids, batch.positions_3T, context, features, media_rows, whole_layers)
        return network.hidden_states(*stream)
    if features is not None and media_rows is not None:
        check_features(media_rows, features)
        media_rows, features = share.media(media_rows, features)
    ids, positions = share.rows.take(batch.input_ids), share.rows.take(batch.positions_3T, dim=1)
    if not len(ids):
        ids, positions = batch.input_ids[:1], batch.positions_3T[:, :1]
    return network.hidden_states(ids, positions, context, features, media_rows, whole_layers)[: share.num_read]


def target_logprobs(
    network: Network, batch: PackedBatch | ChunkBatch, hidden: torch.Tensor, temperature: float, entropy_graph: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities fp32 [R] of all targets and entropies, on every sequence rank.

    Each rank's output head works on what its own rows predict. Losses need whole responses, and all ranks compute the
    same one; so each sends its own rows the gradient of its own targets.

    Args:
        hidden: [rows read, D], of this rank.
    """
    if batch.share is None:
        return network.token_logprobs(hidden[batch.predict_rows], batch.targets, temperature, entropy_graph)
    targets, rows = batch.share.predictions(batch.predict_rows)
    mine = network.token_logprobs(hidden[rows], targets.take(batch.targets), temperature, entropy_graph)
    logprobs, entropies = (targets.gather(values) for values in mine)
    return logprobs, entropies
