"""Bytes of activations, from what autograd keeps of each operation of these models.

Letters: D hidden size, N query heads, W width of all query heads, K width of all key-value heads, I width of an MLP,
e bytes of an element. A norm computes in fp32: of its input it keeps 4 D, of the normalised one e D where its weight
trains, and its output, which the next linear layer keeps, e D (in fp32 the input is the residual stream itself). A
linear layer that is frozen keeps no input.
``vlm-pg plan`` and a run on a GPU count instead (``counted.py``); these sums, which cost nothing, are held against
counts and against measured peaks by tests. ``bench/flops.py`` has a coarser rule for comparing ways to compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_pg.models.logits import chunk_bytes, rows_of_chunks
from vlm_pg.models.memory_sizes import LAYERS_AT_HAND
from vlm_pg.plan.counted import LayerBytes, Variant
from vlm_pg.plan.counted_tower import TowerBytes
from vlm_pg.plan.setup import Setup
from vlm_pg.plan.shape import ModelShape, TowerShape

FP32 = 4
# Rows of fp32 logits that exist at one time: themselves, log-probabilities, their exponentials. Where entropies go
# back, too, there are a product of the two and gradients as well.
LOGIT_COPIES, LOGIT_COPIES_OF_ENTROPIES = 3, 5
TOWER_RUNNING, TOWER_BACKWARD = "tower of one prompt", "one block's backward"


@dataclass(frozen=True)
class TokenBytes:
    """What one token takes in one decoder layer; ``kept`` in between forward and backward, the others while it runs.

    ``input``: what a checkpointed layer keeps. ``memo``: and of its attention. ``recomputed``: what a layer keeps
    that is computed again, of the kind that keeps most. ``mlp``: the MLP's part of ``kept``. ``mlp_backward``: beside
    what is kept when most is alive in the MLP's backward; ``rest_backward``: in that of the rest, when the MLP's are
    gone.
    ``unread``: kept of a token of which the last layer needs keys and values only. ``keys_values``: of both.

    Of layers of several kinds it is the mean, but for what is the most of one layer.
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
    """Counted on the model's own code where ``shape`` has a counter; else the sums that a count gave.

    Sums: see the module.
    """
    text, e = shape.language, setup.element
    hidden, inner = text.hidden, text.intermediate
    width, narrow = text.heads * text.head_dim, text.kv_heads * text.head_dim
    attending = text.full_layers / text.layers
    frozen = "language" not in setup.train
    norm = hidden * (FP32 + (0 if setup.lora or frozen else e) + (0 if frozen else e))
    if (counter := shape.counter) is not None:
        variant = Variant(e, setup.train, setup.lora)
        found = [counter.layer(kind, variant) for kind in counter.kinds]
        largest = max(found, key=lambda each: each.kept)
        kept, recomputed, mlp = sum(each.kept for each in found) / len(found), largest.kept, largest.mlp
        mlp_backward, rest_backward = (max(values) for values in zip(*(_backward(each) for each in found), strict=True))
    else:
        # Rotated queries and keys, values, output, log-sum-exp.
        attention = e * (2 * width + 2 * narrow) + FP32 * text.heads
        of_heads = (width + narrow) * (FP32 + e) if shape.query_key_norms else 0
        if text.gated_query:
            attention += 2 * e * width
        # Gate, its activation, the other half, their product.
        mlp = (3 if frozen else 4) * inner * e
        norms, rest_backward = 2 * norm, 10 * hidden * e
        if setup.measures.mlp_tile_rows:
            # Norms, too, are computed again tile by tile: what stays is what comes out of both, and what goes into the
            # second; into the first goes the layer's input. In backward their fp32 temporaries are a tile's.
            norms, rest_backward = 3 * hidden * e, rest_backward - 2 * hidden * FP32
        kept = recomputed = norms + attention + of_heads + mlp
        # Gradients of the product's factors, and of the product where it is not kept itself.
        mlp_backward = (3 if frozen else 2) * inner * e + hidden * e
    return TokenBytes(
        kept=kept,
        input=hidden * e,
        memo=attending * (width * e + FP32 * text.heads),
        recomputed=recomputed,
        mlp=mlp,
        mlp_backward=mlp_backward,
        rest_backward=rest_backward,
        unread=norm + 4 * narrow * e + (2 * narrow * FP32 if shape.query_key_norms else 0),
        # Of fewer heads than sequence ranks each rank has one, of all rows.
        keys_values=attending * 2 * narrow * e * max(1, setup.sequence_parallel // text.kv_heads),
    )


def _backward(each: LayerBytes) -> tuple[float, float]:
    return each.mlp_backward, each.rest_backward


def update_activations(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes by what they are for, at the moment of an update where they are most.

    The largest pass: a stream of ``setup.stream`` tokens; where a group goes beyond the budget its prefix alone and a
    chunk behind it. With sequence parallelism each rank has its part of the rows.
    """
    each, layers, ranks = token_bytes(shape, setup), shape.language.layers, setup.sequence_parallel
    # Each rank has its part of the rows, and of a weight all of the gradient; what is found is divided below.
    logits, tied = ranks * _logits(shape, setup), ranks * _tied(shape, setup)
    if setup.chunked:
        found = _chunked(each, layers, logits, tied, setup)
    else:
        # The head's backward is done when that of the layers begins.
        head = _held(each, layers, setup.stream, setup.read_rows, setup) | {
            "logits": logits,
            "last hidden states": setup.read_rows * _last_norm(shape, setup),
        }
        below = _held(each, layers, setup.stream, setup.read_rows, setup, gone=1)
        layer = below | {"a layer's backward": _running(each, setup.stream, setup)}
        layer |= {"gradient of tied embeddings": tied} if tied else {}
        found = max(head, layer, key=lambda parts: sum(parts.values()))
    return {name: value / ranks for name, value in found.items()}


def _last_norm(shape: ModelShape, setup: Setup) -> float:
    """Per row, of the norm behind the last layer: its input in fp32, normalised, its output, and its gradient."""
    return shape.language.hidden * (FP32 + 3 * setup.element)


def _held(each: TokenBytes, layers: int, tokens: int, read: int, setup: Setup, gone: int = 0) -> dict[str, float]:
    """Between forward and backward of a pass, of whose tokens ``read`` go through all of the last layer.

    ``gone``: layers that have gone back already, when another one is computed again.
    """
    if setup.checkpointing:
        inputs = max(1, layers - gone)
        # The last layer attends from what is read; the one that is computed again has taken its output.
        outputs = (max(0, layers - 1) * tokens + read) if not gone else max(0, layers - gone - 1) * tokens
        if setup.measures.offload_layer_inputs:
            inputs, outputs = min(inputs, LAYERS_AT_HAND), min(outputs, LAYERS_AT_HAND * tokens)
        return {"layer inputs": inputs * tokens * each.input, "attention outputs": outputs * each.memo}
    kept = each.kept - (each.mlp if setup.measures.mlp_tile_rows else 0.0)
    return {"kept by layers": ((layers - 1) * tokens + read) * kept + (tokens - read) * each.unread}


def _running(each: TokenBytes, tokens: int, setup: Setup) -> float:
    """Of one layer's backward; with what a recomputed layer keeps for it.

    First the MLP goes back, tile by tile where it is tiled, then the rest.
    """
    tile = min(tokens, setup.measures.mlp_tile_rows or tokens)
    rest = tokens * (each.recomputed - each.mlp) if setup.checkpointing else 0.0
    mlp = tile * (each.mlp_backward + (each.mlp if setup.checkpointing or tile < tokens else 0.0))
    if tile < tokens:
        # Gradients of the whole MLP's output and input.
        mlp += 2 * tokens * each.input
    # Without checkpointing the last MLP's have gone from what is held.
    given_back = 0.0 if setup.checkpointing or tile < tokens else tokens * each.mlp
    return max(rest + mlp, rest + tokens * each.rest_backward - given_back)


def _chunked(each: TokenBytes, layers: int, logits: float, tied: float, setup: Setup) -> dict[str, float]:
    """Prefixes with their graph and the gradients that chunks leave there in fp32; and one chunk."""
    prefix, chunk, checkpointing = setup.prefix, setup.read_rows, setup.checkpointing
    found = _held(each, layers, prefix, 0, setup)
    at_hand = min(layers, LAYERS_AT_HAND) if setup.measures.offload_prefix_states else layers
    states = at_hand * prefix * each.keys_values
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
    if shape.counter is not None:
        variant = Variant(setup.element, setup.train, setup.lora)
        return shape.counter.head(predicted, rows, variant, setup.stage == 3, setup.entropy_bonus)
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
    """Of a trained tower its graph of all prompts of a step, of a trained merger behind frozen blocks its own; and what
    frozen blocks take while they run (``TOWER_RUNNING``): over one prompt, or over all where the merger trains; or a
    trained tower in its own backward, when the language model's is done (``TOWER_BACKWARD``).
    """
    tower, e = shape.tower, setup.element
    if tower is None or not setup.patches:
        return {}
    parts = setup.sequence_parallel
    each = _tower_bytes(shape, tower, setup)
    out = shape.language.hidden * e / tower.merge
    pixels = tower.patch_pixels * FP32
    if not setup.trains_vision:
        # A frozen one also runs for one sequence rank alone.
        return {
            "pixels": setup.patches * pixels,
            "visual features": setup.prompts * setup.patches * out,
            TOWER_RUNNING: _of_piece(setup.patches, 1, tower, setup) * each.running,
        }
    patches = setup.prompts * setup.patches
    if "tower" not in setup.train:
        return {
            "pixels": patches * pixels / parts,
            "visual features": 2 * patches * out,
            "merger's graph": patches / parts * each.kept,
            TOWER_RUNNING: _of_piece(patches, parts, tower, setup) * each.running,
        }
    at_once: float = patches / parts
    graph, backward = at_once * each.kept, each.backward
    if setup.measures.vision_piece_tokens:
        # A piece keeps its pixels alone, and is computed again by itself.
        graph, at_once = 0.0, _of_piece(patches, parts, tower, setup)
        backward += each.kept
    return {
        "pixels": patches * pixels / parts,
        "visual features": 2 * patches * out,
        "tower's graph": graph,
        TOWER_BACKWARD: at_once * backward,
    }


def _tower_bytes(shape: ModelShape, tower: TowerShape, setup: Setup) -> TowerBytes:
    """Counted on the model's own code where ``shape`` has a counter; else sums, as those of ``token_bytes``."""
    e = setup.element
    if shape.counter is not None:
        return shape.counter.tower(Variant(e, setup.train, setup.lora), setup.checkpointing)
    norm = tower.hidden * (FP32 + 2 * e)
    # All of queries, keys and values, rotated ones, attention's output twice (by frames, and joined).
    block = 2 * norm + 7 * tower.hidden * e + 4 * tower.intermediate * e
    running = tower.hidden * (8 * e + 4 * FP32) + 3 * tower.intermediate * e
    if "tower" not in setup.train:
        return TowerBytes(running, _merger(tower, e))
    kept = tower.layers * (tower.hidden * e if setup.checkpointing else block) + _merger(tower, e)
    # The pixels as the first layer keeps them.
    kept += tower.patch_pixels * e if e < FP32 else 0
    backward = 3 * tower.intermediate * e + 2 * tower.hidden * e + (block if setup.checkpointing else 0)
    return TowerBytes(running, kept, backward)


def _of_piece(patches: int, parts: int, tower: TowerShape, setup: Setup) -> float:
    """Patches that go through the tower at a time."""
    here = patches / parts
    return min(here, setup.measures.vision_piece_tokens * tower.merge or here)


def _merger(tower: TowerShape, e: int) -> float:
    """Norm, and two linear layers over the patches of a visual token with an activation between."""
    return tower.hidden * (FP32 + 2 * e) + 2 * tower.hidden * e
