"""Bytes of activations, from the tensors that autograd keeps of each operation of these models.

Letters: D hidden size, N query heads, W width of all query heads, K width of all key-value heads, I width of an MLP,
e bytes of an element. A norm computes in fp32: of its input it keeps 4 D, of the normalized one e D where its weight
trains, and its output, which the next linear layer keeps, e D (in fp32 the input is the residual stream itself). A
linear layer that is frozen keeps no input. Tests hold these sums against counts of whole passes and against measured
peaks; terms of whole streams are those that a run chooses by (``models/memory_sizes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.models.logits import chunk_bytes, rows_of_chunks
from vlm_pg.models.memory_sizes import FP32, RESIDENT_LAYERS, LanguageSizes, LinearAttention, TowerShape
from vlm_pg.plan.setup import Setup
from vlm_pg.plan.shape import ModelShape

# Rows of fp32 logits that exist at one time: themselves, log-probabilities, their exponentials. Where entropies go
# back, too, there are a product of the two and gradients as well.
LOGIT_COPIES, LOGIT_COPIES_OF_ENTROPIES = 3, 5
TOWER_RUNNING, TOWER_BACKWARD = "tower of one prompt", "one block's backward"


@dataclass(frozen=True)
class TokenBytes:
    """Of one token in one decoder layer; ``kept`` between forward and backward, the others while it runs.

    ``input``: kept by a checkpointed layer. ``memo``: and of its attention. ``recomputed``: kept by a layer that is
    computed again, of the kind that keeps most. ``mlp``: the MLP's part of ``kept``. ``mlp_backward``: beside the kept
    tensors when most is alive in the MLP's backward; ``rest_backward``: in that of the rest, when the MLP's are gone.
    ``unread``: kept of a token of which the last layer needs keys and values only. ``keys_values``: of both.

    Of layers of several kinds it is the mean, but for ``recomputed`` and both of backward.
    """

    kept: float
    input: float
    memo: float
    recomputed: float
    mlp: float
    mlp_backward: float
    rest_backward: float
    unread: float
    keys_values: float


def token_bytes(shape: ModelShape, setup: Setup) -> TokenBytes:
    """By the sums of the module's docstring."""
    text, e = shape.language, setup.element
    # Of fewer heads than sequence ranks each rank has one, of all rows.
    sizes = LanguageSizes(text, e, max(1, setup.sequence_parallel // text.kv_heads))
    hidden, width, narrow = text.hidden, text.query_width, text.key_width
    frozen = "language" not in setup.train
    norm = hidden * (FP32 + (0 if setup.lora or frozen else e) + (0 if frozen else e))
    # Rotated queries and keys, values, output, log-sum-exp.
    attention = e * (2 * width + 2 * narrow) + FP32 * text.heads
    attention += (width + narrow) * (FP32 + e) if shape.query_key_norms else 0
    attention += 2 * e * width if text.gated_query else 0
    # Gate, its activation, the other half, their product.
    mlp = (3 if frozen else 4) * text.intermediate * e
    norms, rest_backward = 2 * norm, 10 * hidden * e
    if setup.measures.mlp_tile_rows:
        # Norms, too, are computed again tile by tile: outputs of both stay, and the second one's input; the first one's
        # is the layer's. In backward their fp32 temporaries are a tile's.
        norms, rest_backward = 3 * hidden * e, rest_backward - 2 * hidden * FP32
    full, linear = norms + attention + mlp, 0.0
    if text.linear is not None:
        linear = norms + mlp + _linear_attention(hidden, text.linear)
    return TokenBytes(
        kept=(text.full_layers * full + (text.layers - text.full_layers) * linear) / text.layers,
        input=sizes.layer_inputs(1) / text.layers,
        memo=sizes.attention_results(1) / text.layers,
        recomputed=max(full, linear),
        mlp=mlp,
        # Gradients of the product's factors, and of the product where it is not kept itself.
        mlp_backward=(3 if frozen else 2) * text.intermediate * e + hidden * e,
        rest_backward=rest_backward,
        unread=norm + 4 * narrow * e + (2 * narrow * FP32 if shape.query_key_norms else 0),
        keys_values=sizes.keys_values(1) / text.layers,
    )


def recorded_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Of a ``RecordedRows``' token, a mixture's routes apart; of a prompt's, whose last attention is not read."""
    sizes, text = LanguageSizes(shape.language, setup.element), shape.language
    inputs, attention = sizes.layer_inputs(1), sizes.attention_results(1)
    return inputs + text.hidden * setup.element + attention, inputs + attention * (1 - 1 / text.full_layers)


def update_activations(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes by purpose, at the moment of an update where they are most.

    The largest pass: a stream of ``setup.stream`` tokens; where a group goes beyond the budget its prefix alone and a
    chunk behind it. With sequence parallelism each rank has its part of the rows.
    """
    each, layers, ranks = token_bytes(shape, setup), shape.language.layers, setup.sequence_parallel
    # Each rank has its part of the rows, and of a weight all of the gradient; the sum is divided below.
    logits, tied = ranks * _logits(shape, setup), ranks * _tied(shape, setup)
    if setup.chunked:
        found = _chunked(each, layers, logits, tied, setup)
    else:
        # The head's backward is done when that of the layers begins. The last norm: its input in fp32, normalized, its
        # output, and its gradient.
        head = _held(each, layers, setup.stream, setup.read_rows, setup) | {
            "logits": logits,
            "last hidden states": setup.read_rows * shape.language.hidden * (FP32 + 3 * setup.element),
        }
        below = _held(each, layers, setup.stream, setup.read_rows, setup, gone=1)
        layer = below | {"a layer's backward": _running(each, setup.stream, setup)}
        layer |= {"gradient of tied embeddings": tied} if tied else {}
        found = max(head, layer, key=lambda parts: sum(parts.values()))
    return {name: value / ranks for name, value in found.items()}


def _held(each: TokenBytes, layers: int, tokens: int, read: int, setup: Setup, gone: int = 0) -> dict[str, float]:
    """Between forward and backward of a pass, of whose tokens ``read`` go through all of the last layer.

    ``gone``: layers whose backward is done, when another one is computed again.
    """
    if setup.recorded:
        return {}
    if setup.checkpointing:
        inputs = max(1, layers - gone)
        # The last layer attends from rows that are read; the one that is computed again has taken its output.
        outputs = (max(0, layers - 1) * tokens + read) if not gone else max(0, layers - gone - 1) * tokens
        if setup.measures.offload_layer_inputs:
            inputs, outputs = min(inputs, RESIDENT_LAYERS), min(outputs, RESIDENT_LAYERS * tokens)
        return {"layer inputs": inputs * tokens * each.input, "attention outputs": outputs * each.memo}
    kept = each.kept - (each.mlp if setup.measures.mlp_tile_rows else 0.0)
    return {"kept by layers": ((layers - 1) * tokens + read) * kept + (tokens - read) * each.unread}


def _running(each: TokenBytes, tokens: int, setup: Setup) -> float:
    """Of one layer's backward; with the tensors of a recomputed layer.

    First the MLP goes back, tile by tile where it is tiled, then the rest.
    """
    tile = min(tokens, setup.measures.mlp_tile_rows or tokens)
    rest = tokens * (each.recomputed - each.mlp) if setup.checkpointing else 0.0
    # The layer's input is joined from records.
    rest += tokens * each.input if setup.recorded else 0.0
    mlp = tile * (each.mlp_backward + (each.mlp if setup.checkpointing or tile < tokens else 0.0))
    if tile < tokens:
        # Gradients of the whole MLP's output and input.
        mlp += 2 * tokens * each.input
    # Without checkpointing the last MLP's tensors are freed by then.
    freed = 0.0 if setup.checkpointing or tile < tokens else tokens * each.mlp
    return max(rest + mlp, rest + tokens * each.rest_backward - freed)


def _chunked(each: TokenBytes, layers: int, logits: float, tied: float, setup: Setup) -> dict[str, float]:
    """Prefixes with their graph and the gradients that chunks leave there in fp32; and one chunk."""
    prefix, chunk, checkpointing = setup.prefix, setup.read_rows, setup.checkpointing
    found = _held(each, layers, prefix, 0, setup)
    resident = min(layers, RESIDENT_LAYERS) if setup.measures.offload_prefix_states else layers
    states = resident * prefix * each.keys_values
    found["keys and values of prefixes"] = states if checkpointing else 0.0
    found["their gradients"] = states * FP32 / setup.element
    # A layer of a chunk attends to prefix and chunk laid side by side; of recomputed ones there is one at a time.
    side_by_side = (prefix + chunk) * each.keys_values * (1 if checkpointing else layers)
    of_chunk = sum(_held(each, layers, chunk, chunk, setup).values()) + side_by_side
    # The last backward, through the prefixes, comes when no chunk is left.
    found["a chunk, or a layer's backward"] = max(
        of_chunk + max(logits, _running(each, chunk, setup) + tied), _running(each, prefix, setup)
    )
    return found


def _logits(shape: ModelShape, setup: Setup) -> float:
    """The output head, forward and back: chunks of logits, and the gradients of its weight that chunks add up."""
    vocab = shape.language.vocab
    predicted = -(-(setup.read_rows + setup.generations) // setup.sequence_parallel)
    rows = min(predicted, chunk_rows(shape, setup, predicted))
    trained = 0 if setup.lora or "language" not in setup.train else setup.element * shape.language.hidden
    of_chunk = rows * FP32 * (LOGIT_COPIES_OF_ENTROPIES if setup.entropy_bonus else LOGIT_COPIES)
    if rows == predicted:
        return vocab * max(of_chunk, rows * setup.element + trained)
    if setup.stage == 3:
        # Chunks are calls of their own, of whose gradients of the weight the first two and their sum exist at a time.
        return vocab * max(of_chunk + trained, 3 * trained)
    # A chunk's logits, their gradient and their softmax, beside the one gradient that all add to.
    return vocab * (of_chunk + (rows * setup.element if setup.entropy_bonus else 0) + trained)


def chunk_rows(shape: ModelShape, setup: Setup, predicted: int) -> int:
    """Rows whose logits are held at a time, as ``Network.chunk_rows``."""
    least = most = setup.logits_bytes
    if setup.logits_follow and setup.checkpointing:
        tokens = (setup.read_rows if setup.chunked else setup.stream) // setup.sequence_parallel
        tile = min(tokens, setup.measures.mlp_tile_rows or tokens)
        most = chunk_bytes(least, tile * shape.language.intermediate * setup.element, setup.entropy_bonus)
    return rows_of_chunks(predicted, *(max(1, size // (FP32 * shape.language.vocab)) for size in (least, most)))


def _tied(shape: ModelShape, setup: Setup) -> float:
    """The head's gradient of an embedding that is both: it waits for the other one until the layers have gone back."""
    trained = shape.language.tied and "language" in setup.train and not setup.lora
    return float(setup.element * shape.language.hidden * shape.language.vocab) if trained else 0.0


def tower_activations(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Of a trained tower its graph of all prompts of a step, of a trained merger behind frozen blocks its own; and the
    tensors of running frozen blocks (``TOWER_RUNNING``): over one prompt, or over all where the merger trains; or of a
    trained tower in its own backward, when the language model's is done (``TOWER_BACKWARD``).
    """
    tower, e = shape.tower, setup.element
    if tower is None or not setup.patches:
        return {}
    parts = setup.sequence_parallel
    # Of a block: in half precision pixels as the first layer has them, and queries and keys in fp32 most of the rest.
    running: float = 37 * tower.hidden + tower.pixels * e
    if e == FP32:
        running = 3 * tower.intermediate * e + 14 * tower.hidden
    # A norm's and two linear layers' inputs, over the patches of a visual token; one for each output's part.
    merger = 4 * e * tower.hidden * tower.out / shape.language.hidden
    out = tower.out * e / tower.patches_per_token
    pixels = tower.pixels * FP32
    if not setup.trains_vision:
        # A frozen one also runs for one sequence rank alone.
        return {
            "pixels": setup.patches * pixels,
            "visual features": setup.prompts * setup.patches * out,
            TOWER_RUNNING: _of_piece(setup.patches, 1, tower, setup) * running,
        }
    patches = setup.prompts * setup.patches
    found = {"pixels": patches * pixels / parts, "visual features": 2 * patches * out}
    if "tower" not in setup.train:
        running *= _of_piece(patches, parts, tower, setup)
        return found | {"merger's graph": patches / parts * merger, TOWER_RUNNING: running}
    # Queries, keys and values, rotated ones, attention's output; norms in fp32 and a gated MLP, or LayerNorms.
    block = 10 * tower.hidden * e + 2 * tower.intermediate * e
    backward = 0.0
    if tower.gated:
        block = 2 * tower.hidden * (FP32 + 2 * e) + 7 * tower.hidden * e + 4 * tower.intermediate * e
        backward = 2 * tower.hidden * e + tower.intermediate * e
    backward += block if setup.checkpointing else 0
    # The pixels as the first layer keeps them.
    kept = merger + (tower.pixels * e if e < FP32 else 0)
    kept += tower.blocks * (tower.hidden * e if setup.checkpointing else block)
    at_once: float = patches / parts
    graph = at_once * kept
    if setup.measures.vision_piece_tokens:
        # A piece keeps its pixels alone, and is computed again by itself.
        graph, at_once = 0.0, _of_piece(patches, parts, tower, setup)
        backward += kept
    return found | {"tower's graph": graph, TOWER_BACKWARD: at_once * backward}


def _of_piece(patches: int, parts: int, tower: TowerShape, setup: Setup) -> float:
    """Patches that go through the tower at a time."""
    here = patches / parts
    return min(here, setup.measures.vision_piece_tokens * tower.patches_per_token or here)


def _linear_attention(hidden: int, linear: LinearAttention) -> float:
    """Of a gated delta rule in torch's operators, in fp32 chunks of 64 tokens; fitted to counts of that code."""
    per_head = 40 * linear.key_dim + 36 * linear.value_dim + 1128
    return linear.value_heads * per_head + 6 * hidden
