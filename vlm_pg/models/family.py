"""Everything specific to one transformers model family: where its parts are, and how it treats media."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from vlm_pg.errors import ModelError
from vlm_pg.models.positions import PromptGrids, VideoTime, by_qwen, by_transformers
from vlm_pg.models.settings import PARTS, VISION_PARTS, Part, PositionRule
from vlm_pg.models.stream_share import possible_sizes
from vlm_pg.models.tower import PixelGeometry, tower_inputs
from vlm_pg.types import MediaKind


class MediaToken(NamedTuple):
    """A token that only the processor may place: its name, the config field with its id, the medium it stands for."""

    name: str
    field: str | None = None
    kind: MediaKind | None = None


_QWEN_MEDIA_TOKENS = (
    MediaToken("<|image_pad|>", "image_token_id", "image"),
    MediaToken("<|video_pad|>", "video_token_id", "video"),
    MediaToken("<|vision_start|>", "vision_start_token_id"),
    MediaToken("<|vision_end|>", "vision_end_token_id"),
    MediaToken("<|vision_pad|>"),
)


def _routers(language_model: Any) -> list[torch.nn.Module]:
    return [layer.mlp.gate for layer in language_model.layers if hasattr(layer.mlp, "gate")]


def refuse_media(model: Any, source: str) -> NoReturn:
    """Raise ModelError for media in ``source``, for a model without a vision tower."""
    raise ModelError(
        f"{source}, but the model {model.name_or_path or 'in memory'} ({model.config.model_type}) has no vision tower "
        "and reads text alone. Use a Qwen-VL checkpoint, or leave the media out."
    )


@dataclass(frozen=True)
class Family:
    """The parts of one transformers model family, and how it differs from others.

    ``model_class``: the class with the output head, or its name in transformers.
    ``tower``, ``decoder``: paths of the vision tower (None: text alone, and the processor is a tokenizer) and of the
    language model, whose linear layers low-rank adapters reach. ``mergers``: modules of the tower that make visual
    tokens of patches; the rest of it is the part "tower" (``part_of``). ``rotary_axes``: how many of the three
    positions of a token (time, height, width) the language model takes; where it takes one, the three are equal.
    ``deepstack``: the tower has features for the first decoder layers, too (https://arxiv.org/abs/2406.04334).
    ``video_time``: how a video's temporal grids differ: one time position each ("grids"), as many as seconds pass
    ("seconds"), or text between them ("text": each grid is then a medium of its own). ``moe``: feed-forward layers are
    mixtures of experts; ``routers(language_model)`` are their gates. ``linear_attention``: some layers keep a recurrent
    state instead of keys and values. ``media_tokens``: the tokens only the processor may place. ``pixels(config)``: how
    the tower reads pixels. ``read_whole``: transformers' loading under ZeRO-3 omits a conversion that the files need.
    ``liger``: the parts that liger-kernel has kernels for, "rope" and keys of ``liger_layers.FORWARDS``; with "swiglu"
    also the experts of a mixture. ``query_key_norms``: queries and keys are normalized per head. ``gated_tower``: the
    tower's MLPs are gated. The last two matter to memory estimates alone.
    """

    model_type: str
    model_class: str | type[Any]
    tower: str | None = "model.visual"
    decoder: str = "model.language_model"
    mergers: tuple[str, ...] = ("merger",)
    rotary_axes: Literal[1, 3] = 3
    deepstack: bool = False
    video_time: VideoTime = "text"
    moe: bool = False
    routers: Callable[[Any], list[torch.nn.Module]] = _routers
    linear_attention: bool = False
    media_tokens: tuple[MediaToken, ...] = _QWEN_MEDIA_TOKENS
    pixels: Callable[[Any], PixelGeometry] = PixelGeometry.of
    read_whole: bool = False
    liger: tuple[str, ...] = ()
    query_key_norms: bool = False
    gated_tower: bool = False

    @property
    def reads_media(self) -> bool:
        """Whether there is a vision tower."""
        return self.tower is not None

    def vision_tower(self, model: Any) -> Any:
        """The module, or None without one."""
        return None if self.tower is None else attrgetter(self.tower)(model)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of such a model."""
        return PARTS if self.reads_media else tuple(part for part in PARTS if part not in VISION_PARTS)

    def part_of(self, name: str) -> Part:
        """The part that a weight belongs to, by its full name in the model."""
        if self.tower is None or not name.startswith(f"{self.tower}."):
            return "language"
        inside = name.removeprefix(f"{self.tower}.")
        return "merger" if inside.startswith(tuple(f"{merger}." for merger in self.mergers)) else "tower"

    def trained_parts(self, model: torch.nn.Module) -> tuple[Part, ...]:
        """The parts with a weight that trains."""
        found = {self.part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
        return tuple(part for part in PARTS if part in found)

    def language_model(self, model: Any) -> Any:
        return attrgetter(self.decoder)(model)

    def adaptable_layers(self, model: Any) -> list[str]:
        """Full names in ``model`` of all linear layers of the language model, Qwen3.5's in_proj_* among them."""
        modules = self.language_model(model).named_modules()
        return [f"{self.decoder}.{name}" for name, module in modules if isinstance(module, torch.nn.Linear)]

    def quantizable_layers(self, model: Any) -> list[str]:
        """The adaptable layers that may be quantized: all but gates with a single output."""
        return [name for name in self.adaptable_layers(model) if model.get_submodule(name).out_features > 1]

    def attention_setting(self, decoder: str, tower: str | None = None) -> dict[str, str] | str:
        """Argument of ``set_attn_implementation``: one for the language model, one for the tower (None: its own)."""
        if not self.reads_media:
            return decoder
        return {"text_config": decoder} | ({} if tower is None else {"vision_config": tower})

    def layer_kinds(self, config: Any) -> tuple[str, ...]:
        """Each decoder layer's kind: "full_attention", "linear_attention", or one that the family does not allow."""
        text = config.get_text_config()
        return tuple(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)

    def head_shape(self, config: Any) -> tuple[int, int, int]:
        """Query heads, key-value heads, head dim: the same in all layers."""
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return text.num_attention_heads, text.num_key_value_heads, head_dim

    def sequence_sizes(self, config: Any) -> list[int]:
        """Numbers of sequence ranks over which the heads of every layer can be divided."""
        text = config.get_text_config()
        sizes = set(possible_sizes(*self.head_shape(config)[:2]))
        if self.linear_attention:
            sizes &= set(possible_sizes(text.linear_num_value_heads, text.linear_num_key_heads))
        return sorted(sizes)

    def deepstack_layers(self, config: Any) -> int:
        """Number of first decoder layers that get visual features of their own."""
        return len(config.vision_config.deepstack_visual_indexes) if self.deepstack else 0

    def media_token_ids(self, config: Any, vocabulary: dict[str, int] | None = None) -> tuple[int, ...]:
        """Ids that only the processor may place, by the config and, where it is given, by their names."""
        ids = {getattr(config, token.field, None) for token in self.media_tokens if token.field}
        ids |= {(vocabulary or {}).get(token.name) for token in self.media_tokens}
        return tuple(sorted(token for token in ids if token is not None))

    def image_token_id(self, config: Any) -> int | None:
        """Id of the token that stands for an image; None if there is none."""
        fields = [token.field for token in self.media_tokens if token.kind == "image" and token.field]
        return getattr(config, fields[0], None) if fields else None

    def encode_vision(self, model: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """One call of the tower, images and videos alike.

        Args:
            pixel_values: [patches, dim].
            grid_thw: int64 [media, 3], on the host (``tower_inputs``).

        Returns:
            [M, D]. With ``deepstack`` [M, 1 + E, D]: [:, 0] goes into the embeddings, [:, 1 + i] is added to the output
            of decoder layer i at the media tokens.

        Raises:
            ModelError: there is no tower.
        """
        if not self.reads_media:
            refuse_media(model, f"Got {len(grid_thw)} image(s) or video(s) to encode")
        tower = self.vision_tower(model)
        output = tower(pixel_values.to(tower.dtype), **tower_inputs(tower, grid_thw, pixel_values.device))
        if not self.deepstack_layers(model.config):
            return output.pooler_output
        return torch.stack([output.pooler_output, *output.deepstack_features], dim=1)

    def positions(self, rule: PositionRule, model: Any, *given: Any) -> Tensor:
        """Rotary positions int64 [3, P] of a prompt.

        Args:
            rule: "qwen" (``vlm_pg/models/positions.py``) or "transformers" (the installed release's own).
            model: the transformers model.
            given: the fields of ``PromptGrids``, in order.

        Raises:
            ModelError: the installed transformers rounds these seconds, or the model reads text alone and there are
                media.
            ValueError: token types and grids do not belong together.
        """
        prompt = PromptGrids(*given)
        if not self.reads_media:
            if prompt.media_kinds or bool(prompt.mm_token_type_ids.any()):
                refuse_media(model, "The prompt has images or videos")
            return torch.arange(prompt.input_ids.shape[0]).expand(3, -1).clone()
        if rule == "transformers":
            return by_transformers(model, prompt)
        per_second = model.config.vision_config.tokens_per_second if self.video_time == "seconds" else None
        return by_qwen(self.video_time, self.pixels(model.config).merge_size, per_second, prompt)

    def describe_positions(self, rule: PositionRule) -> str:
        """The rule in a line, and its consequence for serving the weights later."""
        if not self.reads_media:
            return f"token by token ({self.model_type} reads text alone, for which all rules are one)"
        if self.video_time == "text":
            same = "both rules are the same: timestamps in the prompt state a video's time"
            return f"{rule} (for {self.model_type} {same})"
        if rule == "qwen":
            return (
                "qwen (tokens after an image or video continue past its largest rotary position on any axis, as in "
                "vLLM and SGLang; transformers 5 ignores a video's time axis)"
            )
        return (
            f"transformers (as transformers {version('transformers')}, which ignores a video's time axis; vLLM and "
            "SGLang would serve long videos at other positions)"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user at the start of a run."""
        if not self.moe:
            return ()
        return (
            "mixture of experts: the auxiliary balancing loss is off (it depends on how often a prefix is repeated)",
        )
