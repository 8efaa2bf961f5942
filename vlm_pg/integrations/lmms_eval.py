"""vlm_pg as a model of lmms-eval (0.7): ``lmms-eval eval --model vlm_pg --model_args pretrained=CHECKPOINT``.

lmms-eval words the questions and scores the answers. Frames, prompts and generation are ours: questions on one medium
are answered together and share its prefix, and the repeats of a question are samples behind one prompt. It is found
through the entry point ``lmms_eval.models`` of this package.

Anything that cannot be done stops the evaluation with the question's name: a medium that cannot be decoded, a
prompt that is too long, beam search. Nothing is answered by another question's pixels or by an empty text.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from tqdm import tqdm

from vlm_pg.errors import ConfigError, SampleError, VlmPgError
from vlm_pg.integrations.lmms_requests import Conversation, Generation, conversation_of, generation_of, model_arguments
from vlm_pg.media.loader import MediaLoader, Ticket, decoding_pool
from vlm_pg.models.loading import load_policy
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.rollout.engine import RolloutEngine
from vlm_pg.types import DecodedMedia, Prompt, Sample

MAX_BATCH_QUESTIONS = 32


def manifest() -> ModelManifest:
    """What lmms-eval knows of this model; the entry point."""
    return ModelManifest("vlm_pg", chat_class_path="vlm_pg.integrations.lmms_eval.VlmPg")


@dataclass
class _Question:
    """One question of a task. ``indices``: of its requests, one or, with repeats, several."""

    name: str
    conversation: Conversation
    generation: Generation
    indices: list[int]

    @property
    def samples(self) -> int:
        """Number of sampled answers: greedy ones are all alike."""
        return 1 if self.generation.temperature == 0.0 else len(self.indices)

    @property
    def sample(self) -> Sample:
        """The record for media and prompts; the text is in the conversation."""
        return Sample(self.name, "", self.conversation.media, (), "", "exact", source="lmms-eval", category="")


class VlmPg(lmms):
    """A Qwen-VL checkpoint behind vlm_pg's shared-prefix generation.

    Args:
        pretrained: the checkpoint: a folder, or a name of the hub.
        device: "cuda" or "cpu"; default: CUDA if there is one.
        batch_size, max_batch_size: accepted because lmms-eval hands them in. They decide nothing: as many rollouts run
            together as ``rollout.max_batch_rollouts`` and memory allow.
        system_prompt: a system message, or a file with one, in place of that of the task or the chat template.
        seed: random numbers of sampled answers derive from it.
        settings: of the sections model, media, prompt and rollout by their names in the configuration, for example
            ``media.min_frames=32,media.max_frames=32``. Length and sampling are the task's.

    Raises:
        ConfigError: a setting that is unknown or impossible, or several processes.
        ModelError: as ``load_policy``.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        system_prompt: str = "",
        seed: int = 0,
        **settings: Any,
    ):
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"lmms-eval was started on {os.environ['WORLD_SIZE']} processes, and its model vlm_pg runs in one. "
                "Start one process for each task, or use vlm-pg eval, which shares questions over processes."
            )
        chosen = model_arguments(pretrained, settings)
        self._rollout = chosen.rollout
        self._policy = load_policy(pretrained, device=device, settings=chosen.model)
        self._builder = PromptBuilder(self._policy.processor, chosen.prompt, self._policy.positions, previews=False)
        self._pool = decoding_pool(chosen.media)
        # Tasks name media by absolute paths, wherever they lie.
        self._loader = MediaLoader(
            chosen.media, Path("/"), factor=self._policy.pixel_factor, pool=self._pool, subtitles=False
        )
        self._pictures = tempfile.TemporaryDirectory(prefix="vlm_pg-lmms-")
        self._system_prompt, self._seed = self._resolve_system_prompt(system_prompt), seed

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """An answer to each request, in their order.

        Raises:
            VlmPgError: some question cannot be asked; all of a batch that cannot are named.
        """
        questions = self._questions(requests)
        batches = _batches(questions, self._rollout.max_batch_rollouts)
        answers: dict[int, GenerationResult] = {}
        tickets: dict[str, Ticket] = {}
        with tqdm(total=len(requests), desc="vlm_pg answers") as bar:
            for number, batch in enumerate(batches):
                for question in (*batch, *(batches[number + 1] if number + 1 < len(batches) else ())):
                    if question.name not in tickets:
                        tickets[question.name] = self._loader.submit(question.conversation.media)
                prompts = self._prompts(batch, [tickets.pop(question.name) for question in batch])
                settings = batch[0].generation.settings(self._rollout, batch[0].samples)
                engine = RolloutEngine(self._policy, settings, self._seed)
                for question, rollouts in zip(batch, engine.generate(prompts, "lmms-eval"), strict=True):
                    for repeat, index in enumerate(question.indices):
                        rollout, arguments = rollouts[repeat % len(rollouts)], requests[index].args
                        text = question.generation.without_stop(rollout.text)
                        answers[index] = GenerationResult(text, TokenCounts(output_tokens=len(rollout.token_ids)))
                        self.cache_hook.add_partial("generate_until", (arguments[0], arguments[2]), text)
                    bar.update(len(question.indices))
        return [answers[index] for index in range(len(requests))]

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Not offered."""
        raise NotImplementedError(
            "The model vlm_pg answers in one turn, and this task asks in several rounds (generate_until_multi_round). "
            "Choose a task of output_type generate_until."
        )

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Not offered."""
        raise NotImplementedError(
            "The model vlm_pg generates answers, and this task ranks given ones by their likelihood (loglikelihood, "
            "multiple_choice). Choose the task's variant of output_type generate_until."
        )

    def clean(self) -> None:
        """End decoding and free the model."""
        if self._pool is not None:
            self._pool.close()
        self._pictures.cleanup()
        del self._policy, self._builder
        super().clean()

    def _questions(self, requests: Sequence[Instance]) -> list[_Question]:
        """The requests, those of one question (its repeats) together, in the order in which they first come."""
        questions: dict[tuple[str, str], _Question] = {}
        for index, request in enumerate(requests):
            _, to_messages, arguments, doc_id, task, split = request.args
            name = f"{task}/{split}/{doc_id}"
            generation = generation_of(arguments, name)
            key = name, repr(generation)
            if key not in questions:
                messages = to_messages(self.task_dict[task][split][doc_id])
                messages = self._apply_system_prompt(messages, self._system_prompt)
                conversation = conversation_of(messages, Path(self._pictures.name), name)
                questions[key] = _Question(name, conversation, generation, [])
            questions[key].indices.append(index)
        return list(questions.values())

    def _prompts(self, batch: Sequence[_Question], tickets: Sequence[Ticket]) -> list[Prompt]:
        prompts, faults = [], []
        for question, ticket in zip(batch, tickets, strict=True):
            try:
                media: list[DecodedMedia] = []
                for item in ticket.result():
                    if isinstance(item, SampleError):
                        raise item
                    media.append(item)
                prompt = self._builder.build_conversation(question.sample, question.conversation.messages, media)
                self._policy.check_length(prompt, question.generation.max_new_tokens or self._rollout.max_new_tokens)
            except SampleError as error:
                faults.append(f"{question.name}: {error.reason}: {error}")
            else:
                prompts.append(prompt)
        if faults:
            raise VlmPgError(
                f"{len(faults)} of {len(batch)} questions cannot be asked: {'; '.join(faults)}. lmms-eval has no place "
                "for a question without an answer, and an empty one would count as wrong. Repair the media or the "
                "settings, or leave the questions out of the task."
            )
        return prompts


def _batches(questions: Sequence[_Question], most_rollouts: int) -> list[list[_Question]]:
    """Questions that are sampled alike, those on one medium one after the other, cut into batches."""
    by_generation: dict[tuple[str, int], list[_Question]] = {}
    for question in questions:
        by_generation.setdefault((repr(question.generation), question.samples), []).append(question)
    batches = []
    for (_, samples), alike in by_generation.items():
        first: dict[object, int] = {}
        for index, question in enumerate(alike):
            first.setdefault(question.conversation.media, index)
        ordered = sorted(alike, key=lambda question: first[question.conversation.media])
        size = min(max(1, most_rollouts // samples), MAX_BATCH_QUESTIONS)
        batches += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return batches
