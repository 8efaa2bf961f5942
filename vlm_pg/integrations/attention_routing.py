"""Grouped attention in a model that stays another program's: its own attention everywhere else, also in between."""

from __future__ import annotations

from typing import Any

from vlm_pg.attention.registration import ATTENTION_NAME, ROUTED


class _GroupedConfig:
    """A layer's configuration while the layer answers a call of ours: the same, but for the attention it names."""

    _attn_implementation = ATTENTION_NAME

    def __init__(self, own: Any):
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def route_attention(language_model: Any) -> None:
    """Calls that carry an ``attention_context`` get grouped attention; the model's configuration is left as it is.

    transformers looks the attention up in the layer's configuration at every call. The choice has to travel with the
    call: a layer that gradient checkpointing runs again in backward, long after the scoring is over, must decide the
    same way, and whoever reads the configuration in between (generation, continuous batching) must find what he set.
    """
    if getattr(language_model, ROUTED, False):
        return
    for layer in language_model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.register_forward_pre_hook(_choose, with_kwargs=True)
            layer.self_attn.register_forward_hook(_restore, always_call=True)
    setattr(language_model, ROUTED, True)


def _choose(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _restore(attention)  # an interrupted call may have left it
    if kwargs.get("attention_context") is not None:
        attention.config = _GroupedConfig(attention.config)


def _restore(attention: Any, *_: Any) -> None:
    if isinstance(attention.config, _GroupedConfig):
        attention.config = attention.config.own
