"""Streams shared out over sequence ranks against the same streams whole: python -m ... CASES, on several ranks.

Each rank computes the whole by itself first. Prints a line of JSON a case: the largest relative errors over ranks.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.test_long_streams import CHUNKED
from tests.support.groups import chunk_loss, random_groups, tiny_policy, token_weights
from tests.support.ranks import run_cases
from vlm_pg.batching.plan import MicroBatch, Piece, chunk_responses
from vlm_pg.distributed import SINGLE_SP_RANK, RankLayout, SequenceGroup, max_over_ranks
from vlm_pg.models.micro_batches import Streams, backward_in_chunks, pack_micro_batch, run_micro_batch
from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import ForwardBudget
from vlm_pg.models.stream_memory import MemoryChoice
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.training.step_features import StepFeatures
from vlm_pg.types import ResponseGroup

CPU = torch.device("cpu")
CHUNK = 12  # tokens of responses
# Gradients whose terms cancel: in one process, whole passes and chunks of the same groups already differ in these of
# Qwen3.5 by 0.7e-5 of the norm, and by at most 0.33e-5 in all others. They are given three times as much as others.
CANCELLING = ("linear_attn.dt_bias", "linear_attn.A_log")
TOKEN_FIELDS = ("input_ids", "mm_token_type_ids", "positions_3P")


# Fewer tokens than ranks: some ranks have nothing to compute, and all the same exchanges to make.
SMALL = {"text": [2, 1]}


def groups_of(policy: Policy, small: bool) -> list[ResponseGroup]:
    shapes = SMALL if small else CHUNKED
    kinds = [kind for kind in shapes if policy.family.reads_media or kind == "text"]
    groups = random_groups(policy, [(kind, shapes[kind]) for kind in kinds])
    if not small:
        return groups
    prompt = groups[0].prompt
    cut = replace(prompt, **{name: getattr(prompt, name)[..., :2] for name in TOKEN_FIELDS})
    return [ResponseGroup(cut, groups[0].responses)]


def recorded_groups(policy: Policy, groups: list[ResponseGroup], sequence: SequenceGroup) -> list[ResponseGroup]:
    """Rollouts of these prompts with their forward; ranks hold that of every other group."""
    longest = max(len(response) for group in groups for response in group.responses)
    settings = RolloutSettings(num_generations=3, max_new_tokens=longest, temperature=0.7)
    engine = RolloutEngine(policy, settings, 0, forwards=[ForwardBudget(2**31, policy.recorded_bytes())])
    found = []
    for number, rollouts in enumerate(engine.generate([group.prompt for group in groups], 1)):
        forwards = [rollout.forward for rollout in rollouts]
        if number % sequence.size != sequence.rank:
            forwards = pickle.loads(pickle.dumps(forwards))  # as they come from another rank
        assert all(forwards)
        responses = tuple(rollout.token_ids for rollout in rollouts)
        found.append(ResponseGroup(groups[number].prompt, responses, tuple(forwards)))
    return found


def streams_of(
    policy: Policy, groups: list[ResponseGroup], chunked: bool, sequence: SequenceGroup
) -> tuple[Streams, list[tuple[Piece, ...]]]:
    lengths = [[len(response) - 1 for response in group.responses] for group in groups]
    if not chunked:
        everything = tuple(Piece(index, tuple(range(len(of_group)))) for index, of_group in enumerate(lengths))
        return pack_micro_batch(policy, groups, sequence=sequence), [everything]
    chunks = chunk_responses(lengths, range(len(groups)), CHUNK)
    return pack_micro_batch(policy, groups, MicroBatch(tuple(chunks)), len(chunks), sequence), chunks


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@dataclass
class Result:
    """``gradients`` are this process's."""

    loss: float
    entropies: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run(policy: Policy, groups: list[ResponseGroup], chunked: bool, sequence: SequenceGroup) -> Result:
    policy.zero_grad()
    policy.vision.weights_changed()
    streams, chunks = streams_of(policy, groups, chunked, sequence)
    assert streams.num_recorded == (streams.num_tokens(len(chunks)) if groups[0].forwards else 0)
    seen: list[torch.Tensor] = []

    def loss_of(number: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
        seen.append(entropies.detach())
        responses = [(piece.group, i) for piece in chunks[number] for i in piece.responses]
        values = [value for of_group in streams.passes[number].split(logprobs) for value in of_group]
        parts = [token_weights(g, i, len(v)) @ v for (g, i), v in zip(responses, values, strict=True)]
        return torch.stack(parts).sum() + 0.1 * entropies.sum()

    vision = StepFeatures(policy, [group.prompt for group in groups], sequence)
    tower = vision.connect()
    joined = policy.join_features(groups, [vision.connected(prompt.features) for prompt in vision.prompts])
    calls = 1 if streams.prefixes is None else len(streams.passes) + 1
    losses: list[float] = []

    def backward(loss: torch.Tensor) -> None:
        losses.append(float(loss.detach()))
        (loss if tower is None or len(losses) < calls else loss + tower).backward()

    run_micro_batch(policy, streams, joined, loss_of, backward, 0.7, entropy_graph=True)
    return Result(sum(losses), torch.cat(seen), gradients(policy))


def run_library(policy: Policy, groups: list[ResponseGroup], chunked: bool, sequence: SequenceGroup) -> Result:
    """By the one call for users of the library, without entropies."""
    policy.zero_grad()
    policy.vision.weights_changed()
    tokens = CHUNK if chunked else None
    loss = backward_in_chunks(policy, groups, chunk_loss, tokens, temperature=0.7, sequence=sequence)
    return Result(float(loss), torch.zeros(1), gradients(policy))


def errors_of(case: dict[str, Any], sequence: SequenceGroup) -> dict[str, float]:
    """Relative errors of loss, entropies and the gradients summed over ranks; a third of ``CANCELLING`` ones."""
    policy = tiny_policy(
        family=case["family"], train_vision=case["train_vision"], gradient_checkpointing=case["checkpointing"]
    )
    if case.get("lora"):
        policy = tiny_policy(family=case["family"], lora={"rank": 4}, gradient_checkpointing=case["checkpointing"])
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # zero at the start
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    policy.logits_chunk_rows = 7
    groups = groups_of(policy, case.get("small", False))
    make = run_library if case.get("library") else run
    policy.use_memory(MemoryChoice(mlp_tile_rows=case.get("tiles", 0)))
    of_all = groups
    if case.get("recorded"):
        groups = recorded_groups(policy, groups, sequence)
        of_all = [replace(group, forwards=()) for group in groups]
    whole = make(policy, of_all, case["chunked"], SINGLE_SP_RANK)
    shared = make(policy, groups, case["chunked"], sequence)
    errors = {
        "loss": abs(shared.loss - whole.loss) / max(1.0, abs(whole.loss)),
        "entropies": float((shared.entropies - whole.entropies).abs().max()),
    }
    for name, expected in whole.gradients.items():
        total = shared.gradients[name].clone()
        dist.all_reduce(total)
        error = float((total - expected).norm() / expected.norm().clamp_min(1e-4))
        errors[name] = error / 3 if name.endswith(CANCELLING) else error
    return errors


def run_case(case: dict[str, Any], ranks: RankLayout, sequence: SequenceGroup) -> None:
    errors = errors_of(case, sequence)
    worst = max(errors, key=lambda name: errors[name])
    largest = max_over_ranks({"error": errors[worst]}, CPU)["error"]
    if ranks.is_rank0:
        print(json.dumps({"case": case, "error": largest, "where": worst, "weights": len(errors)}), flush=True)


if __name__ == "__main__":
    run_cases(run_case)
