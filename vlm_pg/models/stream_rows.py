"""What goes into the layers of a packed stream, and log-probabilities read off what comes out, on each sequence rank."""

from __future__ import annotations

import torch

from vlm_pg.models.network import Network
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def own_rows(batch: PackedBatch | PrefixBatch | ChunkBatch, features: torch.Tensor | None = None) -> Rows:
    """Ids [t], positions [3, t], features [m, ...] and the rows that take them [m] of what this rank computes.

    Args:
        features: of the groups, joined group by group: media that groups share enter the stream once.
    """
    media_rows = None if isinstance(batch, ChunkBatch) else batch.media_rows
    if features is not None and not isinstance(batch, ChunkBatch) and batch.feature_rows is not None:
        features = features[batch.feature_rows]
    share = batch.share
    if share is None:
        return batch.input_ids, batch.positions_3T, features, media_rows
    if features is not None and media_rows is not None:
        if len(features) != len(media_rows):
            raise ValueError(
                f"The stream has {len(media_rows)} media tokens but {len(features)} visual features; prompt and pixels "
                "do not belong together."
            )
        media_rows, features = share.media(media_rows, features)
    return share.rows.take(batch.input_ids), share.rows.take(batch.positions_3T, dim=1), features, media_rows


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
