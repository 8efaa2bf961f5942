"""Questions on videos, and answers of a fixed length to sample; every contestant decodes, asks, samples and reads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from scripts.bench.eval_files import (
    INSTRUCTION,
    RECORDS,
    SHOWN_RATE,
    TOKEN_SIDE,
    TOWERS,
    EvalPoint,
    Shown,
    byte_processor,
)
from vlm_pg.answers.whole import WholeReader
from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import ModelCase, Spec, best_attention, random_model, set_attention
from vlm_pg.bench.rollout_case import check_count, check_tokens, equal_share, never_choose_special_tokens
from vlm_pg.bench.runner import CannotRun
from vlm_pg.config import RunConfig
from vlm_pg.data.records import read_records
from vlm_pg.eval.answer_files import AnswerFiles, answers_path, read_answers
from vlm_pg.eval.contracts import Answered
from vlm_pg.eval.eval_model import EvalModel
from vlm_pg.eval.runner import Evaluator
from vlm_pg.media.loader import MediaLoader
from vlm_pg.models.loading import DTYPES, make_policy
from vlm_pg.models.settings import ModelSettings
from vlm_pg.observe.console import Console
from vlm_pg.prompts.builder import PromptBuilder, question_words
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.prompts.prompt_source import SourcePool
from vlm_pg.rewards.rewarder import Rewarder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import Prompt, Sample

SET = "bench"
# Of a normalised pixel; the least step of a colour is 0.015.
PIXEL_TOLERANCE = 1e-3


class Answering(Protocol):
    """A contestant that is ready to answer: model, processor and questions are there."""

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
        model = random_model(
            spec["model"], device=spec["device"], dtype=DTYPES[spec["dtype"]], tower=TOWERS[spec["model"]].config
        )
        # Positions as transformers counts them: contestants must choose the same tokens.
        settings = ModelSettings(path=spec["model"], dtype=spec["dtype"], positions="transformers")
        policy = make_policy(model, byte_processor(model.config.get_text_config().vocab_size), settings)
        never_choose_special_tokens(policy)
        keys = ("prefix", "generations", "new_tokens", "questions", "videos")
        return cls(policy, EvalPoint(*(spec[key] for key in keys)), Path(spec["folder"]))

    @property
    def rollouts(self) -> int:
        return self.point.asked

    def config(self, greedy: bool = False) -> RunConfig:
        """What ``vlm-pg eval`` would be given. Media are decoded in this process: nobody gets a core more."""
        point = self.point
        shown = Shown.of(point.prefix)
        sampling = {"num_generations": 1, "temperature": 0.0}
        if not greedy:
            sampling = {"num_generations": point.generations, "temperature": 1.0}
        return RunConfig.model_validate(
            {
                "model": self.policy.settings.model_dump(),
                "data": {"eval": {SET: str(self.folder / RECORDS)}},
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
        return SourcePool(builder, config.data, config.media, self.policy.pixel_factor, cache=config.cache)

    @cached_property
    def samples(self) -> list[Sample]:
        """The questions, those on one video together."""
        return read_records(self.folder / RECORDS)[0]

    def tiny(self) -> EvalCase:
        return replace(self, point=EvalPoint(32, 2, 3, self.point.questions, self.point.videos))

    def run(self, contestant: Contestant) -> Contestant:
        with contestant(self) as answering:
            answering.evaluate()
        return contestant

    def outcome(self, result: Contestant) -> tuple[torch.Tensor, list[Prompt]]:
        """Its greedy tokens, and its prompts."""
        with result(self) as answering:
            return answering.greedy(), answering.prompts()

    def time(self, contestant: Contestant) -> dict[str, float]:
        """Decoding of all videos alone, and the whole run, each in a session of its own."""
        with contestant(self) as answering:
            media = self.timed(answering.media)
        with contestant(self) as answering:
            found = {f"media_{key}": value for key, value in media.items()}
            return found | self.timed(answering.evaluate)

    def agreement(self, outcomes: Mapping[str, Any], dtype: str) -> dict[str, dict[str, Any]]:
        for name, (tokens, _) in outcomes.items():
            check_count(name, tokens, self, self.point.new_tokens)
        first = next(iter(outcomes), "")
        for name, (_, prompts) in outcomes.items():
            check_prompts(first, outcomes[first][1], name, prompts)
        if dtype == "fp32" and outcomes:
            check_tokens(self, {name: tokens for name, (tokens, _) in outcomes.items()})
        return {
            name: {
                "prompt_tokens": [prompt.num_tokens for prompt in prompts],
                "visual_tokens": prompts[0].num_visual_tokens,
                "equal_tokens": equal_share(outcomes[first][0], tokens),
            }
            for name, (tokens, prompts) in outcomes.items()
        }

    @torch.no_grad()
    def logits_after(self, group: int, response: torch.Tensor) -> torch.Tensor:
        """Logits [V] behind a question and these ids of its answer, by transformers' forward."""
        set_attention(self, "sdpa")
        with self.sources(self.config(greedy=True)) as sources:
            ((_, prompt),), _ = sources.for_records(self.folder / RECORDS).load([self.samples[group]])
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
        seen, shown = one.pixel_values, other.pixel_values
        if seen is None or shown is None or not torch.allclose(seen, shown, rtol=0, atol=PIXEL_TOLERANCE):
            what = what or "other pixels"
        if what:
            raise RuntimeError(
                f"The prompts of question {number} by {first} and {name} differ: {what}. Nothing was timed: they do "
                "not do the same work."
            )


