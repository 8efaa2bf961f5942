"""Whole GRPO steps: rollouts of one prompt and their update, measured in turn, on one model with random weights.

    python -m scripts.bench.grpo_step --model mid --threads 1 --checkpointing --no-memory --points 4096,8,128

A step is the group's rollouts and the forward and backward of its update, without optimizer, rewards and media. Every
rollout has exactly R tokens. ``prefix-grouper-kind`` makes no rollouts: its update is that of the others' rollouts.
The load of the machine stands beside every run; processor seconds are compared, for they depend less on it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch

from scripts.bench import run
from scripts.bench.others import prefix_grouper_kind
from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench import step
from vlm_pg.bench.case import Spec, best_attention, random_policy, set_attention, text_prompt
from vlm_pg.bench.rollout_case import never_choose_special_tokens
from vlm_pg.bench.runner import Contestant
from vlm_pg.bench.step_case import TrainingCase
from vlm_pg.bench.work import StepPoint, repeated_work, shared_work
from vlm_pg.memory import GIB
from vlm_pg.models.micro_batches import backward_in_chunks
from vlm_pg.models.recorded import ForwardBudget
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.types import ResponseGroup, Rollout

BUDGET_BYTES = 8 * GIB
_HERE = "scripts.bench.grpo_step"
CONTESTANTS = {
    "recorded": Contestant(
        "ours, the update starts from the forward of sampling", shared_work, f"{_HERE}:RECORDED"
    ),
    "computed": Contestant(
        "ours, the update computes its forward (rollout.keep_forward_gb=0)", shared_work, f"{_HERE}:COMPUTED"
    ),
    "prefix-grouper-kind": Contestant(
        "only the update, of the same rollouts; see scripts.bench.others", shared_work, f"{_HERE}:PREFIX_GROUPER",
        "prefix_grouper",
    ),
    "trl": Contestant(
        "TRL's GRPOTrainer: transformers' generate and one repeated forward and backward, all in one batch; its own "
        "rollouts, so its loss is not compared",
        repeated_work, f"{_HERE}:TRL", "trl",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WholeStep:
    """``sample``: makes the rollouts; None for those that were made before. ``update``: their loss, after backward."""

    sample: Callable[[StepCase], Any] | None
    update: Callable[[StepCase, Any], float]
    own_rollouts: bool = False


@dataclass(frozen=True)
class StepCase(TrainingCase):
    """``made``: the last rollouts of ours, and TRL's trainer."""

    made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, spec: Spec) -> Self:
        policy = random_policy(spec)
        policy.train()
        never_choose_special_tokens(policy)
        return cls.random(policy, spec["prefix"], spec["lengths"])

    def tiny(self) -> Self:
        return self.random(self.policy, 16, (2, 2))

    def run(self, contestant: WholeStep) -> float | None:  # type: ignore[override]
        self.forget()
        loss = contestant.update(self, None if contestant.sample is None else contestant.sample(self))
        return None if contestant.own_rollouts else loss

    def outcome(self, result: float | None) -> dict[str, float]:
        return {} if result is None else super().outcome(result)

    def time(self, contestant: WholeStep) -> dict[str, float]:  # type: ignore[override]
        self.forget()
        made: list[Any] = [None]
        found: dict[str, float] = {"load": os.getloadavg()[0]}
        if sample := contestant.sample:
            found |= _named("rollout", self.timed(lambda: made.append(sample(self))))
        found |= _named("update", self.timed(lambda: contestant.update(self, made.pop())))
        for key in ("seconds", "cpu_seconds"):
            parts = [found[f"{part}_{key}"] for part in ("rollout", "update") if f"{part}_{key}" in found]
            found |= {key: sum(parts)} if parts else {}
        return found

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        return super().agreement({name: one for name, one in outcomes.items() if one}, dtype)


def _named(part: str, seconds: dict[str, float]) -> dict[str, float]:
    return {f"{part}_{key}": value for key, value in seconds.items()}


def _sample(case: StepCase, records: bool) -> tuple[Rollout, ...]:
    set_attention(case, ATTENTION_NAME)
    policy, response = case.policy, case.lengths[0]
    size = policy.recorded_bytes()
    settings = RolloutSettings(num_generations=len(case.lengths), max_new_tokens=response, min_new_tokens=response)
    forwards = [ForwardBudget(BUDGET_BYTES, size)] if records else []
    engine = RolloutEngine(policy, settings, 0, forwards=forwards)
    rollouts = engine.generate([text_prompt("bench", case.prefix.cpu())], step=0)[0]
    if records != all(rollout.forward is not None for rollout in rollouts):
        raise RuntimeError("The forward of sampling was not recorded as asked. Nothing was timed.")
    case.made["responses"] = tuple(rollout.token_ids.to(case.device) for rollout in rollouts)
    return rollouts


