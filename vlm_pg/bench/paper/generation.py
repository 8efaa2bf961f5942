"""What generation costs, counted: the prompts once, and of the decode steps some, from which the others follow.

Between two changes of shape a step's counts are affine in its position: the same launches, and as many more bytes and
FLOPs for each token that it attends to. So of a run of steps the second and the last are counted, and between them is
summed exactly. The first one of a run, which makes larger tensors, is counted by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vlm_pg.attention.registration import ATTENTION_NAME
from vlm_pg.bench.case import set_attention, text_prompt
from vlm_pg.bench.contestant import CannotRun
from vlm_pg.bench.generation.case import GenerationCase
from vlm_pg.bench.paper.counts import Counts
from vlm_pg.bench.paper.devices import DEVICES, REACHED, capability_of
from vlm_pg.bench.paper.replaced import replaced
from vlm_pg.bench.paper.trees import Tree, extrapolated, tree_of, weighted
from vlm_pg.rollout import engine
from vlm_pg.rollout.decoders import CohortDecoder
from vlm_pg.rollout.fused.choice import prefill_unchecked
from vlm_pg.rollout.graphs import LEAST_REPLAYS, DecodeGraph, experts_wait_at
from vlm_pg.rollout.kv import BLOCK_TOKENS
from vlm_pg.rollout.ragged import RaggedDecoder, StepOperators, room_for
from vlm_pg.rollout.settings import RolloutSettings

Lap = Callable[[], Counts]
# More than any point needs: what fits is the reader's question, not the engine's.
_ROOM_GB = 1e6
# Tokens that transformers' generate is run for: a prefill and three steps, of which the last is a check.
GENERATED = 4


@dataclass
class Generation:
    """``prefill`` gives every response its first token, each of ``steps`` one more; ``middle`` is one halfway.

    ``captured``: launches of all steps that a CUDA graph makes at once; ``replays``: how often it does, if in every
    step; ``eager_steps``: how many are launched one by one, and as many as recording takes, in a first call;
    ``graphs_on``: on which of ``DEVICES``.
    """

    prefill: Tree = field(default_factory=dict)
    steps: Tree = field(default_factory=dict)
    middle: Tree = field(default_factory=dict)
    peak_bytes: float = 0
    end_bytes: float = 0
    captured: float = 0
    replays: int = 0
    eager_steps: int = 0
    graphs_on: list[str] = field(default_factory=list)


@contextmanager
def decoding_as_on_cuda() -> Iterator[None]:
    """Rollouts are rows of one ragged batch, on fused kernels, as on a GPU, also where fake tensors are a CPU's."""

    def as_on_cuda(policy: Any, store: Any, settings: Any, prompts: Any = None) -> Any:
        return RaggedDecoder(policy, store, settings, prompts, StepOperators.on_cuda(policy))

    with replaced(engine, decoder_for=as_on_cuda, prefill_layers=lambda policy, _: prefill_unchecked(policy)):
        yield


@contextmanager
def _read_at_once() -> Iterator[None]:
    """A list of values is one look at the device; a fake tensor would be asked for each of them."""

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.numel():
            tensor.flatten()[0].item()
        return _zeros(tuple(tensor.shape))

    with replaced(FakeTensor, tolist=tolist):
        yield


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def count_ours(case: GenerationCase, lap: Lap, as_on_cuda: bool = True) -> Generation:
    """All groups of ``case`` together, by ``RolloutEngine``'s own loop.

    ``as_on_cuda``: with the decoder that runs there, else with a CPU's.
    """
    set_attention(case, ATTENTION_NAME)
    settings = RolloutSettings(
        num_generations=case.generations,
        max_new_tokens=case.new_tokens,
        temperature=0.0,
        max_batch_rollouts=case.rollouts,
        memory_gb=_ROOM_GB,
    )
    rollouts = engine.RolloutEngine(case.policy, settings, seed=0)
    prompts = [text_prompt(f"bench {index}", ids) for index, ids in enumerate(case.prompts)]
    with decoding_as_on_cuda() if as_on_cuda else nullcontext(), _read_at_once(), torch.no_grad():
        return _Ours(engine._ContinuousBatch(rollouts, prompts, 0), case, lap).run()


