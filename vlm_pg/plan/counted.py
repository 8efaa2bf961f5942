"""What a layer and the output head keep and take, counted on the model's own code (``bench/paper``), not by formula.

A model of the configuration's widths and as many layers as it has kinds of them is built without memory and run once
forward and back; whatever transformers, adapters or our own attention keep is then in the count. Of two lengths the
slope is what a token takes, without the gradients of weights, which do not grow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vlm_pg.errors import VlmPgError, printable
from vlm_pg.models.settings import VISION_PARTS, LoraSettings, ModelSettings, Part
from vlm_pg.plan.counted_tower import TowerBytes, count_tower

# Tokens of the two streams that are counted, each half prefix, half responses: so long that gradients of weights, which
# do not grow, decide nothing when most is alive. Linear attention goes through its stream in a loop, and keeps more.
LENGTHS = {"full_attention": (32_768, 65_536), "linear_attention": (1024, 2048)}
RESPONSES = 8
# Of the output head so many chunks: what further ones leave, their rows' gradients, is small.
HEAD_CHUNKS = 3


class CannotCount(VlmPgError):
    """The model's code cannot be run without values; the message says on what it depends."""


@dataclass(frozen=True)
class LayerBytes:
    """Of one decoder layer, per token: ``kept`` between forward and backward, ``mlp`` of it by its MLP; and what there
    is beside it when most is alive in backward, while the MLP or (with the MLP's gone) the rest goes back.
    """

    kept: float
    mlp: float
    mlp_backward: float
    rest_backward: float


@dataclass(frozen=True)
class Variant:
    """What of a setup changes how a layer is computed: bytes of an element, what trains, and whether by an adapter."""

    element: int
    train: tuple[Part, ...]
    lora: bool


