"""Supervised training that starts the tiny model off: it answers in the right form, and reads the video poorly.

Two stages, because two things have to be learnt and only one of them well:

1. Form and look-up, from questions shown beside the *wrong* video: list some colours, pick the one asked for, find its
   letter among the options. The list is drawn at random, with repeats: neither pixels nor which orders exist can be
   learnt from it, and a list the model has not seen before is as good to it as any.
2. Reading the video, from questions beside their own video, stopped as soon as greedy accuracy on other clips reaches
   the target. What is left to learn is to see: that is what reinforcement learning is then for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipelines.embedded import FIRST_FREE_KEY, to_sample, write_clip
from data_pipelines.flashes import POSITIONS, SEEN_ORDERS, UNSEEN_ORDERS, Clip, Order, make_clips
from scripts.tiny_model.parts import END_OF_TURN
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.settings import MediaSettings
from vlm_pg.models.registry import family_of
from vlm_pg.prompts.builder import PromptBuilder
from vlm_pg.prompts.settings import PromptSettings
from vlm_pg.rewards import RewardSettings, score
from vlm_pg.types import MediaRef, Prompt, Sample

BATCH_SIZE = 64
WARMUP_STEPS = 20
CHECK_EVERY_STEPS = 5
CHECK_FROM_COLOURS_RIGHT = 0.33  # share of listed colours that are right in a batch; before, a check is a waste
WRONG_VIDEOS = 512
LOOKUP_IS_LEARNT = 0.99  # of letters right, over about the last 20 batches


@dataclass(frozen=True)
class Recipe:
    """Steps and learning rates of both stages, and the greedy accuracy at which the second ends."""

    seed: int = 0
    clips: int = 2048
    held_out_clips: int = 512
    lookup_steps: int = 1500
    lookup_learning_rate: float = 2e-3
    video_steps: int = 600
    video_learning_rate: float = 5e-4
    target_accuracy: float = 0.43
    highest_accuracy: float = 0.50


@dataclass(frozen=True)
class Example:
    """A rendered clip, its question, and the prompt with its pixels."""

    clip: Clip
    sample: Sample
    prompt: Prompt


def visual_inputs(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [patches, patch_dim] and grids [n, 3] of all examples, one video each."""
    pixels = [example.prompt.pixel_values for example in examples if example.prompt.pixel_values is not None]
    grids = [example.prompt.grid_thw for example in examples if example.prompt.grid_thw is not None]
    return torch.cat(pixels), torch.cat(grids)


def response_text(clip: Clip, listed: Order | None = None) -> str:
    """All colours in the order shown (or as ``listed``), then the one asked for, then its letter.

    Listing every colour is what makes the task learnable: each one is evidence about one moment of the video.
    """
    listed = listed or clip.order
    asked = listed[POSITIONS.index(clip.position)]
    letter = "ABCD"[clip.options.index(asked)]
    return f"<think> {' '.join(listed)}, {clip.position} {asked}</think><answer>{letter}</answer>{END_OF_TURN}"


def make_samples(count: int, orders: Sequence[Order], key: tuple[int, ...]) -> list[tuple[Clip, Sample]]:
    """Clips that no data set contains (their keys are free ones), each with its question."""
    clips = make_clips(count, tuple(orders), POSITIONS, key)
    return [
        (clip, to_sample(clip, f"{key}-{index}", MediaRef("video", f"{index:05d}.mp4"), "cold start"))
        for index, clip in enumerate(clips)
    ]


