"""Bytes that training needs for streams and media, from a model's dimensions alone: estimates, to choose by.

What a layer keeps is counted in tensors of its own widths, as PyTorch's autograd keeps them for transformers' modules.
Beside what ``docs/benchmarks/measure_long.py`` measured at 16,384 tokens: 12 % too much without checkpointing, 6 % with
it, 50 % with everything put away on a CPU (where no layer is on its way while another one is at work).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vlm_pg.models.family import Family
from vlm_pg.models.settings import Part
from vlm_pg.models.stream_memory import MemoryChoice

# Layers whose tensors are on the device at a time where they are put away: one at work, one on its way.
LAYERS_AT_HAND = 2


@dataclass(frozen=True)
class LanguageSizes:
    """A language model. ``attending``: layers with keys and values; ``intermediate``: of an MLP, or of all experts that
    see a token; ``queries``, ``keys``: widths of all query heads and of all key-value heads; ``element`` in bytes."""

    layers: int
    attending: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    keys: int
    element: int

    @classmethod
    def of(cls, family: Family, config: Any, element: int) -> LanguageSizes:
        """From transformers' config; ``element``: bytes of one number."""
        text = config.get_text_config()
        heads, kv_heads, head_dim = family.head_shape(config)
        kinds = family.layer_kinds(config)
        attending = kinds.count("full_attention")
        width = mlp_width(text)
        return cls(
            len(kinds), attending, text.hidden_size, width, heads, heads * head_dim, kv_heads * head_dim, element
        )

    def layer_inputs(self, rows: int) -> int:
        """Inputs of all layers."""
        return self.layers * rows * self.hidden * self.element

    def attention_results(self, rows: int) -> int:
        """Attention outputs and log-sum-exps of all layers, kept for a recomputation."""
        return self.attending * rows * (self.queries * self.element + 4 * self.heads)

    def keys_values(self, rows: int) -> int:
        """Of all layers."""
        return self.attending * rows * 2 * self.keys * self.element

    def gradient_sums(self, rows: int) -> int:
        """Of keys and values of all layers, in fp32."""
        return self.attending * rows * 2 * self.keys * 4

    def row_wise(self, rows: int) -> int:
        """What the MLP and one norm of a layer have alive in backward: gate, up, product and their gradients."""
        return rows * (7 * self.intermediate * self.element + 3 * self.hidden * 4)

    def attention_work(self, rows: int) -> int:
        """What the rest of a layer has alive in backward: queries, keys and values before and after rotation, the
        output, all their gradients, and hidden states around them."""
        return rows * (6 * self.hidden + 4 * self.queries + 6 * self.keys) * self.element

    def all_kept(self, rows: int) -> int:
        """What one layer keeps that is not recomputed, without its MLP: both norms in fp32, and attention's tensors."""
        return rows * ((4 * self.hidden + 3 * self.queries + 4 * self.keys) * self.element + 4 * self.hidden * 4)

    def mlp_kept(self, rows: int) -> int:
        """What one layer's MLP keeps that is not recomputed."""
        return rows * 4 * self.intermediate * self.element

    def around(self, rows: int) -> int:
        """Embeddings, visual features and the gradients of both."""
        return 5 * rows * self.hidden * self.element

    def stream(self, rows: int, choice: MemoryChoice, checkpointing: bool) -> int:
        """Everything on the device for forward and backward of a stream of ``rows`` tokens, weights and logits apart;
        as if nearly all of it were a prefix whose responses follow in chunks."""
        tile = min(rows, choice.mlp_tile_rows or rows)
        total = self.around(rows) + self.attention_work(rows) + self.row_wise(tile)
        if not checkpointing:
            kept = self.all_kept(rows) + (0 if choice.mlp_tile_rows else self.mlp_kept(rows))
            return total + self.layers * kept + self.keys_values(rows) + self.gradient_sums(rows)
        inputs = self.layer_inputs(rows) + self.attention_results(rows)
        states = self.keys_values(rows) + self.gradient_sums(rows)
        total += self._at_hand(inputs) if choice.offload_layer_inputs else inputs
        return total + (self._at_hand(states) if choice.offload_prefix_states else states)

    def put_away(self, rows: int, choice: MemoryChoice) -> int:
        """What such a stream takes where it is put away."""
        inputs = self.layer_inputs(rows) + self.attention_results(rows)
        states = self.keys_values(rows) + self.gradient_sums(rows)
        return (inputs if choice.offload_layer_inputs else 0) + (states if choice.offload_prefix_states else 0)

    def _at_hand(self, of_all_layers: int) -> int:
        return of_all_layers * min(LAYERS_AT_HAND, self.layers) // self.layers


@dataclass(frozen=True)
class TowerSizes:
    """A vision tower. ``patches_per_token``: merged into one visual token; ``pixels``: numbers of one patch; ``out``:
    numbers of one visual token, features for the first decoder layers included."""

    blocks: int
    hidden: int
    intermediate: int
    patches_per_token: int
    pixels: int
    out: int
    element: int

    @classmethod
    def of(cls, family: Family, config: Any, element: int) -> TowerSizes | None:
        """From transformers' config; None without a tower."""
        if not family.reads_media:
            return None
        vision, geometry = config.vision_config, family.pixels(config)
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
        width = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
        pixels = geometry.channels * geometry.temporal_patch_size * geometry.patch_size**2
        out = config.get_text_config().hidden_size * (1 + family.deepstack_layers(config))
        return cls(vision.depth, hidden, width, geometry.patches_per_token, pixels, out, element)

    def at_work(self, tokens: int, trains: bool, checkpointing: bool) -> int:
        """What one call for so many visual tokens has alive, its input and output apart; ``trains``: its blocks do."""
        per_block = 10 * self.hidden + 3 * self.intermediate
        kept = per_block
        if trains:
            kept += self.hidden * self.blocks if checkpointing else per_block * self.blocks
        return tokens * self.patches_per_token * kept * self.element

    def around(self, tokens: int, trains: bool) -> int:
        """Pixels in fp32 and the output; where tower or merger train its gradient and the sum of the leaves, too."""
        copies = 3 if trains else 1
        return tokens * (self.patches_per_token * self.pixels * 4 + copies * self.out * self.element)

    def mergers_graph(self, tokens: int) -> int:
        """What a trained merger behind frozen blocks keeps: a norm in fp32, and two linear layers' inputs."""
        return tokens * self.patches_per_token * self.hidden * (4 + 4 * self.element)

    def media(self, tokens: int, choice: MemoryChoice, train: Collection[Part], checkpointing: bool) -> int:
        """Everything on the device for media of so many visual tokens, weights apart, where these parts train."""
        piece = min(tokens, choice.vision_piece_tokens or tokens)
        whole, graph = "tower" in train, 0
        if "merger" in train and not whole:
            graph = self.mergers_graph(tokens)
        return self.around(tokens, whole or graph > 0) + graph + self.at_work(piece, whole, checkpointing)


def mlp_width(text: Any) -> int:
    """Of the widest MLP that a token goes through; ``text``: transformers' config of a language model."""
    experts = getattr(text, "num_experts_per_tok", None) if getattr(text, "num_experts", 0) else None
    if not experts:
        return int(text.intermediate_size)
    return int(experts * text.moe_intermediate_size + (getattr(text, "shared_expert_intermediate_size", 0) or 0))
