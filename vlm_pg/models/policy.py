"""The policy: one transformers model behind generation, scoring and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from vlm_pg.attention.integration import AttentionContext, check_grouped
from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.selfcheck import check_kernel, checked_kernel
from vlm_pg.distributed import max_over_ranks
from vlm_pg.models import checks
from vlm_pg.models.contexts import TreeContext
from vlm_pg.models.decoder import run_decoder
from vlm_pg.models.idle import idle_parts, idle_vision
from vlm_pg.models.linear_attention import route_linear_layers
from vlm_pg.models.logits import token_logprobs
from vlm_pg.models.packing import (
    ChunkBatch,
    PackedBatch,
    PrefixBatch,
    checked_responses,
    one_by_one,
    pack,
    pack_repeated,
)
from vlm_pg.models.prefix_run import PrefixStates, run_back, run_chunk, run_prefixes, select_features
from vlm_pg.models.registry import Family, refuse_media
from vlm_pg.models.settings import ModelSettings, PositionRule
from vlm_pg.models.turns import Turns
from vlm_pg.models.vision import VisionEncoder
from vlm_pg.types import Prompt, ResponseGroup, Sample, VisualFeatures

T = TypeVar("T")


class Policy(torch.nn.Module):
    """A Qwen model whose language layers attend over shared prefixes.

    ``model`` is transformers' model itself; ``processor`` its processor, a tokenizer if it reads text alone;
    ``weights_version`` counts optimizer steps.
    """

    def __init__(self, model: Any, processor: Any, family: Family, settings: ModelSettings):
        super().__init__()
        self.model = model
        self.processor = processor
        self.family = family
        self.settings = settings
        self.weights_version = 0
        # Set where training adds an entropy bonus; costs one more tensor of logits a chunk in backward.
        self.differentiable_entropies = False
        # Set where every row is wanted from every layer, the last one included.
        self.whole_layers = False
        self.turns: Turns | None = None
        self._own_pace = False
        route_linear_layers(family.language_model(model))
        self.kernel: Kernel = select_kernel(self.device, self.dtype, settings.attention_kernel)
        self._checked_for = (self.device, self.dtype)
        self.kernel_error = check_kernel(self.kernel, *self._checked_for, *self._head_shape)
        self.vision = VisionEncoder(
            lambda pixels, grids: self.in_turn("vision", lambda: family.encode_vision(model, pixels, grids)),
            merge_size=self._merge_size,
            trains=settings.train_vision,
            cache_bytes=settings.vision_cache_mb * 2**20,
            share=settings.share_prefix,
            device=self.device,
        )
        self.media_token_ids = self._media_token_ids()
        self.logits_chunk_rows = max(1, settings.logits_chunk_mb * 2**20 // (4 * self.vocab_size))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def _head_shape(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, head dim: the same in all layers of a registered family."""
        text = self.model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return text.num_attention_heads, text.num_key_value_heads, head_dim

    @property
    def kernel_here(self) -> Kernel:
        """The kernel for a forward that begins here and now, checked.

        Under autocast activations have another dtype than the weights for which ``kernel`` was chosen, and somebody may
        have moved or cast the weights since. Asked before any layer runs: within a checkpointed layer the check would
        become part of it.
        """
        device, dtype = self.device, self.dtype
        if self.kernel.name == "oracle":
            return self.kernel
        if torch.is_autocast_enabled(device.type):
            return checked_kernel(device, torch.get_autocast_dtype(device.type), *self._head_shape)
        if (device, dtype) == self._checked_for:
            return self.kernel
        return checked_kernel(device, dtype, *self._head_shape, self.settings.attention_kernel)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def pixel_factor(self) -> int:
        """Pixels per side of one visual token: patch size times merge size; 1 without a tower."""
        return self.model.config.vision_config.patch_size * self._merge_size if self.family.reads_media else 1

    @property
    def _merge_size(self) -> int:
        """Side of the square of patches that make one visual token."""
        return self.model.config.vision_config.spatial_merge_size if self.family.reads_media else 1

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def _media_token_ids(self) -> tuple[int, ...]:
        ids = {getattr(self.model.config, name, None) for name in self.family.media_token_fields}
        if self.processor is not None:
            ids |= {self.tokenizer.get_vocab().get(name) for name in self.family.media_token_names}
        return tuple(sorted(token for token in ids if token is not None))

    def weights_changed(self) -> None:
        """Call after every optimizer step: whatever was computed from the old weights may no longer be used."""
        self.weights_version += 1
        self.vision.weights_changed()

    def positions(self, *args: Any, rule: PositionRule | None = None) -> torch.Tensor:
        """Rotary positions int64 [3, P] of a prompt by ``settings.positions``, or by another rule.

        Positional arguments are those of ``Family.positions`` after the model.
        """
        return self.family.positions(rule or self.settings.positions, self.model, *args)

    def logprobs(
        self,
        groups: Sequence[ResponseGroup],
        features: Sequence[VisualFeatures] | None = None,
        temperature: float = 1.0,
    ) -> list[list[torch.Tensor]]:
        """Log-probability of every response token; differentiable.

        Args:
            groups: prompts with their responses' token ids.
            features: vision outputs per group; default: taken from the encoder (with graph if the tower trains and
                gradients are on).
            temperature: divides the logits.

        Returns:
            Per group, per response: fp32 [R].

        Raises:
            ValueError: empty input, media tokens in a response, features of other weights.
        """
        batch = self.pack(groups)  # checks the groups, before the tower runs
        if features is None:
            groups = groups if self.settings.share_prefix else one_by_one(groups)
            with_graph = self.vision.trains and torch.is_grad_enabled()
            features = self.vision.encode([group.prompt for group in groups], with_graph=with_graph)
        logprobs, _ = self(batch, self.join_features(groups, features), temperature)
        return batch.split(logprobs)

    def pack(self, groups: Sequence[ResponseGroup]) -> PackedBatch:
        """The groups as one stream on the policy's device, checked against what the model can read."""
        for group in groups:
            self.check_group(group)
        return pack(groups, self.device) if self.settings.share_prefix else pack_repeated(groups, self.device)

    def join_features(self, groups: Sequence[ResponseGroup], features: Sequence[VisualFeatures]) -> torch.Tensor | None:
        """Features of all groups in stream order, [M, D]; None without media. Refuses features of other weights.

        Where nothing is shared there is a copy for each response.
        """
        if len(features) != len(groups):
            raise ValueError(f"Got {len(features)} visual features for {len(groups)} groups; pass one per group.")
        tensors = []
        for group, item in zip(groups, features, strict=True):
            rows = 0 if item.features is None else item.features.shape[0]
            if rows != group.prompt.num_visual_tokens:
                raise ValueError(
                    f"Prompt {group.prompt.sample_id!r} has {group.prompt.num_visual_tokens} media tokens but {rows} "
                    "visual features; pass the features of the same prompts in the same order."
                )
            if item.weights_version != self.vision.version:
                raise ValueError(
                    f"Visual features of {group.prompt.sample_id!r} come from version {item.weights_version} of the "
                    f"vision tower, which is now at {self.vision.version}; encode the prompt again."
                )
            if item.features is not None:
                tensors += [item.features] * (1 if self.settings.share_prefix else len(group.responses))
        return torch.cat(tensors) if tensors else None

    def forward(self, batch: Any, *args: Any) -> Any:
        """One pass of the model, through this method so that hooks on the policy (DeepSpeed) see it.

        ``forward(PackedBatch, features [M, ...] or None, temperature) -> (logprobs fp32 [R], entropies fp32 [R])``:
        everything in one stream; log-probabilities of all response tokens, and entropies in nats (detached).
        ``forward(PrefixBatch, features) -> PrefixStates``: prefixes alone, for groups beyond memory.
        ``forward(ChunkBatch, PrefixStates, temperature) -> (logprobs, entropies)``: some responses behind them.
        ``forward(PrefixStates, loss_scale, every_weight) -> zero``: whose backward goes on through the prefixes.
        """
        if isinstance(batch, PrefixBatch):
            return run_prefixes(self, batch, *args)
        if isinstance(batch, ChunkBatch):
            return run_chunk(self, batch, *args)
        if isinstance(batch, PrefixStates):
            return run_back(self, batch, *args)
        return self._score(batch, *args)

    def _score(
        self, batch: PackedBatch, features: torch.Tensor | None, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context = TreeContext(batch.tree, self.kernel_here, batch.tree.reading(batch.reads), self.checkpointing)
        hidden = self.hidden_states(
            batch.input_ids, batch.positions_3T, context, select_features(batch, features), batch.media_rows
        )
        return self.token_logprobs(hidden[batch.predict_rows], batch.targets, temperature)

    def token_logprobs(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each target under the distribution its hidden state [R, D] predicts, and that distribution's entropy."""
        chunks = -(-hidden.shape[0] // self.logits_chunk_rows)
        if not self._own_pace and any(hasattr(w, "ds_id") for w in self.model.lm_head.parameters()):
            # ZeRO-3 gathers the head's weights at every call of it, on all ranks together.
            chunks = int(max_over_ranks({"chunks": chunks}, hidden.device)["chunks"])
        return token_logprobs(
            self.logits, hidden, targets, temperature, self.logits_chunk_rows, chunks, self.differentiable_entropies
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, D] -> [rows, V], in the weights' dtype."""
        return self.in_turn("head", lambda: self.model.lm_head(hidden))

    @property
    def checkpointing(self) -> bool:
        """Whether decoder layers are recomputed in backward."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.language_model.layers)

    @property
    def language_model(self) -> Any:
        return self.family.language_model(self.model)

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions_3T: torch.Tensor,
        context: AttentionContext,
        features: torch.Tensor | None = None,
        media_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden states [rows read, D] of a packed stream: the one forward behind generation, scoring, training.

        ``features``: [M, D], or [M, 1 + n, D] for a family whose first n decoder layers get features of their own.
        """
        return self.in_turn("decoder", lambda: self.run_layers(input_ids, positions_3T, context, features, media_rows))

    def run_layers(
        self,
        input_ids: torch.Tensor,
        positions_3T: torch.Tensor,
        context: AttentionContext,
        features: torch.Tensor | None,
        media_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """``hidden_states`` at once, whoever's turn it is."""
        check_grouped(self.language_model)
        embeddings = self.model.get_input_embeddings()(input_ids)
        early: tuple[torch.Tensor, ...] = ()
        if features is not None:
            assert media_rows is not None
            if features.shape[0] != media_rows.shape[0]:
                raise ValueError(
                    f"The stream has {media_rows.shape[0]} media tokens but {features.shape[0]} visual features; "
                    "prompt and pixels do not belong together."
                )
            if features.dim() == 3:
                features, *rest = features.unbind(1)
                early = tuple(rest)
            embeddings = embeddings.index_copy(0, media_rows, features.to(embeddings.dtype))
        # Ranks that take turns run whole layers only: which rows are read must not decide what weights are gathered.
        trim = self.turns is None and not self.whole_layers
        positions = positions_3T[: self.family.rotary_axes]
        return run_decoder(self.language_model, embeddings, positions, context, media_rows, early, trim)

    def idle_vision_loss(self) -> torch.Tensor:
        """Zero with a gradient path through the whole vision tower, for a rank whose questions have no media.

        Ranks that reduce gradients together must all touch the same parameters.
        """
        return idle_vision(self).sum() * 0.0

    def in_turn(self, part: str, work: Callable[[], T]) -> T:
        """Run a part of the model: at once, or when it is its turn on all ranks."""
        return work() if self.turns is None else self.turns.run(part, work)

    @contextmanager
    def at_own_pace(self, scattered: bool) -> Iterator[None]:
        """Inside, without gradients, ranks need not make the same calls.

        ``scattered``: weights lie with several ranks and are gathered part by part, so the ranks take turns; else all
        weights are at hand. In the first case leaving waits for the other ranks, no collective of one's own may be made
        inside, and a rank that raises does not wait: the others may be in the middle of a part, and only the launcher
        can end them.
        """
        self._own_pace = True
        self.turns = Turns(idle_parts(self), self.device) if scattered else None
        try:
            yield
            if self.turns is not None:
                turns, self.turns = self.turns, None
                with torch.no_grad():
                    turns.finish()
        finally:
            self.turns, self._own_pace = None, False

    def check_samples(self, samples: Sequence[Sample], where: object) -> None:
        """Raise ModelError if the model reads text alone and one of the samples, read from ``where``, has media."""
        if (what := checks.media_among(samples, where)) and not self.family.reads_media:
            refuse_media(self.model, what)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ValueError if ids, pixels and grids do not belong together, ModelError for media nobody could read."""
        if not self.family.reads_media and (prompt.grid_thw is not None or prompt.num_visual_tokens):
            refuse_media(self.model, f"Prompt {prompt.sample_id!r} has images or videos")
        checks.check_prompt(prompt, self._merge_size**2)

    def check_length(self, prompt: Prompt, response_tokens: int) -> None:
        """Raise SampleError ("too_long_for_model") if prompt and response go beyond the positions the model knows."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        checks.check_length(prompt, response_tokens, limit)

    def check_group(self, group: ResponseGroup) -> None:
        """Raise ValueError or SampleError for a group that cannot be scored exactly, and say why."""
        responses = checked_responses(group)
        self.check_prompt(group.prompt)
        self.check_length(group.prompt, max(len(response) for response in responses))
        for index, response in enumerate(responses):
            checks.check_response_ids(group, index, response, self.vocab_size, self.media_token_ids)
