"""Optimizer steps of supervised training: questions that share a video against one after the other, and transformers'.

    python -m scripts.bench.sft_step --threads 1 --points 4096,20,64,1 4096,20,64,0
    python -m scripts.bench.sft_step --threads 1 --repeats 7 --points 1024,8,64,8,2

Point P,Q,R,V,N: Q questions of 32 text tokens behind a prefix of P tokens, an answer of R tokens to each, on V videos
(1: all share it; Q: each has its own; 0: all share a text), N optimizer steps (1). Of a prefix with a video all but 64
to 127 tokens are visual; the tower is a stub and frozen. Every run starts from the same weights and a new AdamW. The
last step's loss and gradient norm are compared before anything is timed. Timed are steps: visual features, packing,
forward, backward, clipping and AdamW. ``trainer`` runs ``Trainer.train()``, whose callbacks time its steps without its
data loading.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from scripts.bench import run
from vlm_pg.algorithms.losses import nll
from vlm_pg.algorithms.settings import AlgorithmSettings
from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import SPECIAL_IDS, STUB_TOWER, ModelCase, Spec, best_attention, random_model, set_attention
from vlm_pg.bench.runner import Contestant, PointsRun, gib_words
from vlm_pg.bench.step_case import check_agreement, target_logprobs
from vlm_pg.bench.work import Point, parse_points, repeated_work, shared_work
from vlm_pg.errors import ConfigError
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.policy import Policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.training.engines import TorchEngine
from vlm_pg.training.groups import Update
from vlm_pg.training.settings import TrainingSettings
from vlm_pg.training.updates import UpdateSettings, update_policy
from vlm_pg.types import Prompt, Rollout, RolloutGroup, Sample

TRAINING = TrainingSettings(steps=1, objective="sft", learning_rate=1e-5)
# Its activations, like its time, are small beside those of the language model.
TOWER = STUB_TOWER | {"intermediate_size": 128}
QUESTION_TOKENS = 32
# A temporal patch of 16 x 16 patches.
FRAME_TOKENS = 64
TOLERANCE = 1e-5
_HERE = "scripts.bench.sft_step"
_REPEATED, _TRAINER = ("ours-one-by-one", "transformers-one-by-one"), ("trainer", "trainer-answer-logits")
CONTESTANTS = {
    "ours": Contestant("ours, all questions in one pass", shared_work, f"{_HERE}:OURS"),
    "ours-chunked": Contestant(
        "ours, training.micro_batch_tokens for the prompts on one video and one answer", shared_work, f"{_HERE}:CHUNKED"
    ),
    "ours-one-by-one": Contestant(
        "ours with model.share_prefix=false, one question a micro-batch", repeated_work, f"{_HERE}:ONE_BY_ONE"
    ),
    "transformers-one-by-one": Contestant(
        "transformers' model on one question after the other, no padding, sdpa, logits of answers only",
        repeated_work, f"{_HERE}:transformers_one_by_one",
    ),
    "trainer": Contestant("transformers' Trainer, all questions in one batch", repeated_work, f"{_HERE}:TRAINER"),
    "trainer-answer-logits": Contestant(
        "the same, its collator asks for logits of answers only", repeated_work, f"{_HERE}:TRAINER_ANSWER_LOGITS"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SupervisedPoint(Point):
    """See the module. Raises ConfigError where these numbers make no point."""

    response: int
    videos: int = 1
    updates: int = 1

    def __post_init__(self) -> None:
        if self.videos not in (0, 1, self.generations) or min(self.generations, self.updates, self.response - 1) < 1:
            raise ConfigError(f"A point got {self.identity}; videos must be 0, 1 or the number of questions.")
        if self.prefix < 2 * FRAME_TOKENS:
            raise ConfigError(f"A point got a prefix of {self.prefix} tokens; at least {2 * FRAME_TOKENS} are needed.")

    def __str__(self) -> str:
        shared = {0: "one text", 1: "one video"}.get(self.videos, "a video each")
        return f"{self.generations} questions on {shared}, prefix {self.prefix:,}, answers of {self.response:,} tok"


# Loss, gradient norm and seconds of each optimizer step.
Steps = list[dict[str, float]]


@dataclass(frozen=True)
class SupervisedCase(ModelCase):
    """``groups``: the questions, their answers as rollouts. ``weights``: those that train, as every run starts."""

    groups: tuple[RolloutGroup, ...]
    updates: int
    weights: tuple[torch.Tensor, ...]

    @classmethod
    def build(cls, spec: Spec) -> Self:
        point = SupervisedPoint(*(spec[key] for key in ("prefix", "generations", "response", "videos", "updates")))
        dtype, checkpointing = spec["dtype"], spec["checkpointing"]
        model = random_model(spec["model"], device=spec["device"], dtype=DTYPES[dtype], tower=TOWER)
        settings = ModelSettings(path=spec["model"], dtype=dtype, gradient_checkpointing=checkpointing)
        return cls.random(make_policy(model, None, settings), point)

    @classmethod
    def random(cls, policy: Policy, point: SupervisedPoint) -> Self:
        """Random tokens and pixels."""
        draw = torch.Generator().manual_seed(0)
        below = policy.vocab_size - SPECIAL_IDS
        shared = [_prefix(policy, point, draw) for _ in range(max(1, point.videos))]
        groups = []
        for index in range(point.generations):
            question, answer = (
                torch.randint(0, below, (size,), generator=draw) for size in (QUESTION_TOKENS, point.response)
            )
            ids, media = shared[index % len(shared)]
            ids = torch.cat([ids, question])[None]
            types = 2 * (ids == policy.model.config.video_token_id)
            prompt = prompt_from_processor(
                {"input_ids": ids, "mm_token_type_ids": types, **media}, policy.positions, str(index)
            )
            # Questions on one video share its pixels.
            prompt = replace(prompt, pixel_values=media.get("pixel_values_videos"))
            sample = Sample(str(index), "?", (), (), "A", "exact", "bench", "bench")
            rollout = Rollout(answer, torch.zeros(len(answer)), "stop")
            groups.append(RolloutGroup(sample, prompt, (rollout,), 0, advantages=(1.0,), order=index))
        return cls(
            policy, tuple(groups), point.updates, tuple(w.detach().clone() for w in trained_weights(policy.model))
        )

    def tiny(self) -> Self:
        return self.random(self.policy, SupervisedPoint(2 * FRAME_TOKENS, 2, 3, 1))

    def run(self, contestant: Callable[[SupervisedCase], Steps]) -> Steps:
        self.forget()
        return contestant(self)

    def outcome(self, result: Steps) -> dict[str, float]:
        return {key: result[-1][key] for key in ("loss", "gradient_norm")}

    def time(self, contestant: Callable[[SupervisedCase], Steps]) -> dict[str, float]:
        steps = self.run(contestant)
        return {key: sum(one[key] for one in steps) for key in ("seconds", "cpu_seconds")}

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        check_agreement(outcomes, TOLERANCE)
        return dict(outcomes)

    def forget(self) -> None:
        """Weights as before any step, without gradients."""
        super().forget()
        with torch.no_grad():
            for weight, first in zip(trained_weights(self.model), self.weights, strict=True):
                weight.copy_(first)

    @property
    def answers(self) -> list[torch.Tensor]:
        return [group.rollouts[0].token_ids for group in self.groups]


def trained_weights(model: Any) -> list[torch.Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _prefix(policy: Policy, point: SupervisedPoint, draw: torch.Generator) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids int64 [P] and, with a video, what a processor returns of it."""
    text = torch.randint(0, policy.vocab_size - SPECIAL_IDS, (point.prefix,), generator=draw)
    if not point.videos:
        return text, {}
    config, frames = policy.model.config, point.prefix // FRAME_TOKENS - 1
    text[-frames * FRAME_TOKENS - 1 : -1] = config.video_token_id
    text[-frames * FRAME_TOKENS - 2], text[-1] = config.vision_start_token_id, config.vision_end_token_id
    side = 2 * math.isqrt(FRAME_TOKENS)
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    media = {
        "pixel_values_videos": torch.randn(frames * side * side, width, generator=draw),
        "video_grid_thw": torch.tensor([[frames, side, side]]),
        "second_per_grid_ts": [1.0],
    }
    return text, media


