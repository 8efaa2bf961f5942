"""A checkpoint of which nothing but the vision tower is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from vlm_pg.models.family import Family


def without_language(config: Any) -> Any:
    """A copy of ``config`` without decoder layers, whose vocabulary is one token; everything around the tower, by
    which its weights are found and prompts are made, is as it was."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 0, 1
    text.pad_token_id = None  # it would have to be in the vocabulary
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return config


@contextmanager
def without_report() -> Iterator[None]:
    """Inside, transformers does not list the language model's weights as left out."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def lacking_in_tower(family: Family, found: Mapping[str, Any]) -> list[str]:
    """Weights of the tower that a checkpoint has not, or of another shape; what it has beyond is not asked for."""
    mismatched = (name for name, *_ in found.get("mismatched_keys") or ())
    names = [*(found.get("missing_keys") or ()), *mismatched]
    return sorted(name for name in names if family.part_of(name) != "language")
