"""The policy: one transformers model behind generation, scoring and training, with every sequence rank on its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from vlm_pg.attention.plan import reading_plan
from vlm_pg.attention.registration import AttentionContext
from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.models.checks import checked_responses
from vlm_pg.models.contexts import ChunkContext, PrefixContext, PrefixStates, StateStore, TreeContext
from vlm_pg.models.family import Family, refuse_media
from vlm_pg.models.network import Lockstep, Network, check_features, noop_modules
from vlm_pg.models.packing import ChunkBatch, PackedBatch, PrefixBatch, one_by_one, pack, pack_repeated, stream_share
from vlm_pg.models.settings import ModelSettings, PositionRule
from vlm_pg.models.stream_share import StreamShare
from vlm_pg.models.vision import VisionEncoder
from vlm_pg.types import Prompt, ResponseGroup, TopTokens, VisualFeatures

Batch = PackedBatch | PrefixBatch | ChunkBatch


class Rows(NamedTuple):
    """What layers run on: ``input_ids`` int64 [T], ``positions_3T`` int64 [3, T], ``media_rows`` int64 [M] that take
    ``features`` [M, ...], and those on the host."""

    input_ids: Tensor
    positions_3T: Tensor
    media_rows: Tensor | None
    features: Tensor | None
    media_rows_on_host: np.ndarray | None


def read_hidden(
    network: Network,
    batch: Batch,
    context: AttentionContext,
    features: Tensor | None = None,
    whole_layers: bool = False,
) -> Tensor:
    """As ``hidden_of_rows``, of a packed batch.

    Args:
        features: of the groups, joined group by group: media that groups share enter the stream once.
    """
    media_rows = on_host = None
    if not isinstance(batch, ChunkBatch):
        media_rows, on_host = batch.media_rows, batch.media_rows_on_host
        if features is not None and batch.feature_rows is not None:
            features = features[batch.feature_rows]
    rows = Rows(batch.input_ids, batch.positions_3T, media_rows, features, on_host)
    return hidden_of_rows(network, rows, context, batch.share, whole_layers)


def hidden_of_rows(
    network: Network, rows: Rows, context: AttentionContext, share: StreamShare | None, whole_layers: bool = False
) -> Tensor:
    """Last hidden states [rows read, D] of the rows that this rank computes.

    Args:
        whole_layers: as ``Network.run_layers``.
    """
    ids, positions, media_rows, features, on_host = rows
    if share is None:
        return network.hidden_states(ids, positions, context, features, media_rows, whole_layers)
    if features is not None and media_rows is not None:
        check_features(media_rows, features)
        assert on_host is not None
        media_rows, features = share.media(on_host, features)
    own_ids, own_positions = share.rows.take(ids), share.rows.take(positions, dim=1)
    if not len(own_ids):
        own_ids, own_positions = ids[:1], positions[:, :1]
    return network.hidden_states(own_ids, own_positions, context, features, media_rows, whole_layers)[: share.num_read]


def target_logprobs(
    network: Network,
    batch: PackedBatch | ChunkBatch,
    hidden: Tensor,
    temperature: float,
    entropy_graph: bool,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities fp32 [R] of all targets and entropies, on every sequence rank.

    Each rank's output head works on what its own rows predict. Losses need whole responses, and all ranks compute the
    same one; so each sends its own rows the gradient of its own targets.

    Args:
        hidden: [rows read, D], of this rank.
        known: the results, as ``Network.token_logprobs`` takes them.
    """
    if batch.share is None:
        chosen, stream_rows = hidden[batch.predict_rows], len(batch.input_ids)
        return network.token_logprobs(chosen, batch.targets, temperature, entropy_graph, stream_rows, known)
    targets, rows = batch.share.predictions(batch.predict_rows_on_host)
    mine = network.token_logprobs(
        hidden[rows.on(hidden.device)],
        targets.take(batch.targets),
        temperature,
        entropy_graph,
        len(batch.share.rows.mine),
        None if known is None else (targets.take(known[0]), targets.take(known[1])),
    )
    logprobs, entropies = (targets.gather(values) for values in mine)
    return logprobs, entropies


