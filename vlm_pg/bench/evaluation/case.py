"""Questions on videos, and answers of a fixed length to sample; every contestant decodes, asks, samples and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from vlm_pg.bench.case import ModelCase, Spec, random_model, set_attention
from vlm_pg.bench.evaluation.files import APART, TOGETHER
from vlm_pg.bench.evaluation.processor import byte_processor
from vlm_pg.bench.evaluation.shown import INSTRUCTION, SHOWN_RATE, TOKEN_SIDE, Shown
from vlm_pg.bench.generation.case import check_count, check_tokens, equal_share, never_choose_special_tokens
from vlm_pg.bench.grid import EvalPoint
from vlm_pg.config import RunConfig
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.source_pool import SourcePool
from vlm_pg.types import Prompt, Sample

SET = "bench"
# Of a normalised pixel; the least step of a colour is 0.015.
PIXEL_TOLERANCE = 1e-3


class Answering(Protocol):
    """A contestant that is ready to answer: model, processor and questions are there."""

    asks_apart: bool

    def media(self) -> None:
        """Decode and resize the frames of all videos, as the whole run does it."""

    def evaluate(self) -> None:
        """The whole run: decoding, prompts, answers sampled at temperature 1, what they say, a line a question."""

    def greedy(self) -> torch.Tensor:
        """One greedy answer to each question, int64 [questions, N]."""
        ...

    def prompts(self) -> list[Prompt]:
        """What the model was shown, in the order of the questions."""
        ...


Contestant = Callable[["EvalCase"], AbstractContextManager[Answering]]


@dataclass(frozen=True)
class EvalCase(ModelCase):
    """``folder``: of clips and records (``files.write_files``). Greedy answers are compared: one to each question."""

    point: EvalPoint
    folder: Path
    generations = 1

    @classmethod
    def build(cls, spec: Spec) -> EvalCase:
        model = random_model(spec["model"], device=spec["device"], dtype=DTYPES[spec["dtype"]], with_tower=True)
        # Positions as transformers counts them: contestants must choose the same tokens.
        settings = ModelSettings(path=spec["model"], dtype=spec["dtype"], positions="transformers")
        policy = make_policy(model, byte_processor(model.config.get_text_config().vocab_size), settings)
        never_choose_special_tokens(policy)
        keys = ("prefix", "generations", "new_tokens", "questions", "videos")
        return cls(policy, EvalPoint(*(spec[key] for key in keys)), Path(spec["folder"]))

    @property
    def rollouts(self) -> int:
        return self.point.asked

    def config(self, apart: bool = False, greedy: bool = False) -> RunConfig:
        """What ``vlm-pg eval`` would be given. Media are decoded in this process: nobody gets a core more."""
        point = self.point
        shown = Shown.of(point.prefix)
        sampling = {"num_generations": 1, "temperature": 0.0}
        if not greedy:
            sampling = {"num_generations": point.generations, "temperature": 1.0}
        return RunConfig.model_validate(
            {
                "model": self.policy.settings.model_dump(),
                "data": {"eval": {SET: str(self.folder / (APART if apart else TOGETHER))}},
                "media": {
                    "workers": 0,
                    "fps": SHOWN_RATE,
                    "max_frames": shown.frames,
                    "min_pixels": min(shown.frame_pixels, 4 * TOKEN_SIDE**2),
                    "max_pixels": shown.frame_pixels,
                },
                "prompt": {"instructions": {"multiple_choice": INSTRUCTION}, "max_prompt_tokens": 131072},
                "rollout": {"max_new_tokens": point.new_tokens, "min_new_tokens": point.new_tokens},
                "training": {"steps": 1, "micro_batch_tokens": 2**20},
                "eval": {"reader": "ours", "thumbnails": 0, **sampling},
            }
        )

    def sources(self, config: RunConfig) -> SourcePool:
        """As ``vlm-pg eval`` opens them."""
        builder = PromptBuilder(self.policy.processor, config.prompt, self.policy.positions)
        return SourcePool(builder, config.data, config.media, self.policy.pixel_factor, kept=config.cache)

    @cached_property
    def samples(self) -> list[Sample]:
        """The questions, those on one video together."""
        from vlm_pg.data.records import read_records

        return read_records(self.folder / TOGETHER)[0]

    def tiny(self) -> EvalCase:
        return replace(self, point=EvalPoint(32, 2, 3, self.point.questions, self.point.videos))

    def run(self, contestant: Contestant) -> Contestant:
        with contestant(self) as answering:
            answering.evaluate()
        return contestant

    def outcome(self, result: Contestant) -> tuple[bool, torch.Tensor, list[Prompt]]:
        """Whether its videos are those of the others, its greedy tokens, and its prompts."""
        with result(self) as answering:
            return not answering.asks_apart, answering.greedy(), answering.prompts()

    def time(self, contestant: Contestant) -> dict[str, float]:
        """Decoding of all videos alone, and the whole run, each in a session of its own."""
        with contestant(self) as answering:
            media = self.timed(answering.media)
        with contestant(self) as answering:
            found = {f"media_{key}": value for key, value in media.items()}
            return found | self.timed(answering.evaluate)

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        for name, (_, tokens, _) in outcomes.items():
            check_count(name, tokens, self, self.point.new_tokens)
        same = {name: outcome for name, outcome in outcomes.items() if outcome[0]}
        first = next(iter(same), "")
        for name, (_, _, prompts) in same.items():
            check_prompts(first, same[first][2], name, prompts)
        tokens_of = {name: tokens for name, (_, tokens, _) in same.items()}
        if dtype == "fp32" and tokens_of:
            check_tokens(self, tokens_of)
        notes: dict[str, dict[str, Any]] = {}
        for name, (_, _, prompts) in outcomes.items():
            notes[name] = {"prompt_tokens": [prompt.num_tokens for prompt in prompts]}
            notes[name]["visual_tokens"] = prompts[0].num_visual_tokens
            if name in tokens_of:
                notes[name]["equal_tokens"] = equal_share(tokens_of[first], tokens_of[name])
        return notes

    @torch.no_grad()
    def logits_after(self, group: int, response: torch.Tensor) -> torch.Tensor:
        """Logits [V] behind a question and these ids of its answer, by transformers' forward."""
        set_attention(self, "sdpa")
        with self.sources(self.config(greedy=True)) as sources:
            ((_, prompt),), _ = sources.for_records(self.folder / TOGETHER).load([self.samples[group]])
        ids = torch.cat([prompt.input_ids, response])[None]
        types = torch.nn.functional.pad(prompt.mm_token_type_ids, (0, len(response)))[None]
        inputs = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": torch.ones_like(ids)}
        inputs |= {"pixel_values_videos": prompt.pixel_values, "video_grid_thw": prompt.grid_thw}  # type: ignore[dict-item]
        moved = {key: value.to(self.device) for key, value in inputs.items()}
        out = self.model(**moved, second_per_grid_ts=[2 / SHOWN_RATE], logits_to_keep=1, use_cache=False)
        return out.logits[0, -1].float()


def check_prompts(first: str, ours: list[Prompt], name: str, theirs: list[Prompt]) -> None:
    """Raise RuntimeError unless two contestants show the same tokens and, up to rounding, the same pixels."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        what = None
        if not torch.equal(one.input_ids, other.input_ids):
            what = f"{one.num_tokens} and {other.num_tokens} tokens, not the same"
        elif not _close(one.pixel_values, other.pixel_values):
            what = "other pixels"
        if what:
            raise RuntimeError(
                f"The prompts of question {number} by {first} and {name} differ: {what}. Nothing was timed: they do "
                "not do the same work."
            )


def _close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= PIXEL_TOLERANCE)
