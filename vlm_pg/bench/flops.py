"""Floating-point operations and activation memory from a model's shape; a multiply-add counts as two operations.

Backward costs a linear layer twice its forward (one product for the input, one for the weight). Flash attention makes
2 products forward and 5 backward, because it computes the scores again. Checkpointing adds one forward of all layers.

Two ways of counting a step: ``step_flops`` is the least that repeating or sharing a prefix costs, every token through
every layer, which bounds compare; ``done_flops`` is what a contestant does, which a count of its operations must equal.
Of generation ``generation_flops`` and ``forward_done_flops`` are the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlm_pg.bench.shapes import MERGED_PATCHES, PATCH_PIXELS, WINDOW_PATCHES, LanguageShape, TowerShape
from vlm_pg.bench.work import ForwardDone, GenerationWork, StepDone, Work, grouped_done

# The logits of at most this much memory are kept until backward by whoever chunks them, and, but for long streams that
# are computed again, held at a time (model.logits_chunk_mb=auto).
CHUNK_BYTES = 256 * 2**20
LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5


def token_flops(shape: LanguageShape) -> float:
    """Forward operations of one token in all layers, without the pairs of softmax attention and without the head."""
    total = shape.layers * _mlp_flops(shape) + shape.full_layers * _projection_flops(shape)
    return total + (linear_attention_flops(shape) if shape.linear else 0)


def _mlp_flops(shape: LanguageShape) -> int:
    return 2 * 3 * shape.hidden * shape.intermediate


def _projection_flops(shape: LanguageShape) -> int:
    """Of one token in one layer with softmax attention: queries, keys, values and output."""
    width = shape.heads * shape.head_dim
    queries = width * (2 if shape.gated_query else 1)
    return 2 * (shape.hidden * (queries + 2 * shape.kv_heads * shape.head_dim) + width * shape.hidden)


def linear_attention_flops(shape: LanguageShape) -> float:
    """Forward operations of one token in all gated linear-attention layers.

    Projections of query, key, value, output gate, decay and step size, and the output projection; a short convolution
    over query, key and value; and per value head, on its state S [key_dim, value_dim]: decay it, read it with the key,
    add the outer product of key and correction, read it with the query (1 + 2 + 2 + 2 operations per entry of S).
    Source of the recurrence: Gated Delta Networks, arXiv 2412.06464, equation 10.
    """
    linear = shape.linear
    assert linear is not None
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    projections = 2 * shape.hidden * (2 * keys + 2 * values + 2 * linear.value_heads) + 2 * values * shape.hidden
    convolution = 2 * linear.conv_width * (2 * keys + values)
    recurrence = 7 * linear.value_heads * linear.key_dim * linear.value_dim
    return linear.layers * (projections + convolution + recurrence)


def pair_flops(shape: LanguageShape) -> float:
    """Forward operations of one (query, key) pair in all softmax-attention layers: score and weighted sum."""
    return shape.full_layers * 4 * shape.heads * shape.head_dim


def step_flops(shape: LanguageShape, work: Work, checkpointing: bool) -> float:
    """Operations of forward and backward."""
    again = 1 if checkpointing else 0
    linear = work.tokens * token_flops(shape) * (1 + LINEAR_BACKWARD + again)
    attention = work.pairs * pair_flops(shape) * (1 + ATTENTION_BACKWARD + again)
    head = work.logit_rows * 2 * shape.hidden * shape.vocab * (1 + LINEAR_BACKWARD)
    return linear + attention + head


def done_flops(shape: LanguageShape, done: StepDone, checkpointing: bool) -> float:
    """Operations of forward and backward as a contestant makes them, all weights trained.

    torch's checkpoint ends a recomputation as soon as backward has what it needs: before the MLP's last product, and
    where a row gives its keys and values alone, before the values. Products of the rotary embedding, a millionth of
    the rest, are left out. The last layer is one with softmax attention.
    """
    linear, attention, head = _done_flops(shape, done)
    total = linear * (1 + LINEAR_BACKWARD)
    if checkpointing:
        layer, down, keys = _layer_flops(shape), _mlp_flops(shape) // 3, _keys_flops(shape)
        inner = token_flops(shape) - layer - (shape.layers - 1) * down
        total += done.tokens * inner + done.last_rows * (layer - down) + done.last_keys * keys
    again = 1 if checkpointing and not done.attention_kept else 0
    total += attention * (1 + ATTENTION_BACKWARD + again)
    return total + head * (1 + LINEAR_BACKWARD) + done.logit_rows_again * _head_flops(shape)


def forward_done_flops(shape: LanguageShape, done: ForwardDone) -> float:
    """Operations of forward passes alone as a contestant makes them, a whole rollout's for one; as ``done_flops``."""
    return sum(_done_flops(shape, done))


def _done_flops(shape: LanguageShape, done: ForwardDone) -> tuple[float, float, float]:
    """Forward: in linear layers, in attention, in the output head. The last layer is one with softmax attention."""
    layer = _layer_flops(shape)
    linear = done.tokens * (token_flops(shape) - layer) + done.last_rows * layer
    linear += done.last_keys * 2 * _keys_flops(shape)
    pairs = (shape.full_layers - 1) * done.pairs + done.last_pairs
    return linear, pairs * 4 * shape.heads * shape.head_dim, done.logit_rows * _head_flops(shape)


def _layer_flops(shape: LanguageShape) -> int:
    """Of one token in one layer with softmax attention, without its pairs."""
    return _mlp_flops(shape) + _projection_flops(shape)


def _keys_flops(shape: LanguageShape) -> int:
    """Of one token's keys in one layer; as many are its values'."""
    return 2 * shape.hidden * shape.kv_heads * shape.head_dim


