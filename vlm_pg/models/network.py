"""One transformers model over packed streams: its tower, decoder and output head, and ranks that run them in lockstep.

Where weights are sharded over ranks (ZeRO-3), running a module is a collective: its weights are gathered first, so all
ranks must run the same modules in the same order. In generation one rank still decodes when another is done, one
prefills while another samples. So before a module runs the ranks agree on the next one that some rank needs; ranks that
need it run it on their data, the others run it on one empty token and propose their own again.

transformers' decoder layers are called one by one, for three things its model's forward cannot do: the last layer runs
only on rows that are read, DeepStack features are added at known rows without masks, and no mask is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.registration import AttentionContext, check_grouped
from vlm_pg.attention.selfcheck import check_kernel, checked_kernel
from vlm_pg.attention.tree import PrefixTree
from vlm_pg.distributed import max_over_ranks, min_over_ranks
from vlm_pg.models.checks import PromptInterface
from vlm_pg.models.contexts import KeysValues, PrefixContext, StreamContext, TreeContext
from vlm_pg.models.family import Family
from vlm_pg.models.layer_globals import layer_global
from vlm_pg.models.linear_attention import route_linear_layers
from vlm_pg.models.logits import chunk_bytes, logits_fault, plain_weight, rows_of_chunks, token_logprobs
from vlm_pg.models.memory_sizes import mlp_width
from vlm_pg.models.recorded import LayerRun, hook_routers
from vlm_pg.models.settings import ModelSettings
from vlm_pg.models.stream_memory import MemoryChoice, StreamMemory
from vlm_pg.models.stream_share import rows_to_heads
from vlm_pg.models.tower import Grid, VisionPiece, pieces, run_pieces
from vlm_pg.models.weights import is_sharded
from vlm_pg.types import Kind

T = TypeVar("T")


class Lockstep:
    """The order of modules that all ranks follow together.

    Args:
        noops: for each module a run of it without effect; the same modules in the same order on every rank.
        device: where the ranks' backend exchanges numbers.

    A rank that is done calls ``finish``: it keeps running modules on nothing until all ranks are done.
    """

    def __init__(self, noops: Mapping[str, Callable[[], object]], device: torch.device):
        self._noops, self._names, self._device = noops, list(noops), device

    def run(self, module: str, work: Callable[[], T]) -> T:
        """``work()`` once all ranks have agreed on this module."""
        self._run_others_until(self._names.index(module))
        return work()

    def finish(self) -> None:
        """Run modules with the other ranks until all of them are done."""
        self._run_others_until(len(self._names))

    def _run_others_until(self, wanted: int) -> None:
        while (chosen := self._agree(wanted)) != wanted:
            self._noops[self._names[chosen]]()

    def _agree(self, wanted: int) -> int:
        return int(min_over_ranks({"module": wanted}, self._device)["module"])


class Network(PromptInterface, torch.nn.Module):
    """``model`` is transformers' model itself; ``lockstep`` orders its modules while ranks run them together."""

    def __init__(self, model: Any, family: Family, settings: ModelSettings):
        super().__init__()
        self.model = model
        self.family = family
        self.settings = settings
        self.lockstep: Lockstep | None = None
        self._independent = self._sharded = False
        self.use_memory(MemoryChoice.of(settings))
        route_linear_layers(self.language_model)
        self.kernel: Kernel = select_kernel(self.device, self.dtype, settings.attention_kernel)
        # The kernel and what it was checked for; None: it is used everywhere.
        self._checked: tuple[Kernel, tuple[Any, ...] | None] = self.kernel, (self.device, self.dtype)
        heads = family.head_shape(model.config)
        # Relative to plain softmax; fake tensors have no values to check.
        self.kernel_error = check_kernel(self.kernel, self.device, self.dtype, *heads) if has_values(model) else 0.0
        # Set for work that is counted and not computed; None: by ``logits_fault``, called here and not within a pass.
        self.fused_logits: bool | None = None
        if has_values(model):
            logits_fault(self.device, self.dtype)
        # Rows whose logits are held at a time; None: computed by ``chunk_rows``.
        self.logits_chunk_rows: int | None = None
        if settings.logits_chunk_mb != "auto":
            self.logits_chunk_rows = self._rows_of_logits(settings.least_logits_bytes)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def kernel_here(self) -> Kernel:
        """The kernel for a forward that begins here and now, checked.

        Under autocast activations have another dtype than the weights for which ``kernel`` was chosen, and the weights
        may have been moved or cast since. Read before any layer runs: within a checkpointed layer the check would
        become part of it.
        """
        kernel, checked_for = self._checked
        if checked_for is None or kernel.name == "oracle":
            return kernel
        heads = self.family.head_shape(self.model.config)
        if torch.is_autocast_enabled(self.device.type):
            return checked_kernel(self.device, torch.get_autocast_dtype(self.device.type), *heads)
        if (self.device, self.dtype) == checked_for:
            return kernel
        return checked_kernel(self.device, self.dtype, *heads, self.settings.attention_kernel)

    def use_kernel(self, kernel: Kernel) -> None:
        """Use this kernel everywhere, unchecked: for work that is counted and not computed."""
        self.kernel, self._checked, self.kernel_error = kernel, (kernel, None), 0.0

    @property
    def language_model(self) -> Any:
        return self.family.language_model(self.model)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def checkpointing(self) -> bool:
        """Whether decoder layers are recomputed in backward."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.language_model.layers)

    def run_module(self, name: str, work: Callable[[], T]) -> T:
        """Run a part of the model: at once, or when all ranks do."""
        return work() if self.lockstep is None else self.lockstep.run(name, work)

    def use_memory(self, choice: MemoryChoice) -> None:
        """Apply memory-saving measures from now on; results stay the same."""
        folder = self.settings.offload_folder
        self.stream_memory = StreamMemory(self.language_model, choice, self.device, folder)

    @property
    def _piece_patches(self) -> int:
        """Most patches in one call of the tower; 0: all."""
        return self.stream_memory.choice.vision_piece_tokens * self.pixels.patches_per_token

    def tower_calls(self, grid_thw: Sequence[Grid]) -> list[tuple[Grid, ...]]:
        """The grids (t, h, w) of each call that ``run_tower`` makes for these frames."""
        most = self._piece_patches
        return [piece.grids for piece in pieces(grid_thw, most)] if most else [tuple(grid_thw)]

    def run_tower(self, pixel_values: Tensor, grid_thw: Tensor, others: Sequence[VisionPiece] = ()) -> Tensor:
        """As ``Family.encode_vision``, in pieces of bounded size.

        ``others``: the pieces of processes that share these media. All make equally many calls: in lockstep no process
        may wait for the others' features with calls still to come.
        """

        def one_piece(pixels: Tensor, grids: Tensor) -> Tensor:
            return self.run_module("vision", lambda: self.family.encode_vision(self.model, pixels, grids))

        most = self._piece_patches
        if not most:
            return one_piece(pixel_values, grid_thw)
        cut = pieces(grid_thw.tolist(), most)
        count = max(len(cut), *(len(pieces(other.grids, most)) for other in others), 1)
        if not self._independent and is_sharded(self.family.vision_tower(self.model)):
            count = self._most_over_ranks(count)
        return run_pieces(
            one_piece,
            cut,
            pixel_values,
            self.pixels.empty_token(self.device),
            count,
            # Frozen blocks keep nothing, and a merger's activations are small beside recomputing the blocks.
            recompute="tower" in self.family.trained_parts(self.model),
        )

    def _most_over_ranks(self, count: int) -> int:
        return int(max_over_ranks({"count": count}, self.device)["count"])

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, D] -> [rows, V], in the weights' dtype."""
        return self.run_module("head", lambda: self.model.lm_head(hidden))

    def _rows_of_logits(self, size: int) -> int:
        return max(1, size // (4 * self.vocab_size))

    def chunk_rows(self, rows: int, stream_rows: int, entropy_graph: bool = False) -> int:
        """Rows, of ``rows`` that predict a token, whose logits are held at a time.

        Args:
            stream_rows: rows of the layers' backward, after the logits are freed; 0: unknown.
        """
        if self.logits_chunk_rows is not None:
            return self.logits_chunk_rows
        least = most = self.settings.least_logits_bytes
        if self.checkpointing and torch.is_grad_enabled():
            tile = min(stream_rows, self.stream_memory.choice.mlp_tile_rows or stream_rows)
            width = mlp_width(self.model.config.get_text_config())
            most = chunk_bytes(least, tile * width * self.dtype.itemsize, entropy_graph)
        return rows_of_chunks(rows, self._rows_of_logits(least), self._rows_of_logits(most))

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_graph: bool = False,
        stream_rows: int = 0,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target given its hidden state [R, D], and the entropy of that distribution.

        ``targets``: as ``logits.token_logprobs`` takes them. ``stream_rows``: as ``chunk_rows``. ``known``: both,
        recorded when the targets were sampled.
        """
        rows = self.chunk_rows(hidden.shape[0], stream_rows, entropy_graph or targets.dim() > 1)
        chunks = -(-hidden.shape[0] // rows)
        if not self._independent and is_sharded(self.model.lm_head):
            chunks = self._most_over_ranks(chunks)
        weight = self.head_weight() if self.lockstep is None else None
        fused = self.fuses_logits(hidden.dtype)
        return token_logprobs(
            self.logits, hidden, targets, temperature, rows, chunks, entropy_graph, weight, fused, known
        )

    @torch.no_grad()
    def top_logprobs(self, hidden: Tensor, temperature: float, k: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens given each hidden state [R, D]: int64 ids and fp32 log-probabilities, [R, k].

        ``vocabulary``: ids below it alone exist; of others, logits are left out.
        """
        pieces = hidden.split(self.chunk_rows(hidden.shape[0], 0))
        logits = (self.logits(piece)[:, :vocabulary].float() for piece in pieces)
        found = [(of_piece / temperature).log_softmax(-1).topk(k, -1) for of_piece in logits]
        return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])

    def recorded_kinds(self) -> dict[Kind, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that sampling records of a token."""
        text, layers = self.model.config.get_text_config(), self.family.layer_kinds(self.model.config)
        heads, _, head_dim = self.family.head_shape(self.model.config)
        kinds: dict[Kind, tuple[tuple[int, ...], torch.dtype]]
        kinds = {(layer, "input"): ((text.hidden_size,), self.dtype) for layer in range(len(layers) + 1)}
        for layer in (layer for layer, kind in enumerate(layers) if kind == "full_attention"):
            kinds |= {(layer, "out"): ((heads, head_dim), self.dtype), (layer, "lse"): ((heads,), torch.float32)}
        for layer in hook_routers(self.language_model):
            kinds[layer, "experts"] = (text.num_experts_per_tok,), torch.int64
        return kinds

    def recorded_bytes(self) -> int:
        """Of one token."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.recorded_kinds().values())

    def fuses_logits(self, dtype: torch.dtype) -> bool:
        """Whether logits from hidden states of ``dtype`` are read by the Triton kernels of ``fused_logits``."""
        if self.fused_logits is not None:
            return self.fused_logits
        return logits_fault(self.device, dtype) is None

    def head_weight(self) -> Tensor | None:
        """[V, D], where ``logits`` is only a product with it, see ``plain_weight``."""
        return plain_weight(self.model.lm_head)

    def hidden_states(self, *stream: Any) -> Tensor:
        """``run_layers``, in lockstep where ranks need it: the one forward behind generation, scoring and training."""
        return self.run_module("decoder", lambda: self.run_layers(*stream))

    def run_layers(
        self,
        input_ids: Tensor,
        positions_3T: Tensor,
        context: AttentionContext,
        features: Tensor | None = None,
        media_rows: Tensor | None = None,
        whole_layers: bool = False,
    ) -> Tensor:
        """Last hidden states [rows read, D] of a packed stream.

        Args:
            features: [M, D], or [M, 1 + n, D] for a family whose first n decoder layers get features of their own.
            whole_layers: every row goes through all of every layer, the last one included.
        """
        check_grouped(self.language_model)
        embeddings = self.model.get_input_embeddings()(input_ids)
        early: tuple[Tensor, ...] = ()
        if features is not None:
            assert media_rows is not None
            check_features(media_rows, features)
            if features.dim() == 3:
                features, *rest = features.unbind(1)
                early = tuple(rest)
            embeddings = embeddings.index_copy(0, media_rows, features.to(embeddings.dtype))
        if torch.is_grad_enabled() and not embeddings.requires_grad:
            # With a frozen language model and a trained tower a stream without media needs a graph, too: with sharded
            # weights other ranks gather them in backward.
            passes_on = self.settings.trains_vision and "language" not in self.family.trained_parts(self.model)
            embeddings.requires_grad_(passes_on)
        # In lockstep only whole layers run: the rows that are read must not decide which weights are gathered.
        trim = self.lockstep is None and not whole_layers
        positions = positions_3T[: self.family.rotary_axes]
        agreed, tiles = self._agreed_tiles(len(embeddings)), self.stream_memory.tiles
        with self.stream_memory.in_pass(agreed) as lane:
            if isinstance(context, StreamContext):
                context.lane = lane
            if context.recorded is not None and tiles is not None:
                context.recorded.in_tiles = partial(tiles.agreed_on, agreed)
            return run_decoder(self.language_model, embeddings, positions, context, media_rows, early, trim)

    def _agreed_tiles(self, rows: int) -> int | None:
        """Tiles of a pass where all ranks must make equally many, in lockstep also those with an empty pass."""
        tiles = self.stream_memory.tiles
        alone = self._independent and not self._sharded
        if tiles is None or alone or not is_sharded(self.language_model):
            return None
        return self._most_over_ranks(tiles.needed(rows))


def has_values(model: Any) -> bool:
    """False for a model on torch's fake tensors, which have shapes alone."""
    return not any(isinstance(parameter.data, FakeTensor) for parameter in model.parameters())


def check_features(media_rows: Tensor, features: Tensor) -> None:
    """Raise ValueError where there is not one visual feature [M, ...] for each media token [M]."""
    if features.shape[0] != media_rows.shape[0]:
        raise ValueError(
            f"The stream has {media_rows.shape[0]} media tokens but {features.shape[0]} visual features; prompt and "
            "pixels do not belong together."
        )


def noop_modules(network: Network) -> dict[str, Callable[[], object]]:
    """A run without effect of each module, for a rank that does not need it while others do."""

    def decoder() -> Tensor:
        token = torch.zeros(1, dtype=torch.int64, device=network.device)
        context = TreeContext(PrefixTree([1], [-1]), network.kernel_here)
        return network.run_layers(token, token.expand(3, 1), context)

    def head() -> Tensor:
        width = network.model.get_input_embeddings().embedding_dim
        return network.model.lm_head(torch.zeros(1, width, device=network.device, dtype=network.dtype))

    def vision() -> Tensor:
        return network.family.encode_vision(network.model, *network.pixels.empty_token(network.device))

    tower = {"vision": vision} if network.family.reads_media else {}
    return {**tower, "decoder": decoder, "head": head}


def run_decoder(
    language_model: Any,
    embeddings: Tensor,
    positions_AT: Tensor,
    context: AttentionContext,
    media_rows: Tensor | None = None,
    early_features: Sequence[Tensor] = (),
    trim: bool = True,
) -> Tensor:
    """Last hidden states of the rows that are read, after the final norm.

    Args:
        language_model: transformers' text model (layers, norm, rotary_emb).
        embeddings: [T, D], visual features already in place.
        positions_AT: int64 [A, T]; A rotary axes, 3 or, where the model has but one, 1.
        context: what the layers do; a ``TreeContext`` with a ``last_plan`` names the rows to read.
        media_rows: int64 [M], rows of visual tokens.
        early_features: DeepStack (Qwen3-VL): [M, D] each, added to the output of layer 0, 1, ... at ``media_rows``.
        trim: leave out in the last layer what is not read; else it is run on all rows and cut afterwards.

    Returns:
        [rows read, D]; all T rows where the context names none.
    """
    hidden = embeddings[None]
    # transformers takes [batch, T] where there is one axis, [3, batch, T] where there are three.
    rotary = language_model.rotary_emb(hidden, positions_AT if len(positions_AT) == 1 else positions_AT[:, None])
    last = len(language_model.layers) - 1
    recorder, recorded = context.recorder, context.recorded
    hooks = hook_routers(language_model) if recorder or recorded else getattr(language_model, "vlm_pg_router_hooks", {})
    for hook in hooks.values():  # that of a pass which was stopped, too
        hook.seen = None if recorder is None else []
    for index, layer in enumerate(language_model.layers):
        if recorder is not None:
            recorder.layer_input(index, hidden)
        of_read = False
        if index == last and isinstance(context, TreeContext) and context.last_plan is not None:
            # A recurrent layer must pass through every row.
            of_read = trim and hasattr(layer, "self_attn")
            run = partial(_last_layer, layer, rotary=rotary, context=context, trim=of_read)
        else:
            run = partial(_run, layer, rotary=rotary, context=context)
        if recorded is not None and isinstance(context, PrefixContext):
            _recorded_states(index, layer, rotary, context)
        if recorded is None:
            hidden = run(hidden)
        else:
            hidden = recorded.skip(LayerRun(index, index == last, of_read, layer, hooks.get(index), run), hidden)
        if recorder is not None and index in hooks:
            recorder.routed(index, hooks[index].take_seen(hidden.shape[1] if of_read else len(embeddings)))
        # Visual tokens are never read: behind a last layer cut to the rows that are, there is nothing to add.
        if index < len(early_features) and hidden.shape[1] == embeddings.shape[0]:
            assert media_rows is not None
            hidden = hidden.index_add(1, media_rows, early_features[index].to(hidden.dtype)[None])
    if recorder is not None:
        recorder.layer_input(last + 1, hidden)
        for hook in hooks.values():
            hook.seen = None
    return language_model.norm(hidden).squeeze(0)


def _run(layer: Any, hidden: Tensor, rotary: tuple[Tensor, ...], context: AttentionContext) -> Tensor:
    # The context decides what attends to what; no mask is built. A gradient that enters a checkpointed layer through
    # its hidden states reaches the weights; nothing else in the call needs one.
    out = layer(hidden, position_embeddings=rotary, attention_mask=None, attention_context=context)
    return out[0] if isinstance(out, tuple) else out


def _last_layer(layer: Any, hidden: Tensor, rotary: tuple[Tensor, ...], context: TreeContext, trim: bool) -> Tensor:
    """The last layer needs only keys and values of rows that are not read."""
    read, unread = context.split_rows(hidden.device)
    if not trim:
        return _run(layer, hidden, rotary, context)[:, read]
    # A sequence rank may have no unread rows where another one has some: all ranks split the layer, or none.
    if len(unread) or context.share is not None:
        if context.share is None:
            chosen, others = _SplitRows.apply(hidden, read, unread)
        else:
            chosen, others = hidden[:, read], hidden[:, unread]
        keys_values = partial(_keys_values, layer)
        operands = (others, *(part[..., unread, :] for part in rotary))
        if torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False) and layer.training:
            supplied = layer._gradient_checkpointing_func(keys_values, *operands)
        else:
            supplied = keys_values(*operands)
        context.supply_unread(layer.self_attn.layer_idx, supplied)
    else:
        chosen = hidden[:, read]
    return _run(layer, chosen, tuple(part[..., read, :] for part in rotary), context)


