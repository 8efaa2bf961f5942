"""transformers' ``generate`` as its own and qwen-vl-utils' documentation has it, question by question."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from vlm_pg.answers.whole import WholeReader
from vlm_pg.bench.case import best_attention, set_attention
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.evaluation.case import EvalCase
from vlm_pg.bench.evaluation.shown import SHOWN_RATE
from vlm_pg.prompts.builder import question_words
from vlm_pg.prompts.processor_outputs import prompt_from_processor
from vlm_pg.types import Prompt, Sample

# Questions that the batched contestant asks at a time.
BATCH = 4


@contextmanager
def _session(case: EvalCase, batch: int) -> Iterator[_Generate]:
    set_attention(case, best_attention(case))
    yield _Generate(case, batch)


class _Generate:
    """``batch``: questions that are asked at a time. Frames of the video seen last are kept for its next question."""

    asks_apart = False

    def __init__(self, case: EvalCase, batch: int):
        self._case, self._batch = case, batch
        self._config = case.config()
        self._processor = case.policy.processor
        self._frames = cache(self._decoded) if batch > 1 else _last_only(self._decoded)

    def media(self) -> None:
        for path in dict.fromkeys(sample.media[0].path for sample in self._case.samples):
            self._decoded(path)

    def evaluate(self) -> None:
        case, config = self._case, self._config
        with WholeReader(config.reward) as whole, tempfile.TemporaryFile("w") as file:
            for samples in self._batches():
                answers = self._generate(self._inputs(samples), case.point.generations)
                texts = self._processor.batch_decode(answers, skip_special_tokens=False)
                for number, sample in enumerate(samples):
                    own = texts[number * case.point.generations : (number + 1) * case.point.generations]
                    readings = [whole.read(sample, text, True) for text in own]
                    row = {"id": sample.sample_id, "outputs": own, "scores": [one.score for one in readings]}
                    file.write(f"{json.dumps(row)}\n")

    def greedy(self) -> torch.Tensor:
        return torch.cat([self._generate(self._inputs(samples), None) for samples in self._batches()])

    def prompts(self) -> list[Prompt]:
        return [
            prompt_from_processor(self._inputs([sample]), self._case.policy.positions) for sample in self._case.samples
        ]

    def _batches(self) -> Iterator[Sequence[Sample]]:
        samples = self._case.samples
        for first in range(0, len(samples), self._batch):
            yield samples[first : first + self._batch]

    def _inputs(self, samples: Sequence[Sample]) -> Any:
        """The processor's outputs for several conversations, padded on the left."""
        texts = [
            self._processor.apply_chat_template(self._messages(sample), tokenize=False, add_generation_prompt=True)
            for sample in samples
        ]
        decoded = [self._frames(sample.media[0].path) for sample in samples]
        return self._processor(
            text=texts,
            videos=[frames for frames, _ in decoded],
            video_metadata=[metadata for _, metadata in decoded],
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


def _last_only(function: Any) -> Any:
    """Questions on one video follow each other: its frames are kept for the next."""
    from functools import lru_cache

    return lru_cache(maxsize=1)(function)


one_by_one, batched = partial(_session, batch=1), partial(_session, batch=BATCH)
