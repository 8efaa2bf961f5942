"""Streams shared out over sequence ranks against the same streams whole: python -m ... CASES, on several ranks.

Each rank computes the whole by itself first. Prints a line of JSON a case: the largest relative errors over ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.test_prefix_run import SHAPES, gradients, weight
from tests.support.groups import make_case, random_group, tiny_policy
from vlm_pg.batching.plan import MicroBatch, Piece, chunk_responses
from vlm_pg.distributed import BY_ITSELF, RankLayout, SequenceGroup, end_rank, max_over_ranks
from vlm_pg.models.chunked import Streams, micro_batch_losses, pack_chunks, pack_whole, shared_out
from vlm_pg.models.policy import Policy
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import ResponseGroup

CPU = torch.device("cpu")


def streams_of(policy: Policy, groups: list[ResponseGroup], chunked: bool) -> tuple[Streams, list[Any]]:
    lengths = [[len(response) - 1 for response in group.responses] for group in groups]
    everything = [tuple(Piece(place, tuple(range(len(of_group)))) for place, of_group in enumerate(lengths))]
    if not chunked:
        return pack_whole(policy, groups), everything
    chunks = chunk_responses(lengths, range(len(groups)), 12)
    return pack_chunks(policy, groups, MicroBatch(tuple(chunks))), chunks


def run(
    policy: Policy, groups: list[ResponseGroup], chunked: bool, sequence: SequenceGroup
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, gradients of this process, and the last pass's entropies."""
    policy.zero_grad()
    policy.vision.weights_changed()
    features = StepFeatures(policy, [group.prompt for group in groups], sequence)
    streams, chunks = streams_of(policy, groups, chunked)
    seen: list[torch.Tensor] = []

    def loss_of(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        seen.append(entropies)
        by_piece = [(piece.group, i) for piece in chunks[number] for i in piece.responses]
        values = [value for of_group in streams.passes[number].split(logprobs) for value in of_group]
        loss = sum((weight(g, i, len(v)) * v).sum() for (g, i), v in zip(by_piece, values, strict=True))
        return loss + 0.1 * entropies.sum()

    joined, tower = features.joined()
    total = 0.0
    leaves = features.features
    every = 1 if not chunked else len(streams.passes) + 1
    chosen = joined
    losses = micro_batch_losses(
        policy, shared_out(streams, sequence), policy.join_features(groups, chosen), loss_of, 0.7, entropy_graph=True
    )
    for number, loss in enumerate(losses, start=1):
        whole = loss if tower is None or number < every else loss + tower
        whole.backward()
        total += float(loss.detach())
    assert leaves is not None
    return total, gradients(policy), torch.cat(seen)


def errors_of(case: dict[str, Any], sequence: SequenceGroup) -> dict[str, float]:
    settings = {name: case[name] for name in ("train_vision", "gradient_checkpointing") if name in case}
    policy = tiny_policy(family=case["family"], **settings)
    shapes = {kind: lengths for kind, lengths in SHAPES.items() if policy.family.reads_media or kind == "text"}
    groups = [
        random_group(policy, make_case(policy, kind, seed=i), lengths, seed=i)
        for i, (kind, lengths) in enumerate(shapes.items())
    ]
    policy.logits_chunk_rows = 7
    expected = run(policy, groups, case["chunked"], BY_ITSELF)
    got = run(policy, groups, case["chunked"], sequence)
    errors = {
        "loss": abs(got[0] - expected[0]) / max(1.0, abs(expected[0])),
        "entropy": float((got[2] - expected[2]).detach().abs().max()),
    }
    for name, reference in expected[1].items():
        total = got[1].get(name, torch.zeros_like(reference)).clone()
        dist.all_reduce(total)
        errors[name] = float((total - reference).norm() / reference.norm().clamp_min(1e-4))
    return errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = RankLayout.here(dist.get_world_size())
    sequence = SequenceGroup.of(ranks)
    for case in json.loads(sys.argv[1]):
        errors = errors_of(case, sequence)
        worst = max(errors, key=lambda name: errors[name])
        largest = max_over_ranks({"error": errors[worst]}, CPU)["error"]
        if ranks.is_first:
            print(json.dumps({"case": case, "error": largest, "where": worst, "weights": len(errors)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    end_rank(0)