def _head_flops(shape: LanguageShape) -> int:
    return 2 * shape.hidden * shape.vocab


def least_step_flops(shape: LanguageShape, prefix: int, lengths: Sequence[int]) -> float:
    """The least a step can do: each token once, exact pairs, in the last layer only what is read, nothing twice."""
    return done_flops(shape, grouped_done(prefix, lengths, chunk_rows=sum(lengths)), checkpointing=False)


def chunk_rows(shape: LanguageShape) -> int:
    """Rows whose fp32 logits fit into ``CHUNK_BYTES``."""
    return max(1, CHUNK_BYTES // (4 * shape.vocab))


def forward_flops(shape: LanguageShape, work: Work) -> float:
    """Operations of a forward pass alone."""
    head = work.logit_rows * 2 * shape.hidden * shape.vocab
    return work.tokens * token_flops(shape) + work.pairs * pair_flops(shape) + head


def parameter_count(shape: LanguageShape) -> float:
    """Weights of the language model in linear layers and embeddings (norms and biases are left out)."""
    linear_state = 7 * shape.linear.value_heads * shape.linear.key_dim * shape.linear.value_dim if shape.linear else 0
    in_layers = (token_flops(shape) - (shape.linear.layers * linear_state if shape.linear else 0)) / 2
    return in_layers + shape.hidden * shape.vocab * (1 if shape.tied else 2)


def layer_elements(shape: LanguageShape) -> float:
    """Elements one layer keeps for backward, per token.

    Inputs and normalised inputs of both halves in the model's dtype and in fp32 (8 x hidden), queries, keys and values
    before and after the rotation, the attention's output, and four tensors of the MLP's width.
    """
    heads = shape.heads * shape.head_dim
    return 8 * shape.hidden + 2 * (heads + 2 * shape.kv_heads * shape.head_dim) + heads + 4 * shape.intermediate


def activation_bytes(
    shape: LanguageShape,
    work: Work,
    checkpointing: bool,
    element_bytes: int,
    logit_rows: int | None = None,
    attention_kept: bool = False,
) -> float:
    """Peak activation memory of forward and backward, without weights and their gradients.

    With checkpointing: each layer's input, plus everything one layer keeps while it is computed again;
    ``attention_kept``: and each full-attention layer's output and log-sum-exp, as ours keeps them in order not to
    compute attention twice. Logits are held in the model's dtype and in fp32, for ``logit_rows`` rows (default: those
    of ``work``).
    """
    per_layer = layer_elements(shape) * element_bytes
    kept = shape.layers * shape.hidden * element_bytes + per_layer if checkpointing else shape.layers * per_layer
    if checkpointing and attention_kept:
        kept += shape.full_layers * shape.heads * (shape.head_dim * element_bytes + 4)
    rows = work.held_logit_rows if logit_rows is None else logit_rows
    return work.held_tokens * kept + rows * shape.vocab * (element_bytes + 4)


def bounds(shape: LanguageShape, theirs: Work, ours: Work, checkpointing: bool) -> dict[str, float]:
    """How many times less ``ours`` is than ``theirs``: tokens, attention pairs, operations, tokens held in memory."""
    return {
        "tokens": theirs.tokens / ours.tokens,
        "attention": theirs.pairs / ours.pairs,
        "flops": step_flops(shape, theirs, checkpointing) / step_flops(shape, ours, checkpointing),
        "held_tokens": theirs.held_tokens / ours.held_tokens,
    }


def generation_flops(shape: LanguageShape, work: GenerationWork) -> float:
    """Operations of prefill and decoding."""
    return forward_flops(shape, work.prefill) + forward_flops(shape, work.decode)


def kv_bytes(shape: LanguageShape, work: GenerationWork, element_bytes: int) -> float:
    """Keys and values of all softmax-attention layers, at the end of generation."""
    return work.kv_tokens * 2 * shape.full_layers * shape.kv_heads * shape.head_dim * element_bytes


def generation_bytes(shape: LanguageShape, work: GenerationWork, element_bytes: int) -> float:
    """Peak memory above the weights: keys and values, one layer's tensors for the tokens of a pass, fp32 logits."""
    heads = shape.heads * shape.head_dim
    per_token = 4 * shape.hidden + 3 * shape.intermediate + 3 * heads + 4 * shape.kv_heads * shape.head_dim
    layer = work.prefill.held_tokens * per_token * element_bytes
    logits = 3 * 4 * work.prefill.held_logit_rows * shape.vocab
    return kv_bytes(shape, work, element_bytes) + layer + logits


def tower_flops(tower: TowerShape, patches: int, frame_patches: int, out: int) -> float:
    """Operations of Qwen2.5-VL's vision tower, forward.

    Per patch its embedding and in each layer queries, keys, values, output projection and a gated MLP; a patch meets
    the patches of its whole frame or those of a window (windows that the frame's edge cuts count whole). The merger
    takes four patches through one layer of their joint width and one to ``out``.
    Source of the layers: transformers' ``Qwen2_5_VisionTransformerPretrainedModel``.

    Args:
        patches: of all frames.
        frame_patches: of one temporal patch, which is two frames.
        out: width of the language model.
    """
    linear = tower.layers * 2 * (4 * tower.hidden**2 + 3 * tower.hidden * tower.intermediate)
    whole = len(tower.whole_frame_layers)
    met = whole * frame_patches + (tower.layers - whole) * min(WINDOW_PATCHES, frame_patches)
    joint = MERGED_PATCHES * tower.hidden
    merger = 2 * (joint * joint + joint * out) / MERGED_PATCHES
    return patches * (2 * PATCH_PIXELS * tower.hidden + linear + met * 4 * tower.hidden + merger)
