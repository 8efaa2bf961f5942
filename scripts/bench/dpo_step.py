"""Optimizer steps on preference pairs: the reference's forward, then the policy's update; TRL's ``DPOTrainer`` too.

    python -m scripts.bench.dpo_step --threads 1 --points 2048,4,64

Point P,N,R: N pairs, each on its own prompt of P tokens with an image, chosen and rejected response of R tokens. The
reference is a second model of the same size; both have frozen stub towers. TRL reads the same tokens and pixels from a
collator that returns what its own for images does. Loss and gradient norm are compared before anything is timed.
Counted are rows that enter the language models' first layers, also of a distillation step on the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch

from scripts.bench import run, sft_step
from scripts.bench.grpo_step import word_tokenizer
from scripts.bench.sft_step import FRAME_TOKENS, QUESTION_TOKENS, TRAINING, Steps, SupervisedCase, SupervisedRun
from vlm_pg.algorithms.losses import no_loss, preference
from vlm_pg.algorithms.settings import AlgorithmSettings, DistillationSettings, PreferenceSettings
from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import SPECIAL_IDS, Spec, best_attention, random_model, set_attention
from vlm_pg.bench.runner import Contestant
from vlm_pg.bench.work import StepPoint, parse_points, repeated_work, shared_work
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.rollout.scoring import PolicyScorer, TeacherScorer
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.groups import Update
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Rollout, RolloutGroup, Sample

PREFERENCE, DISTILLATION = PreferenceSettings(reference="bench"), DistillationSettings(teacher="bench")
# Rollouts to a prompt of the distillation step, sampled before.
ROLLOUTS = 4
_HERE = "scripts.bench.dpo_step"
CONTESTANTS = {
    "ours": Contestant("ours, all pairs in one pass", shared_work, f"{_HERE}:OURS"),
    "ours-pair-by-pair": Contestant("ours, token budgets for one pair", shared_work, f"{_HERE}:PAIR_BY_PAIR"),
    "trl": Contestant("TRL's DPOTrainer, all pairs in one batch", repeated_work, f"{_HERE}:TRL", "trl"),
    "trl-answer-logits": Contestant(
        "the same with logits of responses only, as it does on GPUs", repeated_work, f"{_HERE}:TRL_ANSWERS", "trl"
    ),
    "trl-pair-by-pair": Contestant(
        "the same, the gradients of batches of one pair accumulated", repeated_work, f"{_HERE}:TRL_PAIR_BY_PAIR", "trl"
    ),
}


@dataclass(frozen=True)
class PairCase(SupervisedCase):
    """Groups have two rollouts, chosen and rejected."""

    reference: Policy

    @classmethod
    def build(cls, spec: Spec) -> Self:
        size, dtype, checkpointing = spec["model"], spec["dtype"], spec["checkpointing"]
        settings = ModelSettings(path=size, dtype=dtype, gradient_checkpointing=checkpointing, vision_cache_mb=0)
        models = [random_model(size, seed, spec["device"], DTYPES[dtype], sft_step.TOWER) for seed in (0, 1)]
        policy, reference = (make_policy(model, None, settings) for model in models)
        point = StepPoint(spec["prefix"], spec["generations"], spec["response"])
        return cls.of_pairs(policy, reference.requires_grad_(False), point)

    @classmethod
    def of_pairs(cls, policy: Policy, reference: Policy, point: StepPoint) -> Self:
        """Random tokens and pixels."""
        draw = torch.Generator().manual_seed(0)
        groups = []
        for index in range(point.generations):
            prompt = prompt_from_processor(_prompt(policy, point.prefix, draw), policy.positions, str(index))
            answers = torch.randint(0, policy.vocab_size - SPECIAL_IDS, (2, point.response), generator=draw)
            rollouts = tuple(Rollout(answer, torch.zeros(point.response), "stop") for answer in answers)
            sample = Sample(str(index), "?", (), (), "A", "exact", "bench", "bench")
            groups.append(RolloutGroup(sample, prompt, rollouts, 0, advantages=(1.0, 1.0), order=index, is_pair=True))
        weights = tuple(weight.detach().clone() for weight in sft_step.trained_weights(policy.model))
        return cls(policy, tuple(groups), 1, weights, reference)

    def tiny(self) -> Self:
        return self.of_pairs(self.policy, self.reference, StepPoint(2 * FRAME_TOKENS, 2, 3))

    def run(self, contestant: Any) -> Steps:
        with _rows(self.policy) as of_policy, _rows(self.reference) as of_reference:
            steps = super().run(contestant)
        steps[-1] |= {"policy_rows": sum(of_policy), "reference_rows": sum(of_reference)}
        return steps

    def outcome(self, result: Steps) -> dict[str, float]:
        return {key: value for key, value in result[-1].items() if "seconds" not in key}

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        found = super().agreement(outcomes, dtype)
        last = self.run(partial(_ours, distills=True))[-1]
        of_both = {f"distillation_{key}": last[key] for key in ("policy_rows", "reference_rows")}
        return found | {"ours": found["ours"] | of_both}

    def set_attention(self, name: str) -> None:
        """Of both models."""
        set_attention(self, name)
        set_attention(replace(self, policy=self.reference), name)


def _prompt(policy: Policy, prefix: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """What a processor returns: all but 64 to 127 tokens are an image, before the question."""
    ids = torch.randint(0, policy.vocab_size - SPECIAL_IDS, (prefix,), generator=draw)
    config, vision, height = policy.model.config, policy.model.config.vision_config, prefix // FRAME_TOKENS - 1
    end = prefix - QUESTION_TOKENS - 1
    start = end - height * FRAME_TOKENS
    ids[start:end] = config.image_token_id
    ids[start - 1], ids[end] = config.vision_start_token_id, config.vision_end_token_id
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, 2 * height, 2 * FRAME_TOKENS]])
    pixels = torch.randn(int(grid.prod()), width, generator=draw)
    types = (ids == config.image_token_id).long()
    both = {"input_ids": ids[None], "mm_token_type_ids": types[None]}
    return both | {"pixel_values": pixels, "image_grid_thw": grid}


@contextmanager
def _rows(policy: Policy) -> Iterator[list[int]]:
    """Rows that enter its first layer, of each pass."""
    rows: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows.append((args[0] if args else kwargs["hidden_states"])[..., 0].numel())

    hook = policy.language_model.layers[0].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield rows
    finally:
        hook.remove()


def _ours(case: PairCase, in_one: bool = True, distills: bool = False) -> Steps:
    """``distills``: ``ROLLOUTS`` rollouts to each prompt, the reference is the teacher."""
    case.set_attention(ATTENTION_NAME)
    groups, algorithm = case.groups, AlgorithmSettings(loss_average="token_mean" if distills else "sequence_sum")
    if distills:
        more: dict[str, Any] = {"advantages": ROLLOUTS * (1.0,), "is_pair": False}
        groups = tuple(replace(group, rollouts=ROLLOUTS // 2 * group.rollouts, **more) for group in groups)
    lengths = [group.prompt.num_tokens + sum(len(one.token_ids) for one in group.rollouts) for group in groups]
    budget = sum(lengths) if in_one else max(lengths)
    scorer, settings = (
        PolicyScorer(case.reference, budget),
        UpdateSettings(algorithm, budget, objective_loss=partial(preference, settings=PREFERENCE)),
    )
    if distills:
        scorer = TeacherScorer(case.reference, budget, top_k=DISTILLATION.top_k)
        settings = replace(settings, objective_loss=no_loss, distillation=DISTILLATION)
    engine = TorchEngine(case.policy, TRAINING)

    def with_scores(group: RolloutGroup, found: Sequence[Any]) -> RolloutGroup:
        if distills:
            return replace(group, teacher=tuple(found))
        both = zip(group.rollouts, found, strict=True)
        return replace(group, rollouts=tuple(replace(one, rollout_logprobs=values) for one, values in both))

    def one_step() -> dict[str, float]:
        scored = map(with_scores, groups, scorer.score([group.response_group for group in groups], 1.0))
        metrics = update_policy(engine, None, Update([*scored], TRAINING.learning_rate), settings)
        return {"loss": metrics["loss"], "gradient_norm": metrics["grad_norm"]}

    return sft_step.timed_steps(case, one_step)


def _trl(case: PairCase, in_one: bool = True, answer_logits: bool = True) -> Steps:
    """All sequences have equal lengths: no padding."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

    case.set_attention(best_attention(case))

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """As TRL's DataCollatorForVisionPreference: chosen sequences, then rejected ones, images twice."""
        groups = [case.groups[row["number"]] for row in rows]
        prompts = 2 * [group.prompt for group in groups]
        answers = torch.stack([group.rollouts[which].token_ids for which in (0, 1) for group in groups])
        ids, types = (torch.stack([getattr(p, key) for p in prompts]) for key in ("input_ids", "mm_token_type_ids"))
        batch = {
            "input_ids": torch.cat([ids, answers], 1),
            "attention_mask": torch.ones(len(ids), ids.shape[1] + answers.shape[1], dtype=torch.long),
            "completion_mask": torch.cat([torch.zeros_like(ids), torch.ones_like(answers)], 1),
            "mm_token_type_ids": torch.cat([types, torch.zeros_like(answers)], 1),
        }
        pixels, grids = zip(*((prompt.pixel_values, prompt.grid_thw) for prompt in prompts), strict=True)
        return batch | {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}

    pairs = len(case.groups)
    options = sft_step.trainer_options(case, pairs if in_one else 1) | {
        "gradient_accumulation_steps": 1 if in_one else pairs, "loss_type": [PREFERENCE.loss], "beta": PREFERENCE.beta,
        "bf16": case.policy.dtype == torch.bfloat16, "max_length": None,
        "gradient_checkpointing": case.policy.settings.gradient_checkpointing,
    }  # fmt: skip
    # It tokenizes texts that its collator does not read.
    data = Dataset.from_list(
        [{"prompt": "w1", "chosen": " w2", "rejected": " w3", "number": number} for number in range(pairs)]
    )
    models = case.model, case.reference.model
    words = word_tokenizer(case.policy.vocab_size)
    try:
        trainer = DPOTrainer(models[0], models[1], DPOConfig(**options), collate, data, processing_class=words)
        # All that it asks this for is whether to leave out positions without a label.
        with patch("trl.trainer.utils._use_triton", lambda _: answer_logits):
            return sft_step.trainer_steps(trainer)
    finally:
        for model in models:  # it replaces them
            model.__dict__.pop("forward", None)


OURS, PAIR_BY_PAIR = partial(_ours), partial(_ours, in_one=False)
TRL, TRL_ANSWERS, TRL_PAIR_BY_PAIR = partial(_trl, answer_logits=False), partial(_trl), partial(_trl, in_one=False)


class PairRun(SupervisedRun):
    """One run over steps on pairs."""

    measurement = "dpo-step"
    command = ("python", "-m", _HERE)
    contestants_known = CONTESTANTS
    case = f"{_HERE}:PairCase"
    default_points = ("2048,4,64",)
    point_form = "P,N,R: prefix, pairs, response tokens"
    description = __doc__ or ""

    @classmethod
    def points(cls, arguments: Any) -> list[Any]:
        return parse_points(arguments.points, StepPoint, (3,), "P,N,R in whole numbers, such as 2048,4,64")

    def contestants_at(self, point: Any) -> list[str]:
        return self.contestants


main = PairRun.main


if __name__ == "__main__":
    run(main)
