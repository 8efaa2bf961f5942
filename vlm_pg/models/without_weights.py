"""What prompts need of a checkpoint, read without its weights: processor, positions, sizes, limits."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from vlm_pg.errors import ModelError
from vlm_pg.models.checks import check_length
from vlm_pg.models.loading import check_tokenizer, load_config, read_processor
from vlm_pg.models.lora import adapter_base
from vlm_pg.models.registry import family_of
from vlm_pg.models.settings import ModelSettings
from vlm_pg.types import Prompt


class WithoutWeights:
    """A checkpoint of a registered family, or the one that an adapter belongs to; answers as its ``Policy`` would.

    Args:
        settings: which model, and how its positions are counted.

    Raises:
        ModelError: nothing there, unreadable, or of a kind that is not supported.
    """

    def __init__(self, settings: ModelSettings):
        self._settings = settings
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
    def pixel_factor(self) -> int:
        """Pixels per side of one visual token."""
        return self.family.pixels(self.config).token_side

    def positions(self, *given: Any) -> torch.Tensor:
        """See ``Family.positions``."""
        rule = self._settings.positions
        needs_model = rule == "transformers" and self.family.reads_media
        return self.family.positions(rule, self._hollow if needs_model else self._named, *given)

    def check_length(self, prompt: Prompt, response_tokens: int) -> None:
        """Raise SampleError ("too_long_for_model") if prompt and response go beyond the positions the model knows."""
        check_length(prompt, response_tokens, getattr(self.config.get_text_config(), "max_position_embeddings", None))

    @property
    def _named(self) -> SimpleNamespace:
        return SimpleNamespace(config=self.config, name_or_path=self.path)

    @cached_property
    def _hollow(self) -> Any:
        """The transformers model without memory, whose class counts positions by transformers' rule."""
        import transformers

        named = self.family.model_class
        model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
        with torch.device("meta"):
            return model_class._from_config(self.config)
