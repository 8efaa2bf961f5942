"""What prompts need of a checkpoint, read without its weights: processor, positions, sizes, limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vlm_pg.errors import ModelError
from vlm_pg.models.checks import check_prompt, media_among
from vlm_pg.models.family import refuse_media
from vlm_pg.models.loading import check_tokenizer, load_config, read_processor
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings, PositionRule
from vlm_pg.models.tower_inputs import PixelGeometry
from vlm_pg.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import GenerationConfig


class WithoutWeights:
    """A checkpoint of a registered family, or the one that an adapter belongs to; answers as its ``Policy`` would.

    Args:
        settings: which model, and how its positions are counted.

    Raises:
        ModelError: nothing there, unreadable, or of a kind that is not supported.
    """

    def __init__(self, settings: ModelSettings):
        self.settings = settings
        self.path = str(adapter_base(settings.path) or settings.path)
        self.config = load_config(self.path, settings)
        self.family = family_of(self.config)
        try:
            self.processor = read_processor(self.path, self.family, settings)
        except Exception as error:  # tokenizers raise nothing more exact
            raise ModelError(
                f"The model at {self.path!r} has a config, but its processor could not be loaded: {error} A checkpoint "
                "needs its processor files beside config.json."
            ) from error
        check_tokenizer(self.path, self.config, self.processor, self.family)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def pixels(self) -> PixelGeometry:
        """How the tower would read them."""
        return self.family.pixels(self.config)

    @property
    def pixel_factor(self) -> int:
        """Pixels per side of one visual token."""
        return self.pixels.token_side

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """What only the processor may place."""
        return self.family.media_token_ids(self.config, self.tokenizer.get_vocab())

    def positions(self, *given: Any, rule: PositionRule | None = None) -> torch.Tensor:
        """See ``Family.positions``; by ``settings.positions``, or by another rule."""
        rule = rule or self.settings.positions
        needs_model = rule == "transformers" and self.family.reads_media
        return self.family.positions(rule, self._hollow if needs_model else self.model, *given)

    def check_samples(self, samples: Sequence[Sample], where: object) -> None:
        """Raise ModelError if the model reads text alone and one of the samples, read from ``where``, has media."""
        if not self.family.reads_media and (what := media_among(samples, where)):
            refuse_media(self.model, what)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError if ids, pixels and grids do not belong together."""
        check_prompt(prompt, self.pixels.patches_per_token)

    def check_length(self, prompt: Prompt, response_tokens: int) -> None:
        """Raise SampleError ("too_long_for_model") if prompt and response go beyond the positions the model knows."""
        prompt.check_length(response_tokens, getattr(self.config.get_text_config(), "max_position_embeddings", None))

    @cached_property
    def model(self) -> SimpleNamespace:
        """What transformers' model would say of itself: ``config``, ``generation_config``, ``name_or_path``."""
        return SimpleNamespace(config=self.config, generation_config=self._generation_config(), name_or_path=self.path)

    def _generation_config(self) -> GenerationConfig:
        """As transformers takes it where it loads the weights: from its file, or made of the model's config."""
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self.path)
        except OSError:
            return GenerationConfig.from_model_config(self.config)

    @cached_property
    def _hollow(self) -> Any:
        """The transformers model without memory, whose class counts positions by transformers' rule."""
        import transformers

        named = self.family.model_class
        model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
        with torch.device("meta"):
            return model_class._from_config(self.config)