def render_examples(
    pairs: Sequence[tuple[Clip, Sample]], builder: PromptBuilder, media: MediaSettings, folder: Path
) -> list[Example]:
    """Write each clip as mp4 and read it back the way training does: same decoder, same frames, same prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    for clip, sample in pairs:
        write_clip(clip, folder / sample.media[0].path)
    examples = []
    with MediaLoader(media, folder) as loader:
        for clip, sample in pairs:
            decoded = loader.load(sample.media)[0]
            if isinstance(decoded, SampleError):
                raise decoded
            examples.append(Example(clip, sample, builder.build(sample, [decoded])))
    return examples


def prompt_ids(processor: Any, builder: PromptBuilder, sample: Sample, num_visual_tokens: int) -> list[int]:
    """The token ids ``builder`` would give ``sample``, without pixels: a thousand times as fast."""
    content = [{"type": "video"}, {"type": "text", "text": builder.question_text(sample)}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    pad = processor.video_token
    ids: list[int] = processor.tokenizer(text.replace(pad, pad * num_visual_tokens)).input_ids
    return ids


class ColdStart:
    """The training of both stages on one model."""

    def __init__(
        self, model: Any, processor: Any, recipe: Recipe, media: MediaSettings, prompt: PromptSettings, folder: Path
    ):
        self.model, self.processor, self.recipe = model, processor, recipe
        self.family = family_of(model.config)
        self.builder = PromptBuilder(
            processor, prompt, lambda *arguments: self.family.positions("qwen", self.model, *arguments)
        )

        def render(count: int, orders: Sequence[Order], number: int) -> list[Example]:
            samples = make_samples(count, orders, (recipe.seed, FIRST_FREE_KEY, number))
            return render_examples(samples, self.builder, media, folder / str(number))

        self.examples = render(recipe.clips, SEEN_ORDERS, 1)
        self.held_out = render(recipe.held_out_clips, SEEN_ORDERS, 2)
        self.unseen_orders = render(recipe.held_out_clips, UNSEEN_ORDERS, 3)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self._check_prompt_ids()

    def learn_lookup(self, report: Callable[[str], None]) -> None:
        """Stage 1. Raises RuntimeError if the letter does not follow from the thought afterwards."""
        wrong = self.examples[:WRONG_VIDEOS]
        with torch.no_grad():
            features = self._features(wrong).unflatten(0, (len(wrong), -1))
        optimizer = self._optimizer()
        recipe = self.recipe
        pairs = make_samples(recipe.lookup_steps * BATCH_SIZE, SEEN_ORDERS, (recipe.seed, FIRST_FREE_KEY, 4))
        consistent = 0.0
        for step in range(recipe.lookup_steps):
            batch = pairs[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            ids = [prompt_ids(self.processor, self.builder, sample, features.shape[1]) for _, sample in batch]
            chosen = torch.randint(len(wrong), (len(batch),), generator=self.generator)
            right = self._step(
                optimizer,
                torch.tensor(ids),
                self._ids(response_text(clip, self._random_list(clip)) for clip, _ in batch),
                features[chosen].flatten(0, 1),
                recipe.lookup_learning_rate * min(1.0, (step + 1) / WARMUP_STEPS),
            )
            # the letter is the third token from the end
            consistent = 0.95 * consistent + 0.05 * float(right[:, -3].float().mean())
            if (step + 1) % 100 == 0:
                report(f"look-up step {step + 1}: letter follows from the thought {consistent:.2f}")
            if consistent >= LOOKUP_IS_LEARNT:
                return
        raise RuntimeError(f"after {recipe.lookup_steps} steps the look-up is right {consistent:.2f} of the time")

    def learn_video(self, report: Callable[[str], None]) -> dict[str, float]:
        """Stage 2. Returns what was reached. Raises RuntimeError if no check fell into the range of accuracies."""
        optimizer = self._optimizer()
        recipe = self.recipe
        for step in range(1, recipe.video_steps + 1):
            chosen = torch.randint(len(self.examples), (BATCH_SIZE,), generator=self.generator)
            batch = [self.examples[index] for index in chosen.tolist()]
            right = self._step(
                optimizer,
                torch.stack([example.prompt.input_ids for example in batch]),
                self._ids(response_text(example.clip) for example in batch),
                self._features(batch),
                recipe.video_learning_rate * min(1.0, step / WARMUP_STEPS),
            )
            colours_right = float(right[:, 1:5].float().mean())  # the token before them is <think>
            if step % CHECK_EVERY_STEPS or colours_right < CHECK_FROM_COLOURS_RIGHT:
                continue
            accuracy, form = self.evaluate(self.held_out)
            report(f"video step {step}: greedy accuracy on other clips {accuracy:.3f}")
            if accuracy >= recipe.target_accuracy:
                if accuracy > recipe.highest_accuracy:
                    break
                unseen, _ = self.evaluate(self.unseen_orders)
                return {"steps": step, "accuracy_seen": accuracy, "accuracy_unseen": unseen, "format": form}
        accuracy, _ = self.evaluate(self.held_out)
        raise RuntimeError(
            f"greedy accuracy did not stop between {recipe.target_accuracy} and {recipe.highest_accuracy}: it is "
            f"{accuracy:.3f} after {step} steps. Change the seed, the steps or the learning rate."
        )

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> tuple[float, float]:
        """Greedy accuracy and format rate, through transformers' own ``generate`` and the rewards of training."""
        settings = RewardSettings()
        accuracy = form = 0.0
        for start in range(0, len(examples), BATCH_SIZE):
            batch = examples[start : start + BATCH_SIZE]
            prompts = [example.prompt for example in batch]
            pixels, grids = visual_inputs(batch)
            input_ids = torch.stack([prompt.input_ids for prompt in prompts])
            tokens = self.model.generate(
                input_ids=input_ids,
                position_ids=self._generate_positions(input_ids),
                attention_mask=torch.ones_like(input_ids),
                mm_token_type_ids=torch.stack([prompt.mm_token_type_ids for prompt in prompts]),
                pixel_values_videos=pixels,
                video_grid_thw=grids,
                second_per_grid_ts=[1.0] * len(prompts),
                max_new_tokens=24,
                do_sample=False,
            )
            texts = self.processor.batch_decode(tokens[:, input_ids.shape[1] :], skip_special_tokens=True)
            for example, text in zip(batch, texts, strict=True):
                parts = score(example.sample, text, settings).parts
                accuracy += parts["accuracy"] or 0.0
                form += parts["format"] or 0.0
        return accuracy / len(examples), form / len(examples)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        prompts: torch.Tensor,
        responses: torch.Tensor,
        features: torch.Tensor,
        learning_rate: float,
    ) -> torch.Tensor:
        """One update on prompts [n, P] and responses [n, R] with visual features [n * M, D].

        Returns:
            bool [n, R]: whether each response token was the likeliest.
        """
        model = self.model
        ids = torch.cat([prompts, responses], dim=1)
        embeddings = model.get_input_embeddings()(ids)
        embeddings = embeddings.masked_scatter((ids == model.config.video_token_id)[..., None], features)
        hidden = self.family.language_model(model)(
            inputs_embeds=embeddings, position_ids=self._positions(ids), use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, prompts.shape[1] - 1 : -1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), responses.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        return logits.argmax(-1) == responses

    def _generate_positions(self, ids: torch.Tensor) -> torch.Tensor:
        """[4, n, P]: places in the sequence, then positions, as ``generate`` continues them."""
        places = torch.arange(ids.shape[1]).expand(1, len(ids), -1)
        return torch.cat([places, self._positions(ids)])

    def _features(self, examples: Sequence[Example]) -> torch.Tensor:
        return self.family.encode_vision(self.model, *visual_inputs(examples))

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Positions int64 [3, n, P + R]: all prompts have one length, so all positions are those of the first."""
        prompt = self.examples[0].prompt
        following = prompt.next_position + torch.arange(ids.shape[1] - prompt.num_tokens)
        row = torch.cat([prompt.positions_3P, following.expand(3, -1)], dim=1)
        return row[:, None].expand(-1, len(ids), -1)

    def _random_list(self, clip: Clip) -> Order:
        """Colours drawn from the options, repeats allowed; never a held-out order."""
        while True:
            drawn = torch.randint(len(clip.options), (len(clip.order),), generator=self.generator)
            listed = tuple(clip.options[index] for index in drawn.tolist())
            if listed not in UNSEEN_ORDERS:
                return listed

    def _ids(self, texts: Iterable[str]) -> torch.Tensor:
        return torch.tensor([self.processor.tokenizer(text).input_ids for text in texts])

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def _check_prompt_ids(self) -> None:
        """The shortcut of stage 1 and the builder agree, and one length holds for all (batches are not padded)."""
        for example in [*self.examples, *self.held_out, *self.unseen_orders]:
            visual = int((example.prompt.mm_token_type_ids != 0).sum())
            expected = prompt_ids(self.processor, self.builder, example.sample, visual)
            assert example.prompt.input_ids.tolist() == expected, example.sample
            assert example.prompt.num_tokens == self.examples[0].prompt.num_tokens, example.sample