@contextmanager
def ours(case: EvalCase) -> Iterator[_Ours]:
    set_attention(case, ATTENTION_NAME)
    case.policy.vision.forget()  # an evaluation begins without features
    yield _Ours(case)


class _Ours:
    def __init__(self, case: EvalCase):
        self._case, self._config = case, case.config()

    def media(self) -> None:
        case, config = self._case, self._config
        refs = dict.fromkeys(ref for sample in self._samples(config) for ref in sample.media)
        with MediaLoader(config.media, case.folder, factor=case.policy.pixel_factor) as loader:
            for found in loader.load(list(refs)):
                if isinstance(found, Exception):
                    raise found

    def evaluate(self) -> None:
        self._answers(self._config)

    def greedy(self) -> torch.Tensor:
        """By the engine, whose words must be those that the evaluation wrote."""
        case, config = self._case, self._case.config(greedy=True)
        rollout = config.rollout.model_copy(update={"num_generations": 1, "temperature": 0.0})
        engine = RolloutEngine(case.policy, rollout, config.run.seed)
        rollouts = [one for (one,) in engine.generate(self.prompts(), "bench")]
        written = [row.outputs[0].text for row in self._answers(config)]
        if written != [rollout.text for rollout in rollouts]:
            raise RuntimeError(
                "The evaluation's greedy answers are not those of the rollout engine on the same prompts. Nothing was "
                "timed: please report this."
            )
        return torch.stack([rollout.token_ids for rollout in rollouts])

    def prompts(self) -> list[Prompt]:
        config = self._config
        with self._case.sources(config) as sources:
            prompts, faults = sources.for_records(config.data.eval[SET]).load(self._samples(config))
        if faults:
            raise RuntimeError(f"A clip of the measurement's own cannot be read: {faults[0]}")
        return [prompt for _, prompt in prompts]

    def _samples(self, config: RunConfig) -> list[Sample]:
        return read_records(config.data.eval[SET])[0]

    def _answers(self, config: RunConfig) -> list[Answered]:
        """Evaluate into a folder of its own below the clips, which goes with them, even if this process is killed."""
        case = self._case
        with (
            tempfile.TemporaryDirectory(prefix="answers_", dir=case.folder) as folder,
            case.sources(config) as sources,
            Rewarder(config.reward) as rewarder,
            WholeReader(config.reward) as whole,
        ):
            eval_model = EvalModel(case.policy, sources, rewarder, whole)
            evaluator = Evaluator(config, eval_model, Console(enabled=False), None)
            evaluator.run("bench", AnswerFiles(Path(folder), 0))
            return read_answers(answers_path(Path(folder), SET))


