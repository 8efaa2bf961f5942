"""A model's dimensions, and the bytes that training needs for streams and media by them alone: estimates, to choose by.

``vlm-pg plan`` has the same terms, and finer ones for one layer's tensors (``plan/activations.py``). Beside what
``docs/benchmarks/measure_long.py`` measured at 16,384 tokens: 12 % too much without checkpointing, 6 % with it, 50 %
with everything offloaded on a CPU (where no layer's tensors arrive while another layer computes).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_pg.models.family import Family
    from vlm_pg.models.settings import Part
    from vlm_pg.models.stream_memory import MemoryChoice

FP32 = 4
# Layers whose tensors are on the device at a time where they are offloaded: one computing, one in transfer.
RESIDENT_LAYERS = 2


@dataclass(frozen=True)
class LinearAttention:
    """Layers of gated linear attention (Gated DeltaNet): one state [key_dim, value_dim] per value head."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


@dataclass(frozen=True)
class LanguageShape:
    """Dimensions of one language model.

    ``layers`` counts all layers; those of ``linear`` are among them, the rest attend to all earlier tokens.
    ``intermediate``: width of an MLP, or of all experts that see a token.
    ``gated_query``: the query projection also makes a gate of the same width (Qwen3.5).
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated_query: bool = False
    linear: LinearAttention | None = None

    @classmethod
    def of(cls, family: Family, config: Any) -> LanguageShape:
        """From transformers' config."""
        text, linear = config.get_text_config(), None
        if layers := (kinds := family.layer_kinds(config)).count("linear_attention"):
            linear = LinearAttention(
                layers,
                text.linear_num_key_heads,
                text.linear_num_value_heads,
                text.linear_key_head_dim,
                text.linear_value_head_dim,
                text.linear_conv_kernel_dim,
            )
        return cls(
            text.hidden_size,
            len(kinds),
            *family.head_shape(config),
            mlp_width(text),
            text.vocab_size,
            bool(config.tie_word_embeddings),
            family.linear_attention,
            linear,
        )

    @property
    def full_layers(self) -> int:
        """Layers with softmax attention, which have keys and values."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def query_width(self) -> int:
        """Of all query heads."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Of all key-value heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LanguageSizes:
    """Bytes of one language model's tensors.

    Args:
        element: bytes of one number.
        repeated: how often key-value heads are held: where there are fewer than sequence ranks each rank has one.
    """

    shape: LanguageShape
    element: int
    repeated: int = 1

    @property
    def _keys(self) -> int:
        return self.shape.key_width * self.repeated

    def layer_inputs(self, rows: int) -> int:
        """Inputs of all layers."""
        return self.shape.layers * rows * self.shape.hidden * self.element

    def attention_results(self, rows: int) -> int:
        """Attention outputs and log-sum-exps of all layers, stored for a recomputation."""
        return self.shape.full_layers * rows * (self.shape.query_width * self.element + FP32 * self.shape.heads)

    def keys_values(self, rows: int) -> int:
        """Of all layers."""
        return self.shape.full_layers * rows * 2 * self._keys * self.element

    def gradient_sums(self, rows: int) -> int:
        """Of keys and values of all layers, in fp32."""
        return self.shape.full_layers * rows * 2 * self._keys * FP32

    def stream(self, rows: int, choice: MemoryChoice, checkpointing: bool) -> int:
        """Everything on the device for forward and backward of a stream of ``rows`` tokens, weights and logits apart;
        as if nearly all of it were a prefix whose responses follow in chunks."""
        shape, e = self.shape, self.element
        tile = min(rows, choice.mlp_tile_rows or rows)
        # Embeddings, visual features and the gradients of both.
        total = 5 * rows * shape.hidden * e
        # Attention's backward: queries, keys and values before and after rotation, the output, all their gradients, and
        # hidden states around them. The MLP's: gate, up, product and their gradients, and a norm in fp32.
        total += rows * (6 * shape.hidden + 4 * shape.query_width + 6 * self._keys) * e
        total += tile * (7 * shape.intermediate * e + 3 * shape.hidden * FP32)
        states = self.keys_values(rows) + self.gradient_sums(rows)
        if not checkpointing:
            # Both norms in fp32, attention's tensors, and the MLP's where it is not recomputed tile by tile.
            width = 4 * shape.hidden + 3 * shape.query_width + 4 * self._keys
            saved = rows * (width * e + 4 * shape.hidden * FP32)
            saved += 0 if choice.mlp_tile_rows else rows * 4 * shape.intermediate * e
            return total + shape.layers * saved + states
        inputs = self.layer_inputs(rows) + self.attention_results(rows)
        total += self._resident(inputs) if choice.offload_layer_inputs else inputs
        return total + (self._resident(states) if choice.offload_prefix_states else states)

    def offloaded(self, rows: int, choice: MemoryChoice) -> int:
        """Bytes of such a stream that are offloaded."""
        inputs = self.layer_inputs(rows) + self.attention_results(rows)
        states = self.keys_values(rows) + self.gradient_sums(rows)
        return (inputs if choice.offload_layer_inputs else 0) + (states if choice.offload_prefix_states else 0)

    def _resident(self, of_all_layers: int) -> int:
        return of_all_layers * min(RESIDENT_LAYERS, self.shape.layers) // self.shape.layers