class ActivationCounter:
    """Counts of one model's layers; each is made when it is asked for, and kept.

    Args:
        config: transformers' config.
        settings: of the run's model.
    """

    def __init__(self, config: Any, settings: ModelSettings):
        self._config, self._settings = config, settings
        self._found: dict[Any, Any] = {}

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Of the decoder's layers, in order: "full_attention" or "linear_attention"."""
        from vlm_pg.models.registry import family_of

        return tuple(family_of(self._config).layer_kinds(self._config))

    def layer(self, kind: str, variant: Variant) -> LayerBytes:
        """Of the first layer of this kind.

        Raises:
            CannotCount: what it computes depends on values.
        """
        return self._once(("layer", kind, variant), lambda: self._count_layer(kind, variant))

    def head(
        self, rows: int, chunk_rows: int, variant: Variant, scattered: bool = False, entropies: bool = False
    ) -> float:
        """Most bytes while log-probabilities of so many rows are computed and go back, the rows themselves apart.

        ``chunk_rows``: whose logits are held at a time. ``scattered``: the weight lies with several ranks,
        whose hooks want to see every call of the head. ``entropies``: they go back as well.
        """
        rows = min(rows, HEAD_CHUNKS * chunk_rows)
        return self._once(
            ("head", rows, chunk_rows, variant, scattered, entropies),
            lambda: self._count_head(rows, chunk_rows, variant, scattered, entropies),
        )

    def tower(self, variant: Variant, checkpointing: bool) -> TowerBytes:
        """Of the vision tower, a patch."""
        # Nothing but what trains of it matters.
        parts = tuple(part for part in variant.train if part in VISION_PARTS)
        of_tower = Variant(variant.element, parts, lora=False)
        return self._once(("tower", of_tower, checkpointing), lambda: self._count_tower(of_tower, checkpointing))

    def _once(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self._found:
            try:
                self._found[key] = find()
            except (RuntimeError, NotImplementedError) as error:
                raise CannotCount(
                    f"What this model's layers keep could not be counted on its own code ({type(error).__name__}: "
                    f"{printable(str(error))}). Its code may have changed under a newer transformers."
                ) from error
        return self._found[key]

    def _count_layer(self, kind: str, variant: Variant) -> LayerBytes:
        import torch

        policy, fakes = self._policy(variant)
        layer = policy.language_model.layers[self.kinds.index(kind)]

        def slopes(lengths: tuple[int, int], measure: Callable[[_Stream], tuple[int, ...]]) -> list[float]:
            few, many = (measure(_Stream(policy, length, fakes)) for length in lengths)
            return [(more - less) / (lengths[1] - lengths[0]) for less, more in zip(few, many, strict=True)]

        (kept,) = slopes(LENGTHS[kind], lambda stream: (stream.kept(stream.through(layer)),))
        mlp, mlp_peak = slopes(LENGTHS["full_attention"], lambda stream: stream.kept_and_peak(layer.mlp))
        # A stand-in keeps nothing, so what is left is attention, its norm and that of the MLP.
        layer.mlp = torch.nn.Identity()
        rest, rest_peak = slopes(LENGTHS[kind], lambda stream: stream.kept_and_peak(stream.through(layer)))
        return LayerBytes(kept, mlp, mlp_peak - mlp, rest_peak - rest)

    def _count_tower(self, variant: Variant, checkpointing: bool) -> TowerBytes:
        changed: dict[str, Any] = {"lora": None, "liger": False, "share_prefix": True}
        # A policy trains something; the language model is not there.
        changed |= {"train": variant.train or ("language",), "gradient_checkpointing": checkpointing}
        changed |= {"vision_piece_tokens": 0}
        settings = self._settings.model_copy(update=changed)
        return count_tower(self._config, settings, _dtype(variant), forget=_forget)

    def _count_head(self, rows: int, chunk_rows: int, variant: Variant, scattered: bool, entropies: bool) -> float:
        import torch

        from vlm_pg.bench.paper.counter import count

        policy, fakes = self._policy(variant)
        policy.logits_chunk_rows = chunk_rows
        if scattered:
            policy.model.lm_head.register_forward_hook(_seen)
        with fakes:
            width = policy.model.config.get_text_config().hidden_size
            hidden = torch.empty(rows, width, dtype=policy.dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)

        def run() -> None:
            logprobs, found = policy.token_logprobs(hidden, targets, 1.0, entropy_graph=entropies)
            (logprobs + found if entropies else logprobs).sum().backward()

        return float(count(run, fakes, collects=False).peak_bytes)

    def _policy(self, variant: Variant, **settings: Any) -> tuple[Any, Any]:
        """A policy of few layers without values."""

        from vlm_pg.attention.kernels.torch_kernels import CudaFlashKernel
        from vlm_pg.bench.paper.counter import fake_mode
        from vlm_pg.bench.paper.fake import fake_policy

        lora = (self._settings.lora or LoraSettings()) if variant.lora else None
        chosen = self._settings.model_copy(
            update={
                "train": variant.train,
                # Its own linear layers in 4 bits keep what frozen ones do: nothing.
                "lora": None if lora is None else lora.model_copy(update={"quantize": None}),
                "liger": False,
                "gradient_checkpointing": False,
                "share_prefix": True,
                **settings,
            }
        )
        fakes = fake_mode()
        dtype = _dtype(variant)
        policy = fake_policy(lambda: _few_layers(self._config, self.kinds, dtype), chosen, fakes, CudaFlashKernel())
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                # Others say how many gradients there are at a time.
                parameter.register_post_accumulate_grad_hook(_forget)
        return policy, fakes


class _Stream:
    """A prefix and responses as a decoder layer gets them."""

    def __init__(self, policy: Any, tokens: int, fakes: Any):
        import torch

        from vlm_pg.attention.tree import PrefixTree

        self._policy, self._fakes = policy, fakes
        response = tokens // (2 * RESPONSES)
        self._tree = PrefixTree.from_groups([(tokens - RESPONSES * response, [response] * RESPONSES)])
        language = policy.language_model
        with fakes:
            self._hidden = torch.empty(1, tokens, language.config.hidden_size, dtype=policy.dtype, requires_grad=True)
            self._gradient = torch.empty_like(self._hidden)
            axes = policy.family.rotary_axes
            positions = torch.zeros((axes, 1, tokens) if axes > 1 else (1, tokens), dtype=torch.int64)
            self._rotary = language.rotary_emb(self._hidden, positions)

    def through(self, layer: Any) -> Callable[[Any], Any]:
        """The layer as a function of hidden states."""
        from vlm_pg.models.contexts import TreeContext

        def run(hidden: Any) -> Any:
            context = TreeContext(self._tree, self._policy.kernel)
            return layer(hidden, position_embeddings=self._rotary, attention_mask=None, attention_context=context)

        return run

    def kept(self, run: Callable[[Any], Any]) -> int:
        """Bytes between its forward and its backward, without its output."""
        out: list[Any] = []
        counted = self._count(lambda: out.append(_output(run(self._hidden))))
        return int(counted.end_bytes - out.pop().nbytes)

    def kept_and_peak(self, run: Callable[[Any], Any]) -> tuple[int, int]:
        """And the most in its backward: with its output, in place of the gradient that in a model comes from above."""
        kept = self.kept(run)
        peak = self._count(lambda: _output(run(self._hidden)).backward(self._gradient)).peak_bytes
        self._hidden.grad = None
        return kept, peak

    def _count(self, run: Callable[[], Any]) -> Any:
        from vlm_pg.bench.paper.counter import count

        # Nothing here is checkpointed.
        return count(run, self._fakes, collects=False)


def _output(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _few_layers(config: Any, kinds: Sequence[str], dtype: Any) -> Any:
    """A model with the first layers of this configuration, up to one of each kind."""
    import torch
    import transformers

    from vlm_pg.models.registry import family_of

    family, config = family_of(config), copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    named = family.model_class
    model_class: Any = getattr(transformers, named) if isinstance(named, str) else named
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return model_class._from_config(config)
    finally:
        torch.set_default_dtype(usual)


def _dtype(variant: Variant) -> Any:
    import torch

    return {2: torch.bfloat16, 4: torch.float32}[variant.element]


def _seen(*_: Any) -> None:
    """A hook that somebody has on calls."""


def _forget(parameter: Any) -> None:
    parameter.grad = None