def _ours(case: SupervisedCase, share: bool = True, chunked: bool = False) -> Steps:
    set_attention(case, ATTENTION_NAME)
    of_model = case.policy.settings.model_copy(update={"share_prefix": share, "vision_cache_mb": 0})
    engine = TorchEngine(Policy(case.model, None, case.policy.family, of_model), TRAINING)
    longest = max(group.prompt.num_tokens + len(group.rollouts[0].token_ids) for group in case.groups)
    budget = longest * len(case.groups) if share else longest
    if chunked:  # all prompts of one video, and one answer
        budget = longest + QUESTION_TOKENS * (len(case.groups) - 1)
    update = Update(case.groups, TRAINING.learning_rate)
    algorithm = AlgorithmSettings()
    settings = UpdateSettings(algorithm, budget, objective_loss=partial(nll, settings=algorithm))

    def one_step() -> dict[str, float]:
        metrics = update_policy(engine, None, update, settings)
        return {"loss": metrics["loss"], "gradient_norm": metrics["grad_norm"]}

    return timed_steps(case, one_step)


def timed_steps(case: SupervisedCase, one_step: Callable[[], dict[str, float]]) -> Steps:
    steps: Steps = []
    for _ in range(case.updates):
        found: dict[str, float] = {}
        seconds = case.timed(lambda found=found: found.update(one_step()))  # type: ignore[misc]
        steps.append(found | seconds)
    return steps