@contextmanager
def one_by_one(case: EvalCase) -> Iterator[_Generate]:
    set_attention(case, best_attention(case))
    yield _Generate(case)


class _Generate:
    """Frames of the video seen last are kept for its next question."""

    def __init__(self, case: EvalCase):
        self._case = case
        self._config = case.config()
        self._processor = case.policy.processor
        self._frames = lru_cache(maxsize=1)(self._decoded)

    def media(self) -> None:
        for path in dict.fromkeys(sample.media[0].path for sample in self._case.samples):
            self._decoded(path)

    def evaluate(self) -> None:
        case, config = self._case, self._config
        with WholeReader(config.reward) as whole, tempfile.TemporaryFile("w") as file:
            for sample in case.samples:
                answers = self._generate(self._inputs(sample), case.point.generations)
                texts = self._processor.batch_decode(answers, skip_special_tokens=False)
                scores = [whole.read(sample, text, True).score for text in texts]
                file.write(f"{json.dumps({'id': sample.sample_id, 'outputs': texts, 'scores': scores})}\n")

    def greedy(self) -> torch.Tensor:
        return torch.cat([self._generate(self._inputs(sample), None) for sample in self._case.samples])

    def prompts(self) -> list[Prompt]:
        return [
            prompt_from_processor(self._inputs(sample), self._case.policy.positions) for sample in self._case.samples
        ]

    def _inputs(self, sample: Sample) -> Any:
        """The processor's outputs for a conversation."""
        conversation = self._messages(sample)
        text = self._processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        frames, metadata = self._frames(sample.media[0].path)
        return self._processor(
            text=[text],
            videos=[frames],
            video_metadata=[metadata],
            do_resize=False,
            do_sample_frames=False,
            padding=True,
            return_tensors="pt",
        )

    def _messages(self, sample: Sample) -> list[dict[str, Any]]:
        words = question_words(self._config.prompt, sample)
        content = [self._video(sample.media[0].path), {"type": "text", "text": words}]
        return [{"role": "user", "content": content}]

    def _video(self, path: str) -> dict[str, Any]:
        media = self._config.media
        keys = ("min_frames", "max_frames", "min_pixels", "max_pixels")
        limits = {key: getattr(media, key) for key in keys}
        return {"type": "video", "video": str(self._case.folder / path), "fps": SHOWN_RATE, **limits}

    def _decoded(self, path: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """Frames float32 [F, 3, height, width], and what qwen-vl-utils says of them."""
        from qwen_vl_utils import process_vision_info

        conversation = [{"role": "user", "content": [self._video(path)]}]
        try:
            _, videos, _ = process_vision_info(conversation, return_video_kwargs=True, return_video_metadata=True)
        except (ImportError, AttributeError) as error:  # a reader that is not there
            raise CannotRun(f"qwen-vl-utils finds no decoder here ({error}); install decord or torchcodec") from error
        return videos[0]

    @torch.no_grad()
    def _generate(self, inputs: Any, generations: int | None) -> torch.Tensor:
        """int64 [questions * answers, N] on the CPU; ``generations``: None for one greedy answer."""
        from transformers import GenerationConfig

        tokenizer, length = self._processor.tokenizer, self._case.point.new_tokens
        sampling: dict[str, Any] = {"do_sample": False}
        if generations is not None:
            sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
            sampling["num_return_sequences"] = generations
        config = GenerationConfig(
            max_new_tokens=length,
            min_new_tokens=length,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
        )
        model = self._case.model
        moved = inputs.to(self._case.device)
        seconds = moved.pop("second_per_grid_ts", None)
        if seconds is not None:
            moved["second_per_grid_ts"] = torch.as_tensor(seconds)
        out = model.generate(**moved, generation_config=config)
        return out[:, moved["input_ids"].shape[1] :].cpu()