@dataclass(frozen=True)
class TowerShape:
    """Dimensions of one vision tower. ``patches_per_token``: merged into one visual token; ``pixels``: numbers of one
    patch; ``out``: numbers of one visual token, features for the first decoder layers included; ``gated``: its MLPs."""

    blocks: int
    hidden: int
    intermediate: int
    patches_per_token: int
    pixels: int
    out: int
    gated: bool = False

    @classmethod
    def of(cls, family: Family, config: Any) -> TowerShape | None:
        """From transformers' config; None without a tower."""
        if not family.reads_media:
            return None
        vision, geometry = config.vision_config, family.pixels(config)
        # Qwen2-VL calls its width embed_dim, and its output's width hidden_size.
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
        width = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
        pixels = geometry.channels * geometry.temporal_patch_size * geometry.patch_size**2
        out = config.get_text_config().hidden_size * (1 + family.deepstack_layers(config))
        return cls(vision.depth, hidden, width, geometry.patches_per_token, pixels, out, family.gated_tower)


@dataclass(frozen=True)
class TowerSizes:
    """Bytes of one vision tower's tensors; ``element``: of one number."""

    shape: TowerShape
    element: int

    def media(self, tokens: int, choice: MemoryChoice, train: Collection[Part], checkpointing: bool) -> int:
        """Everything on the device for media of so many visual tokens, weights apart, where these parts train."""
        shape, e = self.shape, self.element
        trains_tower = "tower" in train
        trains_merger = "merger" in train and not trains_tower
        # Pixels in fp32 and the output; where anything trains also its gradient and the sum of the leaves.
        copies = 3 if trains_tower or trains_merger else 1
        total = tokens * (shape.patches_per_token * shape.pixels * FP32 + copies * shape.out * e)
        if trains_merger:
            # What a merger behind frozen blocks keeps: a norm in fp32, and two linear layers' inputs.
            total += tokens * shape.patches_per_token * shape.hidden * (FP32 + 4 * e)
        # One call of the tower, its input and output apart.
        block = 10 * shape.hidden + 3 * shape.intermediate
        saved = block
        if trains_tower:
            saved += shape.hidden * shape.blocks if checkpointing else block * shape.blocks
        piece = min(tokens, choice.vision_piece_tokens or tokens)
        return total + piece * shape.patches_per_token * saved * e


def mlp_width(text: Any) -> int:
    """Of the widest MLP that a token goes through; ``text``: transformers' config of a language model."""
    experts = getattr(text, "num_experts_per_tok", None) if getattr(text, "num_experts", 0) else None
    if not experts:
        return int(text.intermediate_size)
    return int(experts * text.moe_intermediate_size + (getattr(text, "shared_expert_intermediate_size", 0) or 0))