def _inputs(prompt: Prompt, answer: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers' model takes: ids [1, P + R], positions [3, 1, P + R], pixels."""
    following = (prompt.next_position + torch.arange(len(answer))).expand(3, -1)
    inputs = {
        "input_ids": torch.cat([prompt.input_ids, answer])[None],
        "position_ids": torch.cat([prompt.positions_3P, following], 1)[:, None],
    }
    if prompt.pixel_values is not None and prompt.grid_thw is not None:
        inputs |= {"pixel_values_videos": prompt.pixel_values, "video_grid_thw": prompt.grid_thw}
    return inputs


def transformers_one_by_one(case: SupervisedCase) -> Steps:
    """Gradients of all questions accumulated, then one step of AdamW."""
    set_attention(case, best_attention(case))
    optimizer = torch.optim.AdamW(
        trained_weights(case.model),
        TRAINING.learning_rate,
        TRAINING.betas,
        TRAINING.adam_epsilon,
        TRAINING.weight_decay,
    )
    count = sum(map(len, case.answers))

    def one_step() -> dict[str, float]:
        total = 0.0
        for group, answer in zip(case.groups, case.answers, strict=True):
            inputs = _inputs(group.prompt, answer)
            inputs |= {"input_ids": inputs["input_ids"][:, :-1], "position_ids": inputs["position_ids"][..., :-1]}
            inputs = {name: value.to(case.device) for name, value in inputs.items()}
            logits = case.model(**inputs, logits_to_keep=len(answer), use_cache=False).logits[0]
            loss = -target_logprobs(logits, answer.to(case.device)).sum() / count
            del logits
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained_weights(case.model), TRAINING.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "gradient_norm": norm.item()}

    return timed_steps(case, one_step)