class _Ours:
    """The loop of one ``generate`` call, in which steps are left out whose counts follow from others."""

    def __init__(self, batch: Any, case: GenerationCase, lap: Lap):
        self.batch, self.case, self.lap = batch, case, lap
        family = case.policy.family
        # Whether experts wait depends on the device.
        self.found = Generation(
            graphs_on=[
                name for name in DEVICES if not family.moe or experts_wait_at(case.policy, capability_of(name)) is None
            ]
        )
        self.has_graphs = bool(self.found.graphs_on)
        self._in_graph: list[Tree] = []
        self._before_graph: list[Tree] = []

    def run(self) -> Generation:
        batch = self.batch
        batch._admit()
        batch._sample()
        self.found.prefill = self._taken(self.lap())
        (cohort,) = batch.cohorts
        terms: list[tuple[float, Tree]] = []
        middle = self.case.new_tokens // 2
        with self._graph_apart():
            for first, last in self._runs():
                self._jump(cohort, first, first_of_run=True)
                terms.append((1, self._step()))
                if last == first:
                    near = far = terms[-1][1]
                else:
                    self._jump(cohort, first + 1)
                    near = far = self._step()
                    if last > first + 1:
                        self._jump(cohort, last)
                        far = self._step()
                    # The sum of an arithmetic series.
                    count = last - first
                    terms += [(count / 2, near), (count / 2, far)]
                if first <= middle <= last:
                    at = (first + 1, last)
                    self.found.middle = extrapolated(near, far, at, middle) if last > first + 1 else near
        self.found.steps = weighted(terms)
        self.found.captured = self.found.steps.pop("captured", 0)
        self.found.replays = self.case.new_tokens - 1 if self.has_graphs else 0
        for first, last in self._runs() if self.has_graphs else ():
            steps = last - first + 1
            self.found.eager_steps += REACHED.capture_steps if steps > LEAST_REPLAYS else steps
        self.found.middle.pop("captured", None)
        return self.found

    def _runs(self) -> list[tuple[int, int]]:
        """Tokens of the responses, first to last, whose steps have tensors of equal shapes."""
        steps, ragged = self.case.new_tokens - 1, isinstance(self.batch.decoder, RaggedDecoder)
        found, first = [], 1
        while first <= steps:
            room = room_for(first, self.case.new_tokens) if ragged else -(-first // BLOCK_TOKENS) * BLOCK_TOKENS
            last = min(room, steps)
            found.append((first, last))
            first = last + 1
        return found

    def _jump(self, cohort: Any, token: int, first_of_run: bool = False) -> None:
        """As if the responses had ``token`` tokens, the last of which the next step reads."""
        decoder = self.batch.decoder
        if cohort.num_generated != token:
            cohort.num_generated = token
            if isinstance(decoder, CohortDecoder):
                _fill(cohort.own, token - 1)
                # Both sizes are there for a moment, which no run ever has.
                self.lap()
            elif not first_of_run:
                decoder._running = decoder._set_rows()
        self._note(self.lap())
        self._forget()

    def _forget(self) -> None:
        self._in_graph.clear()
        self._before_graph.clear()

    def _step(self) -> Tree:
        """One token more for all: the model, and the choice of the next."""
        self.batch._forward()
        self.batch._sample()
        outside = self._taken(self.lap())
        in_graph = weighted((1, part) for part in self._in_graph)
        before = [(1.0, part) for part in self._before_graph]
        self._forget()
        return weighted([(1, outside), (1, in_graph), *before]) | {"captured": in_graph.get("launches", 0)}

    @contextmanager
    def _graph_apart(self) -> Iterator[None]:
        """What a CUDA graph would replay is counted apart from what the host launches."""
        if not self.has_graphs:
            yield
            return
        usual = DecodeGraph._forward
        outer = self

        def apart(graph: DecodeGraph) -> None:
            outer._before_graph.append(outer._taken(outer.lap()))
            usual(graph)
            outer._in_graph.append(outer._taken(outer.lap()))

        with replaced(DecodeGraph, _forward=apart):
            yield

    def _taken(self, counts: Counts) -> Tree:
        self._note(counts)
        return tree_of(counts)

    def _note(self, counts: Counts) -> None:
        self.found.peak_bytes = max(self.found.peak_bytes, counts.peak_bytes)
        self.found.end_bytes = counts.end_bytes


def _fill(own: Any, length: int) -> None:
    """A cohort's own tokens as if there were so many, in as many blocks as they need."""
    room = -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
    own.length = length
    own._keys_values = {
        layer: tuple(part.new_empty(part.shape[0], room, *part.shape[2:]) for part in pair)
        for layer, pair in own._keys_values.items()
    }


def count_generate(case: GenerationCase, lap: Lap) -> Generation:
    """transformers' ``generate`` of ``GENERATED`` tokens, looked at after every token.

    Raises:
        CannotRun: its steps do not grow evenly.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    from vlm_pg.bench.generation.transformers_generate import session

    laps: list[Counts] = []

    class AfterEveryToken(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            laps.append(lap())
            if len(laps) == short.new_tokens:
                # generate asks whether all have ended, and what has no values always says no.
                raise _Enough
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    short = replace(case, new_tokens=min(GENERATED, case.new_tokens))
    usual = case.model.generate

    def looked_at(*args: Any, **options: Any) -> Any:
        return usual(*args, stopping_criteria=StoppingCriteriaList([AfterEveryToken()]), **options)

    with suppress(_Enough), replaced(case.model, generate=looked_at), session(short) as generate:
        generate(short.new_tokens)
    return _from_first_steps(laps, case.new_tokens - 1)


def count_continuous(case: GenerationCase, lap: Lap) -> Generation:
    """transformers' continuous batching on a CPU, every step of it, in this thread instead of one of its own.

    Which requests a step has follows from lengths alone: nobody ends before its last token.
    """
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    from vlm_pg.bench.generation.transformers_continuous import session

    usual: Any = Manager.get_result

    def start(manager: Any) -> None:
        manager.background_thread_status.clear()
        manager.batch_processor, manager.current_batch = manager._create_batch_processor(), 0

    def get_result(manager: Any, *args: Any, **options: Any) -> Any:
        while manager.output_router.output_queue.empty():
            manager._generation_loop_body(manager.batch_processor, bootstrapping=False)
        return usual(manager, *args, **options)

    with replaced(Manager, start=start, get_result=get_result), session(case) as generate:
        generate(case.new_tokens)
        counts = lap()
    return Generation(steps=tree_of(counts), peak_bytes=counts.peak_bytes, end_bytes=counts.end_bytes)


class _Enough(Exception):
    """As many tokens as are looked at."""


def _from_first_steps(laps: list[Counts], steps: int) -> Generation:
    trees = [tree_of(one) for one in laps]
    found = Generation(prefill=trees[0], peak_bytes=laps[0].peak_bytes)
    if steps == 0 or len(trees) == 1:
        return found
    if len(trees) < GENERATED:
        found.steps = weighted((1, tree) for tree in trees[1:])
        found.middle = trees[1]
        found.peak_bytes = max(one.peak_bytes for one in laps)
        return found
    third = extrapolated(trees[1], trees[2], (1, 2), 3)
    if any(third[key] != trees[3][key] for key in ("flops", "launches")):
        raise CannotRun("three steps one after the other do not grow evenly, so the others do not follow from them")
    last = extrapolated(trees[1], trees[2], (1, 2), steps)
    found.steps = weighted([(steps / 2, trees[1]), (steps / 2, last)])
    found.middle = extrapolated(trees[1], trees[2], (1, 2), (steps + 1) // 2)
    growth = laps[2].peak_bytes - laps[1].peak_bytes
    found.peak_bytes = max(laps[0].peak_bytes, laps[1].peak_bytes, laps[1].peak_bytes + growth * (steps - 1))
    return found
