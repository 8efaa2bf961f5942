"""Random inputs on which each fused kernel is compared with what it replaces, and with float64.

Of each trial: the kernel's result, the usual one, and the one in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vlm_pg.models import fused_logits
from vlm_pg.models.kernel_trials import Trial, is_gated, kinds, product_of
from vlm_pg.models.layer_globals import layer_function
from vlm_pg.models.liger import without_liger
from vlm_pg.rollout.fused import (
    DRAWING,
    GATES,
    MERGING,
    NORMS,
    OWN,
    ROTATION,
    STATISTICS,
    SUMS,
    attention,
    drawing,
    layers,
    norms,
    rotation,
)
from vlm_pg.rollout.sampling import draw, policy_statistics


def _norms(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    for module in kinds(language_model, layers.is_norm):
        x, usual = random(1, 64, module.weight.shape[0]), without_liger(module)
        truth = torch.func.functional_call(usual, {"weight": module.weight.double()}, (x.double(),))
        got = layers.normed(module, layers.ResidualSums(), x)
        yield Trial(type(module).__name__, got, usual(x), truth)


def _gates(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    for module in kinds(language_model, is_gated):
        gate, up = random(1, 64, 512).chunk(2, -1)  # as a packed product has them
        truth = product_of(module, gate.double(), up.double())
        yield Trial(type(module).__name__, norms.silu_mul(gate, up), product_of(module, gate, up), truth)


def _sums(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    """The code of a layer whose attention returns random numbers, and whose feed-forward layer its input."""
    for layer in kinds(language_model, layers.has_sums):
        norm = layer.post_attention_layernorm
        plain = without_liger(norm)
        x, attended = (random(1, 64, norm.weight.shape[0]) for _ in range(2))

        def over(x: torch.Tensor, attended: torch.Tensor, norm: Any, layer: Any = layer) -> Any:
            return layers.ModuleView(
                layer,
                input_layernorm=lambda _: x,
                self_attn=lambda **_: (attended, None),
                linear_attn=lambda **_: attended,
                post_attention_layernorm=norm,
                mlp=lambda x: x,
            )

        def wide(x: torch.Tensor, plain: Any = plain) -> Any:
            return torch.func.functional_call(plain, {"weight": plain.weight.double()}, (x,))

        code, seen = layer_function(layer), over(x, attended, norm)
        usual = code(over(x, attended, plain), x, position_embeddings=None)
        truth = code(over(x, attended.double(), wide), x.double(), position_embeddings=None)
        model = layers.ModuleView(language_model, layers=[seen], norm=norm, modules=lambda norm=norm: [norm])
        with layers.FusedLayers(model, (NORMS, SUMS)):
            total = seen.forward(x, position_embeddings=None)
            normed = norm(total)
        yield Trial(f"the sum of {type(layer).__name__}", total, usual, truth)
        yield Trial("its norm", normed, plain(usual), wide(truth))


class _Attends:
    """A context that records its layer's queries, keys, values and queries of two pieces; by the kernel where the layer
    has deferred its rotation."""

    def __init__(self, deferred: layers.DeferredRotation | None = None):
        self._deferred = deferred
        self.found: tuple[torch.Tensor, ...] = ()

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        rows, deferred = len(q), self._deferred and self._deferred.take()
        of_pieces = torch.cat([q[:-1], q])
        if deferred:
            keys, values, repeats = torch.empty_like(k), torch.empty_like(v), q.shape[1] // k.shape[1]
            # Of two pieces, of which the last row reads the second only.
            starts = repeats * torch.arange(2 * rows, dtype=torch.int32, device=q.device).view(2, rows)
            starts[0, -1] = -1
            queries = q.new_zeros(2 * rows * repeats, *k.shape[1:])
            newest = torch.arange(rows, device=q.device)
            q = rotation.rotate_append(q, k, v, *deferred, keys, values, newest, queries, starts)
            of_pieces = queries.view(2 * rows, repeats, *k.shape[1:]).transpose(1, 2).flatten(1, 2)
            k, v, of_pieces = keys, values, torch.cat([of_pieces[: rows - 1], of_pieces[rows:]])
        self.found = (q, k, v, of_pieces)
        return q


def _rotations(language_model: torch.nn.Module, random: Any) -> Iterator[Trial]:
    """The code of an attention layer whose projections give random numbers, up to where it attends."""
    projections = ("q_proj", "k_proj", "v_proj")
    for attn in kinds(language_model, layers.rotates):
        rope = getattr(attn.config, "rope_parameters", None) or {}
        rotated = int(attn.head_dim * rope.get("partial_rotary_factor", 1.0))
        q, k, v = (random(1, 9, getattr(attn, name).out_features) for name in projections)
        # As they come: both halves alike.
        cos, sin = (random(1, 9, rotated // 2).repeat(1, 1, 2) for _ in range(2))

        def run(
            tensors: Sequence[torch.Tensor], seen: Any, forward: Any, context: _Attends
        ) -> tuple[torch.Tensor, ...]:
            seen.__dict__.update({name: lambda _, x=x: x for name, x in zip(projections, tensors, strict=False)})
            named = {"position_embeddings": tuple(tensors[3:]), "attention_mask": None, "attention_context": context}
            forward(hidden_states=tensors[0], **named)
            return context.found

        given = (q, k, v, cos, sin)
        seen = layers.ModuleView(attn, o_proj=lambda x: x)
        code = layer_function(without_liger(attn))
        plain, wide = layers.ModuleView(attn, o_proj=lambda x: x), layers.ModuleView(attn, o_proj=lambda x: x)
        for name in ("q_norm", "k_norm"):
            if norm := getattr(attn, name, None):
                norm = plain.__dict__[name] = without_liger(norm)
                weight = {"weight": norm.weight.double()}
                wide.__dict__[name] = lambda x, norm=norm, weight=weight: torch.func.functional_call(norm, weight, (x,))
        usual = run(given, plain, partial(code, plain), _Attends())
        truth = run([x.double() for x in given], wide, partial(code, wide), _Attends())
        model = layers.ModuleView(language_model, layers=[], norm=None, modules=lambda seen=seen: [seen])
        fused = layers.FusedLayers(model, (NORMS, ROTATION))
        assert fused.deferred is not None
        with fused.deferred:
            got = run(given, seen, seen.forward, _Attends(fused.deferred))
        names = ("queries", "keys", "values", "queries of pieces")
        for name, *parts in zip(names, got, usual, truth, strict=True):
            yield Trial(name, *parts)


def _merges(_: torch.nn.Module, random: Any) -> Iterator[Trial]:
    """Three rows of two heads over their own tokens and five pieces, against all six weighted by a softmax."""
    rows, heads, pieces = 3, 2, 5
    own, own_lse = random(rows, heads, 128), random(heads, rows).float()
    parts, parts_lse = random(pieces * rows * heads, 1, 128), random(1, pieces * rows * heads).float()
    starts = torch.arange(0, pieces * rows * heads, heads, dtype=torch.int32, device=own.device).view(pieces, rows)
    got, _lse = attention.merge_parts(own[None], own_lse[None], parts, parts_lse, starts, own.dtype)
    lse = torch.cat([own_lse.t()[None], parts_lse.view(pieces, rows, heads)])
    every = torch.cat([own[None], parts.view(pieces, rows, heads, 128)])
    usual = (F.softmax(lse, dim=0)[..., None] * every.float()).sum(0).to(own.dtype)
    yield Trial("merging", got, usual, (F.softmax(lse.double(), dim=0)[..., None] * every.double()).sum(0))


def _own(language_model: Any, random: Any) -> Iterator[Trial]:
    """Rows of one token, of a part and one token, and of two parts, against probabilities rounded before they are
    multiplied by the values, as by flash attention."""
    config = language_model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    counts, room, scale = (1, attention.PART_KEYS + 1, 2 * attention.PART_KEYS), 2 * attention.PART_KEYS, size**-0.5
    q, k, v = random(3, heads, size), *(random(3, room, kv_heads, size) for _ in range(2))
    lengths = torch.tensor(counts, dtype=torch.int32, device=q.device)
    parts = attention.own_attention(q, k, v, lengths, scale)
    nothing = lengths.new_empty(0, 3)
    got, _lse = attention.merge_parts(*parts, q[:0, :kv_heads], parts[1][0, :kv_heads, :0], nothing, q.dtype)

    def attended(wide: torch.dtype, shares_dtype: torch.dtype) -> torch.Tensor:
        keys, values = (x.to(wide).repeat_interleave(heads // kv_heads, 2) for x in (k, v))
        scores = torch.einsum("rnh,rcnh->rnc", q.to(wide), keys) * scale
        behind = torch.arange(room, device=q.device) >= lengths[:, None, None]
        scores = scores.masked_fill(behind, -torch.inf)
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = torch.einsum("rnc,rcnh->rnh", shares.to(shares_dtype).to(wide), values)
        return mixed / shares.sum(-1, keepdim=True)

    usual = attended(torch.promote_types(q.dtype, torch.float32), q.dtype).to(q.dtype)
    yield Trial("attention to own tokens", got, usual, attended(torch.float64, torch.float64))


def _drawing(_: torch.nn.Module, random: Any) -> Iterator[Trial]:
    """Their log-probabilities, of which no two are alike; half of all scores are ruled out."""
    scores = 4 * random(16, 5000).float()
    scores[:, ::2] = -torch.inf
    uniform = torch.linspace(0.01, 0.99, 16, dtype=torch.float64, device=scores.device)
    log_shares = scores.double().log_softmax(-1)
    tokens = torch.searchsorted(log_shares.exp().cumsum(-1), uniform[:, None], right=True)
    truth = log_shares.gather(-1, tokens)[:, 0]
    yield Trial("tokens", drawing.draw_tokens(scores, uniform)[1], draw(scores, uniform)[1], truth)


def _statistics(_: torch.nn.Module, random: Any) -> Iterator[Trial]:
    logits, temperature = 4 * random(3, 5000), 0.7
    tokens = torch.tensor([0, 17, 4999]).to(logits.device)
    log_shares = (logits.double() / temperature).log_softmax(-1)
    truth = (log_shares.gather(-1, tokens[:, None])[:, 0], -(log_shares.exp() * log_shares).sum(-1))
    found = fused_logits.token_statistics(logits, temperature, tokens)
    usual = policy_statistics(logits, temperature, tokens)
    for name, *results in zip(("log-probabilities", "entropies"), found, usual, truth, strict=True):
        yield Trial(name, *results)


TRIALS: dict[str, Callable[[torch.nn.Module, Any], Iterator[Trial]]] = {
    NORMS: _norms,
    SUMS: _sums,
    GATES: _gates,
    ROTATION: _rotations,
    MERGING: _merges,
    OWN: _own,
    DRAWING: _drawing,
    STATISTICS: _statistics,
}