def _update(case: StepCase, rollouts: tuple[Rollout, ...]) -> float:
    set_attention(case, ATTENTION_NAME)
    forwards = tuple(rollout.forward for rollout in rollouts if rollout.forward is not None)
    prompt, responses = text_prompt("bench", case.prefix.cpu()), tuple(rollout.token_ids for rollout in rollouts)

    def loss_of(chunk: list[list[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        indices, logprobs = zip(*chunk[0], strict=True)
        return case.loss(logprobs, indices)

    return backward_in_chunks(case.policy, [ResponseGroup(prompt, responses, forwards)], loss_of, None).item()


def _prefix_grouper(case: StepCase, _: None) -> float:
    return prefix_grouper_kind(replace(case, responses=case.made["responses"]))


def word_tokenizer(vocab: int) -> Any:
    """Token i is the word "wi"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocab)}, unk_token=f"w{vocab - 3}"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=f"w{vocab - 2}", eos_token=f"w{vocab - 1}", padding_side="left"
    )


def _trl_trainer(case: StepCase) -> tuple[Any, list[Any]]:
    """TRL's trainer of this model, with its defaults but for precision, batch size and lengths; and its batch."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    generations, response = len(case.lengths), case.lengths[0]
    config = GRPOConfig(
        output_dir="/tmp/vlm-pg-bench-trl", per_device_train_batch_size=generations, gradient_accumulation_steps=1,
        num_generations=generations, max_completion_length=response, generation_kwargs={"min_new_tokens": response},
        bf16=case.policy.dtype == torch.bfloat16, use_cpu=case.device.type == "cpu", report_to=[],
        gradient_checkpointing=case.policy.settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False}, logging_steps=10**6,
    )  # fmt: skip

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [float(index) for index in range(len(completions))]

    prompt = " ".join(f"w{token}" for token in case.prefix.tolist())
    data = Dataset.from_list([{"prompt": prompt}] * generations)
    # A copy: it turns checkpointing off and on.
    trainer = GRPOTrainer(
        deepcopy(case.model), reward, config, data, processing_class=word_tokenizer(case.policy.vocab_size)
    )
    trainer.current_gradient_accumulation_steps = 1  # as its loop sets it
    return trainer, list(data)


def _trl_sample(case: StepCase) -> Any:
    set_attention(case, best_attention(case))
    if "trl" not in case.made:
        case.made["trl"] = _trl_trainer(case)
    trainer, rows = case.made["trl"]
    trainer.model.zero_grad()
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(rows)
    shape, expected = tuple(inputs["completion_ids"].shape), (len(case.lengths), case.lengths[0])
    if shape != expected or inputs["prompt_ids"].shape[1] != len(case.prefix):
        raise RuntimeError(f"TRL sampled {shape}, {expected} were asked for. Nothing was timed.")
    return inputs


def _trl_update(case: StepCase, inputs: Any) -> float:
    trainer, _ = case.made["trl"]
    loss = trainer.compute_loss(trainer.model, inputs)
    trainer.accelerator.backward(loss)
    return float(loss.item())


RECORDED = WholeStep(partial(_sample, records=True), _update)
COMPUTED = WholeStep(partial(_sample, records=False), _update)
PREFIX_GROUPER = WholeStep(None, _prefix_grouper)
TRL = WholeStep(_trl_sample, _trl_update, own_rollouts=True)


class WholeStepRun(step.StepRun):
    """One run over whole steps."""

    measurement = "grpo-step"
    command = ("python", "-m", _HERE)
    contestants_known = CONTESTANTS
    gain_key = "recorded_gain"
    case = f"{_HERE}:StepCase"
    description, epilog = __doc__ or "", ""

    def medians(self, name: str, point: StepPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        return {f"median_{key}": statistics.median(values) for key, values in numbers.items() if "seconds" in key}

    def gain(self, name: str, point: StepPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """How many times as long theirs takes: the whole step and its parts, in processor seconds if measured."""
        unit = "cpu_seconds" if "median_cpu_seconds" in ours else "seconds"
        keys = {"step": f"median_{unit}"} | {part: f"median_{part}_{unit}" for part in ("rollout", "update")}
        if keys["rollout"] not in theirs:
            del keys["rollout"], keys["step"]
        return {part: theirs[key] / ours[key] for part, key in keys.items()}

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        seconds = {part: entry.get(f"median_{part}_cpu_seconds", 0.0) for part in ("rollout", "update")}
        gains = ", ".join(f"{part} {ratio:.2f}x" for part, ratio in entry.get(self.gain_key, {}).items())
        words = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
        return [f"  {name:24}{words}" + (f"; of recorded's: {gains}" if gains else "")]


main = WholeStepRun.main


if __name__ == "__main__":
    run(main)