def _trainer(case: SupervisedCase, answer_logits: bool) -> Steps:
    """The questions have equal lengths, so a batch of them has no padding and needs no mask."""
    from transformers import Trainer, TrainingArguments

    set_attention(case, best_attention(case))

    def collate(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        of_each = [_inputs(group.prompt, group.rollouts[0].token_ids) for group in groups]
        batch: dict[str, Any] = {
            name: torch.cat([one[name] for one in of_each], 1 if name == "position_ids" else 0) for name in of_each[0]
        }
        trained = len(groups[0].rollouts[0].token_ids)
        labels = batch["input_ids"].clone()
        labels[:, :-trained] = -100
        if answer_logits:
            return batch | {"labels": labels[:, -trained - 1 :], "logits_to_keep": trained + 1}
        return batch | {"labels": labels}

    arguments = TrainingArguments(**trainer_options(case, len(case.groups)))
    data: Any = list(case.groups)
    return trainer_steps(Trainer(case.model, arguments, collate, data))


def trainer_options(case: SupervisedCase, batch: int) -> dict[str, Any]:
    """Of transformers' trainers: ``TRAINING`` and nothing but training."""
    return {
        "output_dir": "/tmp/vlm-pg-bench-trainer", "max_steps": case.updates, "per_device_train_batch_size": batch,
        "learning_rate": TRAINING.learning_rate, "adam_beta1": TRAINING.betas[0], "adam_beta2": TRAINING.betas[1],
        "adam_epsilon": TRAINING.adam_epsilon, "weight_decay": TRAINING.weight_decay,
        "max_grad_norm": TRAINING.max_grad_norm, "optim": "adamw_torch", "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "remove_unused_columns": False, "dataloader_pin_memory": False, "use_cpu": case.device.type == "cpu",
    }  # fmt: skip


def trainer_steps(trainer: Any) -> Steps:
    """The steps of ``trainer.train()``, each timed without its data loading."""
    from transformers import TrainerCallback

    steps: Steps = []

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds, cpu_seconds = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            steps.append({"seconds": seconds, "cpu_seconds": cpu_seconds})

    trainer.add_callback(Stopwatch())
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [
        {"loss": entry["loss"], "gradient_norm": entry["grad_norm"]} | seconds
        for entry, seconds in zip(logged, steps, strict=True)
    ]


OURS, CHUNKED, ONE_BY_ONE = _ours, partial(_ours, chunked=True), partial(_ours, share=False)
TRAINER, TRAINER_ANSWER_LOGITS = partial(_trainer, answer_logits=False), partial(_trainer, answer_logits=True)


class SupervisedRun(PointsRun[SupervisedPoint]):
    """One run over supervised steps."""

    measurement = "sft-step"
    command = ("python", "-m", _HERE)
    contestants_known = CONTESTANTS
    gain_key = "ours_gain"
    comparable = (*PointsRun.comparable, "checkpointing")
    case = f"{_HERE}:SupervisedCase"
    default_points = ("4096,20,64,1",)
    point_form = "P,Q,R,V[,N]: prefix, questions, answer tokens, videos, steps"
    description, epilog = __doc__ or "", ""

    @classmethod
    def parser(cls) -> Any:
        parser = super().parser()
        parser.add_argument(
            "--checkpointing", action="store_true", help="recompute activations in backward, all contestants"
        )
        return parser

    @classmethod
    def points(cls, arguments: Any) -> list[SupervisedPoint]:
        form = "P,Q,R,V or P,Q,R,V,N in whole numbers, such as 4096,20,64,1"
        return parse_points(arguments.points, SupervisedPoint, (4, 5), form)

    def contestants_at(self, point: SupervisedPoint) -> list[str]:
        return [n for n in self.contestants if n not in (_REPEATED if point.videos > 1 else _TRAINER)]

    def medians(self, name: str, point: SupervisedPoint, numbers: dict[str, Any]) -> dict[str, Any]:
        return {f"median_{key}": statistics.median(numbers[key]) for key in ("seconds", "cpu_seconds")}

    def gain(self, name: str, point: SupervisedPoint, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        """Theirs / ours, run by run: median, least and largest; and of memory."""
        found: dict[str, Any] = {}
        for key in ("seconds", "cpu_seconds"):
            ratios = [one / other for one, other in zip(theirs[key], ours[key], strict=True)]
            found[key] = [statistics.median(ratios), min(ratios), max(ratios)]
        if "peak_bytes" in theirs and "peak_bytes" in ours:
            found["memory"] = theirs["peak_bytes"] / ours["peak_bytes"]
        return found

    def entry_lines(self, name: str, entry: dict[str, Any]) -> list[str]:
        line = f"  {name:24}{entry['median_seconds']:9.3f} s {gib_words(entry.get('peak_bytes'), 3)}"
        if gain := entry.get(self.gain_key):
            ratios = ("{} {:.2f}x ({:.2f} to {:.2f})".format(key, *gain[key]) for key in ("seconds", "cpu_seconds"))
            line += f"   of ours: {', '.join(ratios)}, memory {gain.get('memory', math.nan):.2f}x"
        return [line]


main = SupervisedRun.main


if __name__ == "__main__":
    run(main)