@torch.no_grad()
def _recorded_states(index: int, layer: Any, rotary: tuple[Tensor, ...], context: PrefixContext) -> None:
    """What responses need of a prefix's layer that runs in backward only: two of its projections, run now."""
    assert context.recorded is not None
    hidden = context.recorded.inputs(index)
    if hasattr(layer, "self_attn"):
        pair, share = _keys_values(layer, hidden, *rotary), context.share
        context.recorded_states(index, *(pair if share is None else rows_to_heads(*((x, share.rows) for x in pair))))
        return
    _, states = context.mixed(index, layer.linear_attn, layer.input_layernorm(hidden).squeeze(0))
    context.recorded_states(index, states.conv_tail, states.recurrent)


class _SplitRows(torch.autograd.Function):
    """Hidden states [1, T, D] in two disjoint parts.

    So backward copies each part's gradient; indexing would sort rows, because it accumulates duplicates.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows = (rows, others)
        return hidden[:, rows], hidden[:, others]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad = grad_outputs[0].new_empty(1, sum(map(len, ctx.rows)), grad_outputs[0].shape[-1])
        for rows, part in zip(ctx.rows, grad_outputs, strict=True):
            grad.index_copy_(1, rows, part)
        return grad, None, None


def _keys_values(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> KeysValues:
    """Keys and values [rows, K, H] as the layer's own attention makes them, without queries and outputs."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    key = attention.k_proj(normed).view(shape)
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    key = _rotate(attention, key.transpose(1, 2), cos, sin)
    value = attention.v_proj(normed).view(shape)
    return key[0].transpose(0, 1), value[0]


def _rotate(attention: Any, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the rotation of the layer itself: liger's, or the modeling file's."""
    rotation = layer_global(attention, "apply_rotary_pos_emb")
    # It takes queries, too: a copy of one key head, because liger's kernel rotates in place.
    return rotation(key[:, :1].detach().clone(), key, cos, sin)[1]