def top_logprobs(
    network: Network, batch: PackedBatch, hidden: Tensor, temperature: float, k: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """As ``Network.top_logprobs``, where each target is predicted, on every sequence rank."""
    if batch.share is None:
        return network.top_logprobs(hidden[batch.predict_rows], temperature, k, vocabulary)
    targets, rows = batch.share.predictions(batch.predict_rows_on_host)
    ids, logprobs = network.top_logprobs(hidden[rows.on(hidden.device)], temperature, k, vocabulary)
    return targets.gather(ids), targets.gather(logprobs)


P = ParamSpec("P")
T = TypeVar("T")


class Policy(Network):
    """A Qwen model whose language layers attend over shared prefixes; ``model`` is transformers' model itself."""

    def __init__(self, model: Any, processor: Any, family: Family, settings: ModelSettings, weights_version: int = 0):
        super().__init__(model, family, settings)
        self.processor = processor
        # How many optimizer steps the weights have had.
        self.weights_version = weights_version
        self.vision = VisionEncoder(
            self.run_tower,
            pixels=self.pixels,
            trains=settings.trains_vision,
            cache_bytes=settings.vision_cache_mb * 2**20,
            share=settings.share_prefix,
            device=partial(getattr, self, "device"),
        )

    def weights_changed(self, vision_trains: bool | None = None) -> None:
        """Call after every optimizer step: whatever was computed from the old weights may no longer be used.

        ``vision_trains``: whether the tower trains from now on, where that may have changed.
        """
        self.weights_version += 1
        self.vision.weights_changed(vision_trains)

    def use_tower_of(self, other: Policy) -> None:
        """Use the tower of ``other`` and the cache of its outputs."""
        assert self.family.tower is not None
        self.model.set_submodule(self.family.tower, self.family.vision_tower(other.model))
        self.vision = other.vision

    def positions(self, *args: Any, rule: PositionRule | None = None) -> Tensor:
        """Rotary positions int64 [3, P] of a prompt by ``settings.positions``, or by another rule.

        Positional arguments are those of ``Family.positions`` after the model.
        """
        return self.family.positions(rule or self.settings.positions, self.model, *args)

    def logprobs(
        self,
        groups: Sequence[ResponseGroup],
        features: Sequence[VisualFeatures] | None = None,
        temperature: float = 1.0,
        sequence: SequenceGroup = SINGLE_SP_RANK,
    ) -> list[list[Tensor]]:
        """Log-probability of every response token; differentiable.

        Args:
            groups: prompts with their responses' token ids.
            features: vision outputs per group; default: taken from the encoder (with graph if the tower trains and
                gradients are on).
            temperature: divides the logits.
            sequence: processes that score the same groups at the same time: each computes its share of the stream.

        Returns:
            Per group, per response: fp32 [R].

        Raises:
            ValueError: empty input, media tokens in a response, features of other weights.
        """
        batch, joined = self._packed(groups, features, sequence)
        # Ranks that are independent bypass the hooks on the policy: DeepSpeed's begin with a collective.
        call = self.forward if self._independent else self
        logprobs, _ = call(Policy.stream_logprobs, batch, joined, temperature)
        return batch.split(logprobs)

    @torch.no_grad()
    def top_tokens(
        self,
        groups: Sequence[ResponseGroup],
        k: int,
        temperature: float,
        sequence: SequenceGroup = SINGLE_SP_RANK,
        vocabulary: int | None = None,
    ) -> list[list[TopTokens]]:
        """The k most probable tokens at each position of each response; arguments and errors as of ``logprobs``.

        ``vocabulary``: of the ids below it alone; None: of all.
        """
        batch, joined = self._packed(groups, None, sequence)
        reads = reading_plan(batch.tree, batch.reads)
        context = TreeContext(batch.tree, self.kernel_here, reads, self.checkpointing, batch.share)
        hidden = read_hidden(self, batch, context, joined)
        found = top_logprobs(self, batch, hidden, temperature, k, vocabulary or self.vocab_size)
        pairs = zip(*map(batch.split, found), strict=True)
        return [[TopTokens(ids, values) for ids, values in zip(*of_group, strict=True)] for of_group in pairs]

    def _packed(
        self, groups: Sequence[ResponseGroup], features: Sequence[VisualFeatures] | None, sequence: SequenceGroup
    ) -> tuple[PackedBatch, Tensor | None]:
        """One stream and its visual features; see ``logprobs``."""
        batch = self.pack(groups)  # checks the groups, before the tower runs
        if sequence.size > 1:
            batch = replace(batch, share=stream_share(batch, sequence))
        if features is None:
            groups = groups if self.settings.share_prefix else one_by_one(groups)
            with_graph = self.vision.trains and torch.is_grad_enabled()
            prompts = [group.prompt for group in groups]
            features = self.vision.encode(prompts, with_graph=with_graph, sequence=sequence)
        return batch, self.join_features(groups, features)

    def pack(self, groups: Sequence[ResponseGroup]) -> PackedBatch:
        """The groups as one stream on the policy's device, checked against what the model can read."""
        for group in groups:
            self.check_group(group)
        return pack(groups, self.device) if self.settings.share_prefix else pack_repeated(groups, self.device)

    def encode_vision(self, prompts: Sequence[Prompt], sequence: SequenceGroup = SINGLE_SP_RANK) -> list[Prompt]:
        """The prompts with their visual features, without a graph; see ``VisionEncoder.encode``."""
        features = self.vision.encode(prompts, sequence=sequence)
        return [replace(prompt, features=item) for prompt, item in zip(prompts, features, strict=True)]

    def join_features(
        self, groups: Sequence[ResponseGroup], features: Sequence[VisualFeatures | None]
    ) -> Tensor | None:
        """Features of all groups in stream order, [M, D]; None without media. Refuses features of other weights.

        Where nothing is shared there is a copy for each response.
        """
        if len(features) != len(groups):
            raise ValueError(f"Got {len(features)} visual features for {len(groups)} groups; pass one per group.")
        tensors = []
        for group, item in zip(groups, features, strict=True):
            tensor = None if item is None else item.features
            rows = 0 if tensor is None else tensor.shape[0]
            if rows != group.prompt.num_visual_tokens:
                raise ValueError(
                    f"Prompt {group.prompt.sample_id!r} has {group.prompt.num_visual_tokens} media tokens but {rows} "
                    "visual features; pass the features of the same prompts in the same order."
                )
            if item is not None and not self.vision.is_current(item):
                raise ValueError(
                    f"Visual features of {group.prompt.sample_id!r} come from version {item.weights_version} of the "
                    f"vision tower, which is now at {self.vision.version}; encode the prompt again."
                )
            if tensor is not None:
                tensors += [tensor] * (1 if self.settings.share_prefix else len(group.responses))
        return torch.cat(tensors) if tensors else None

    def forward(self, run: Callable[Concatenate[Policy, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One of the passes below as the forward of this module, so that hooks on it (DeepSpeed, ZeRO-3) see the pass.

        ``policy(Policy.stream_logprobs, batch, features)`` returns ``policy.stream_logprobs(batch, features)``.
        """
        return run(self, *args, **kwargs)

    def stream_logprobs(
        self,
        batch: PackedBatch,
        features: Tensor | None,
        temperature: float = 1.0,
        entropy_graph: bool = False,
        whole_layers: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities fp32 [R] of all response tokens of a stream, and entropies fp32 [R] in nats.

        Args:
            features: [M, ...], as ``join_features`` returns them.
            entropy_graph: keep the entropies on the graph (one more tensor of logits a chunk in backward).
            whole_layers: every row goes through all of the last layer, too.
        """
        reads = reading_plan(batch.tree, batch.reads)
        context = TreeContext(batch.tree, self.kernel_here, reads, self.checkpointing, batch.share)
        context.recorded = recorded = batch.recorded if torch.is_grad_enabled() else None
        hidden = read_hidden(self, batch, context, features, whole_layers)
        known = None if recorded is None else recorded.known(self.device)
        return target_logprobs(self, batch, hidden, temperature, entropy_graph, known)

    def prefix_states(self, batch: PrefixBatch, features: Tensor | None) -> PrefixStates:
        """Prompts alone, for groups beyond memory: their states for the responses that follow in chunks.

        One backward goes through the prompts after those of all chunks. Exact: d loss / d weights =
        (d loss / d states)(d states / d weights) plus the chunks' own part. Memory is one prefix and one chunk,
        whatever the number of responses.
        """
        states = StateStore(self.stream_memory.prefix_target if self.checkpointing else None)
        reads = reading_plan(batch.tree, batch.reads)
        context = PrefixContext(states, batch.tree, self.kernel_here, reads, self.checkpointing, batch.share)
        context.recorded = batch.recorded if torch.is_grad_enabled() else None
        hidden = read_hidden(self, batch, context, features)
        context.close()
        return PrefixStates(hidden, states)

    def chunk_logprobs(
        self, batch: ChunkBatch, states: PrefixStates, temperature: float = 1.0, entropy_graph: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As ``stream_logprobs``, of some responses behind prompts that have run."""
        hidden = last_hidden = states.last_hidden_for_chunk()
        recorded = batch.recorded if torch.is_grad_enabled() else None
        if batch.input_ids.shape[0]:
            reads, kernel = reading_plan(batch.tree, batch.reads), self.kernel_here
            behind = batch.node_of_prefix, states.layers
            context = ChunkContext(batch.tree, reads, *behind, kernel, self.checkpointing, batch.share)
            context.recorded = recorded
            hidden = torch.cat([last_hidden, read_hidden(self, batch, context)])
        known = None if recorded is None else recorded.known(self.device)
        return target_logprobs(self, batch, hidden, temperature, entropy_graph, known)

    def prefix_loss(self, states: PrefixStates, loss_scale: float, every_weight: bool) -> Tensor:
        """Zero, whose backward carries what the chunks' backward passes left in ``states`` through the prompts.

        With ``every_weight`` it also reaches an untied output head, with zeros.
        """
        loss, head = states.surrogate_loss(loss_scale), self.model.lm_head
        tied = getattr(head, "weight", None) is self.model.get_input_embeddings().weight
        if every_weight and not tied and any(parameter.requires_grad for parameter in head.parameters()):
            loss = loss + self.logits(states.last_hidden.detach()[:1]).float().sum() * 0.0
        return loss

    def idle_vision_loss(self) -> Tensor:
        """Zero with a gradient path through the whole vision tower, for a rank whose questions have no media.

        Ranks that reduce gradients together must all touch the same parameters.
        """
        return self.run_tower(*self.pixels.empty_token(self.device)).sum() * 0.0

    @contextmanager
    def independent_ranks(self, scattered: bool) -> Iterator[None]:
        """Inside, without gradients, ranks need not make the same calls.

        ``scattered``: ranks hold shards of the weights and gather them module by module, in lockstep; else all weights
        are whole here. In the first case leaving waits for the other ranks, no other collective may be made inside, and
        a rank that raises does not wait: the others may be in the middle of a module, and only the launcher can end
        them.
        """
        self._independent, self._sharded = True, scattered
        self.lockstep = Lockstep(noop_modules(self), self.device) if scattered else None
        try:
            yield
            if self.lockstep is not None:
                lockstep, self.lockstep = self.lockstep, None
                with torch.no_grad():
                    lockstep.finish()
        finally:
            self.lockstep, self._independent, self._sharded = None, False, False

    def check_prompt(self, prompt: Prompt, response_tokens: int = 0) -> None:
        """
        Args:
            response_tokens: of the longest response.

        Raises:
            ValueError: ids, pixels and grids do not belong together.
            ModelError: media for a model that reads text alone.
            SampleError: as ``check_length``.
        """
        if not self.family.reads_media and (prompt.grid_thw is not None or prompt.num_visual_tokens):
            refuse_media(self.model, f"Prompt {prompt.sample_id!r} has images or videos")
        super().check_prompt(prompt)
        if response_tokens:
            self.check_length(prompt, response_tokens)

    def check_group(self, group: ResponseGroup) -> None:
        """Raise ValueError or SampleError for a group that cannot be scored exactly, and say why."""
        responses = checked_responses(group)
        self.check_prompt(group.prompt, max(len(response) for response in responses))
        for index, response in enumerate(responses):
            self.check_response_ids(response, f"Response {index} of {group.prompt.sample_id!r}")
