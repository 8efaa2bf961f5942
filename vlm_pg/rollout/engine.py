"""Sampling G answers per question: one vision pass, one prefill, one copy of what prompts share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from vlm_pg.distributed import SINGLE_SP_RANK, SequenceGroup
from vlm_pg.errors import ConfigError
from vlm_pg.memory import GIB
from vlm_pg.metrics import Metric
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.models.policy import Policy
from vlm_pg.models.recorded import ForwardBudget
from vlm_pg.rollout.admission import Booking, WaitingPrompts, budget_bytes, check_fits, rounds
from vlm_pg.rollout.contracts import Sampler
from vlm_pg.rollout.decoding import Cohort, Decoder, FinishedRollout
from vlm_pg.rollout.fused.choice import prefill_layers
from vlm_pg.rollout.graphs import GraphUse
from vlm_pg.rollout.kv import PrefixStore
from vlm_pg.rollout.merged import adapter_merged
from vlm_pg.rollout.prefill import Prefill
from vlm_pg.rollout.prefix_attention import DividedPrompts
from vlm_pg.rollout.ragged import decoder_for
from vlm_pg.rollout.recording import StepRing
from vlm_pg.rollout.sampling import StopStrings, TokenSampler, rollout_key, uniforms
from vlm_pg.rollout.settings import RolloutSettings
from vlm_pg.tally import Tally
from vlm_pg.types import FinishReason, Prompt, RecordedForward, RecordedRows, Rollout

# Cohorts are compacted once a quarter of their rollouts are finished: copying keys and values costs too.
COMPACT_THRESHOLD = 0.75
# At least this share of the rollouts enters at a time, unless none waits behind them: admission copies the
# store and adds a cohort, which is a call more in every layer.
MIN_ADMITTED_SHARE = 0.25

logger = logging.getLogger(__name__)

PROMPT_TOKENS = Metric("generation/prompt_tokens", "tokens", "sum")
PREFILL_TOKENS = Metric("generation/prefill_tokens", "tokens", "sum")
PROMPTS_DIVIDED = Metric("generation/prompts_divided", "prompts", "sum")
NEW_TOKENS = Metric("generation/new_tokens", "tokens", "sum")
PEAK = Metric("generation/peak_gib", "GiB of keys and values", "largest")


@dataclass
class RolloutStats:
    """What one ``generate`` call did.

    ``prompt_tokens`` counts every prompt once (with ``model.share_prefix`` off once per rollout), ``prefill_tokens``
    what of them was computed: less where prompts share.
    ``prompts_divided``: of how many the keys and values lay in parts on several processes.
    ``peak_bytes``: the most that keys, values and states were booked for at a time. ``cohorts``: admissions.
    ``graphs``: whether steps were replayed from CUDA graphs, how many, and if not, why.
    """

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    cohorts: int = 0
    peak_bytes: int = 0
    prompts_divided: int = 0
    graphs: GraphUse = field(default_factory=GraphUse)


class RolloutEngine(Sampler):
    """A ``Sampler`` with the policy itself: no second copy of the weights, no transfer, the trainer's own numbers.

    Prompts enter as memory allows and leave when their rollouts are finished (continuous batching). Memory is booked
    for the longest response of every running rollout, so a rollout that has begun is never preempted.

    Args:
        seed: the run's seed; a rollout's random numbers depend on (seed, step, sample id, rollout index, token index).
        should_stop: polled at every layer of a prefill and at every token; True raises InterruptedError.
        stop_together: as ``should_stop``, where processes that need each other for every token meet: all of them raise.
        forwards: memory for recorded forwards, from which the update starts, first choice first.

    Raises:
        ValueError: settings the model or its tokenizer cannot follow.
    """

    scores_itself = True

    def __init__(
        self,
        policy: Policy,
        settings: RolloutSettings,
        seed: int,
        should_stop: Callable[[], bool] = lambda: False,
        stop_together: Callable[[], bool] = lambda: False,
        forwards: Sequence[ForwardBudget] = (),
    ):
        self.forwards = forwards
        self.policy, self.settings, self.seed = policy, settings, seed
        self.stop_token_ids = tuple(sorted({*stop_token_ids(policy), *settings.stop_token_ids}))
        self.stop_strings: StopStrings | None = None
        if settings.stop_strings:
            if policy.processor is None:
                raise ConfigError(
                    "rollout.stop_strings is set but the model was loaded without a processor, whose tokenizer says "
                    "how tokens read. Load the processor, or use rollout.stop_token_ids."
                )
            self.stop_strings = StopStrings(policy.tokenizer, settings.stop_strings)
        self.stats, self._unreported = RolloutStats(), Tally()
        self._note: str | None = None
        self._decoder: Decoder | None = None
        self._should_stop, self.stop_together = should_stop, stop_together

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], step: int | str, sequence: SequenceGroup = SINGLE_SP_RANK
    ) -> list[tuple[Rollout, ...]]:
        """``num_generations`` rollouts of every prompt.

        Args:
            prompts: each with its own sample id.
            step: the optimizer step, or a name such as "eval/seen", that keys the random numbers.
            sequence: processes that were given the same prompts. They prefill them together, and each samples its part
                of every prompt's rollouts (``share_of_rollouts``), which is what it returns. Keys and values of a
                prompt lie on all of them whole, or in parts (``rollout.divide_prefix``).

        Raises:
            SampleError: prompt and longest response exceed the model's positions.
            ConfigError: the memory budget has no room for one group alone.
            InterruptedError: a stop was requested.
        """
        if not prompts:
            return []
        reusable = 0 if self._decoder is None else self._decoder.nbytes
        largest = partial(self._largest_group, prompts)
        with adapter_merged(self.policy, self.settings, largest, sequence, reusable) as merge:
            if merge.note != self._note:
                self._note = merge.note
                logger.warning("generation: %s", merge.note or "the adapter is merged again")
            try:
                if sequence.size == 1:
                    return self._run(_ContinuousBatch(self, prompts, step))
                return self._generate_in_rounds(prompts, step, sequence)
            finally:
                if merge.copies:  # which recorded steps would hold in memory
                    self._decoder = None

    def _generate_in_rounds(
        self, prompts: Sequence[Prompt], step: int | str, sequence: SequenceGroup
    ) -> list[tuple[Rollout, ...]]:
        """A prefill runs on all processes, so none starts while others still sample."""
        for prompt in prompts:
            self.policy.check_prompt(prompt, self.settings.max_new_tokens)
        rollouts: dict[int, tuple[Rollout, ...]] = {}
        budget = self._common_budget(sequence)
        for indices, divided in rounds(self.policy, self.settings, prompts, budget, sequence):
            batch = _ContinuousBatch(self, [prompts[index] for index in indices], step, sequence, budget, divided)
            rollouts |= zip(indices, self._run(batch), strict=True)
        return [rollouts[index] for index in range(len(prompts))]

    def _run(self, batch: _ContinuousBatch) -> list[tuple[Rollout, ...]]:
        try:
            rollouts = batch.run()
        finally:
            self.stats = stats = batch.stats
            self._unreported.add_all({PROMPT_TOKENS: stats.prompt_tokens, PREFILL_TOKENS: stats.prefill_tokens})
            self._unreported.add_all({NEW_TOKENS: stats.new_tokens, PEAK: stats.peak_bytes / GIB})
            self._unreported.add(PROMPTS_DIVIDED, stats.prompts_divided)
        if batch.divided is None and batch.decoder.reset():
            self._decoder = batch.decoder
        return rollouts

    def warm_up(self, meanwhile: Callable[[], None]) -> None:
        """Where steps are recorded, two tokens behind a short text, so that libraries load and Triton compiles.

        ``meanwhile``: starts background work first.
        """
        if GraphUse.of(self.policy, self.settings).off_because is None:
            meanwhile()
            ids = torch.zeros(64, dtype=torch.int64)
            prompt = Prompt("warm up", ids, torch.zeros_like(ids), torch.arange(len(ids)).expand(3, -1))
            few = self.settings.model_copy(update={"max_new_tokens": 2, "min_new_tokens": 0})
            RolloutEngine(self.policy, few, self.seed).generate([prompt], "warm up")

    def take_decoder(self) -> Decoder:
        """The last call's, with its buffers and recorded steps, or a new one."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None and decoder.is_current():
            return decoder
        return decoder_for(self.policy, PrefixStore(), self.settings)

    def too_long_for_one(self, prompts: Sequence[Prompt], sequence: SequenceGroup) -> bool:
        """Whether a process alone could not sample some question's group, and ``sequence`` may divide its prompt.

        Args:
            prompts: the same on all processes of ``sequence``.
        """
        if self.settings.divide_prefix == "never" or not prompts:
            return False
        return self._largest_group(prompts) > self._common_budget(sequence)

    def _largest_group(self, prompts: Sequence[Prompt]) -> int:
        """Bytes of keys, values and states of the rollouts of one question, at their longest."""
        booking = Booking.of(self.policy, self.settings, prompts)
        return max(booking.bytes_of(path, self.settings.num_generations) for path in booking.waiting.paths)

    def _common_budget(self, sequence: SequenceGroup) -> int:
        return int(min(sequence.gather(self.budget())))

    def budget(self) -> int:
        """Bytes of keys, values and states that a call may hold."""
        reusable = 0 if self._decoder is None else self._decoder.nbytes
        reusable -= sum(forwards.room for forwards in self.forwards if forwards.target is None)
        return budget_bytes(self.settings, self.policy.device, reusable)

    def share_of_rollouts(self, sequence: SequenceGroup) -> range:
        """Which of a question's rollouts this process samples, where ``sequence`` samples them together."""
        count = self.settings.num_generations
        return range(sequence.rank * count // sequence.size, (sequence.rank + 1) * count // sequence.size)

    def report(self, tally: Tally) -> None:
        """Add what the calls since the last report did."""
        done, self._unreported = self._unreported, Tally()
        for metric in (PROMPT_TOKENS, PREFILL_TOKENS, NEW_TOKENS, PEAK, PROMPTS_DIVIDED):
            tally.add(metric, done.total(metric))

    def take_faults(self) -> None:
        """None: every question has rollouts."""

    def check_stop(self) -> None:
        """Raise InterruptedError if a stop was requested."""
        if self._should_stop():
            raise InterruptedError("generation was asked to stop")

    def text(self, token_ids: list[int]) -> str:
        """What a response says: without the stop token that ended it, and up to the stop string that did."""
        if self.policy.processor is None:
            return ""
        if token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        elif self._is_ended_by_string(token_ids):
            assert self.stop_strings is not None
            return self.stop_strings.cut(token_ids)
        text = self.policy.tokenizer.decode(token_ids, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def finish_reason(self, token_ids: list[int]) -> FinishReason | None:
        """Why a response ends with these tokens; None if it goes on."""
        if token_ids[-1] in self.stop_token_ids or self._is_ended_by_string(token_ids):
            return "stop"
        return "length" if len(token_ids) == self.settings.max_new_tokens else None

    def _is_ended_by_string(self, token_ids: list[int]) -> bool:
        if self.stop_strings is None or len(token_ids) < self.settings.min_new_tokens:
            return False
        return self.stop_strings.ends(token_ids)


class _ContinuousBatch:
    """The rollouts of one ``generate`` call, which enter and leave at any time.

    Args:
        sequence: processes that sample the rollouts of these prompts together.
        round_budget: bytes that each of them may hold; the prompts were chosen to fit into it, on all of them alike,
            and are admitted at once. None: a process alone.
        divided: each keeps keys and values of its part of the prompts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        step: int | str,
        sequence: SequenceGroup = SINGLE_SP_RANK,
        round_budget: int | None = None,
        divided: bool = False,
    ):
        self.engine, self.policy, self.settings, self.step = engine, engine.policy, engine.settings, step
        share = self.policy.settings.share_prefix
        own = engine.share_of_rollouts(sequence)
        # Where nothing is shared every rollout has a prompt of its own.
        self.copies = 1 if share else self.settings.num_generations
        self.rollouts_each, self.first_rollout = len(own) // self.copies, own.start
        self.prompts = [prompt for prompt in prompts for _ in range(self.copies)]
        self.at_once = round_budget is not None
        self.budget = engine.budget() if round_budget is None else round_budget
        check = partial(self.policy.check_prompt, response_tokens=self.settings.max_new_tokens)
        self.waiting = WaitingPrompts(self.prompts, share, check)
        self.divided: DividedPrompts | None = None
        if divided:
            self.store = PrefixStore()
            self.divided = DividedPrompts(self.store, self.policy, sequence)
            self.decoder = decoder_for(self.policy, self.store, self.settings, self.divided)
        else:
            self.decoder = engine.take_decoder()
            self.store = self.decoder.store
        if engine.forwards and self.decoder.ring is None:
            self.decoder.ring = StepRing(self.policy)
        self.prefill = Prefill(
            self.policy,
            self.store,
            self.waiting.nodes,
            self.prompts,
            self.settings.prefill_tokens,
            engine.check_stop,
            sequence,
            divided,
            prefill_layers(self.policy, self.settings),
        )
        self.sampler = TokenSampler(
            self.settings,
            self.policy.vocab_size,
            self.policy.media_token_ids,
            engine.stop_token_ids,
            self.policy.device,
            self.decoder.fused.draws,
            self.decoder.fused.statistics,
        )
        self.booking = Booking(self.policy, self.settings, self.waiting, self.decoder, sequence.size if divided else 1)
        self.counts_prompts = sequence.rank == 0  # once
        counted = self.prompts if self.counts_prompts else []
        self.stats = RolloutStats(
            prompt_tokens=sum(prompt.num_tokens for prompt in counted),
            prompts_divided=len(counted) if divided else 0,
            graphs=self.decoder.graphs,
        )
        for prompt, path in zip(self.prompts, self.waiting.paths, strict=True) if not self.at_once else ():
            needed = self.booking.bytes_of(path, self.rollouts_each)
            check_fits(needed, self.budget, prompt.sample_id, self.settings)
        self.cohorts: list[Cohort] = []
        self.ends = {path[-1] for path in self.waiting.paths}
        self.last_hidden: dict[int, torch.Tensor] = {}
        # Of each prompt whose rollouts are recorded, what was recorded of itself, and in whose memory.
        self.recorded: dict[int, tuple[RecordedRows, ...]] = {}
        self.forwards: dict[int, ForwardBudget] = {}
        self.finished: list[list[FinishedRollout]] = [[] for _ in self.prompts]

    def run(self) -> list[tuple[Rollout, ...]]:
        while self.waiting or self.cohorts:
            self.engine.check_stop()
            self._admit()
            self._sample()
            self._evict_finished(COMPACT_THRESHOLD)
            if self.cohorts:
                self._forward()
        while self.divided is not None and self.divided.meet((), self.engine.stop_together()):
            self.divided.answer()
        groups = [[self._rollout(one) for one in sorted(group, key=lambda one: one.index)] for group in self.finished]
        firsts = range(0, len(groups), self.copies)
        return [tuple(chain.from_iterable(groups[first : first + self.copies])) for first in firsts]

    def _admit(self) -> None:
        """Waiting prompts enter, as many as memory and ``max_batch_rollouts`` have room for; one if nothing runs."""
        stored = {node for node in self.store.order if self.waiting.is_needed(node)}
        new: set[int] = set()
        chosen: list[int] = []
        running = rows = sum(cohort.num_running for cohort in self.cohorts)
        peak = 0
        for prompt in self.waiting:
            path = self.waiting.paths[prompt]
            after = rows + self.rollouts_each
            booked = self.booking.bytes_of(stored.union(new, path), after)
            full = after > self.settings.max_batch_rollouts or booked > self.budget
            if rows and full and not self.at_once:
                break
            chosen.append(prompt)
            new.update(node for node in path if node not in stored)
            rows, peak = after, booked
        if not chosen or (len(chosen) < len(self.waiting) and rows - running < MIN_ADMITTED_SHARE * rows):
            return
        self.waiting.take(len(chosen))
        self.stats.peak_bytes = max(self.stats.peak_bytes, peak)
        self._evict_finished(1.0)
        self._start(chosen, stored, sorted(new))

    def _start(self, chosen: Sequence[int], stored: set[int], new: Sequence[int]) -> None:
        """Prefill the new nodes and decode behind them."""
        self.store.rearrange(stored, self.prefill.room(new, self.ends))
        self.last_hidden = {node: hidden for node, hidden in self.last_hidden.items() if node in stored}
        of_nodes = self._book_forwards(chosen, new)
        self.last_hidden |= self.prefill.run(new, self.ends, {node: found.put for node, found in of_nodes.items()})
        for node, forwards in of_nodes.items():
            forwards.count(self.prefill.recorded[node])
            forwards.release(self.waiting.nodes[node].num_tokens)
        recorded = [prompt for prompt in chosen if prompt in self.forwards]
        for prompt in recorded:
            path = self.waiting.paths[prompt]
            self.recorded[prompt] = tuple(rows for node in path for rows in self.prefill.recorded[node])
        self.cohorts.append(self._cohort(chosen, bool(recorded)))
        self.decoder.admit(self.cohorts[-1])
        if self.counts_prompts:
            self.stats.prefill_tokens += sum(self.waiting.nodes[node].num_tokens for node in new)
        self.stats.cohorts += 1

    def _book_forwards(self, chosen: Sequence[int], new: Sequence[int]) -> dict[int, ForwardBudget]:
        """Book memory for those of these prompts of which nothing was stored without a record; of their new nodes in
        whose memory."""
        recorded, of_nodes = self.prefill.recorded, dict[int, ForwardBudget]()
        for node in recorded.keys() - self.store.lengths.keys():
            del recorded[node]
        for prompt in chosen if self.prefill.sequence.size == 1 else ():
            path = self.waiting.paths[prompt]
            if not {*new, *recorded}.issuperset(path):
                continue
            nodes = [node for node in path if node not in recorded and node not in of_nodes]
            tokens = sum(self.waiting.nodes[node].num_tokens for node in nodes)
            tokens += self.rollouts_each * self.settings.max_new_tokens
            if forwards := next((one for one in self.engine.forwards if one.book(tokens)), None):
                self.forwards[prompt] = forwards
                of_nodes |= dict.fromkeys(nodes, forwards)
        return of_nodes

    def _cohort(self, chosen: Sequence[int], records: bool) -> Cohort:
        device = self.policy.device
        rollouts = [(prompt, index) for prompt in chosen for index in range(self.rollouts_each)]
        prompts = [self.prompts[prompt] for prompt, _ in rollouts]
        paths = [self.waiting.paths[prompt] for prompt, _ in rollouts]
        keys = [
            # Of the question's rollouts, whether they have copies of their prompt or one together.
            rollout_key(
                self.engine.seed, self.step, prompt.sample_id, number % self.copies + self.first_rollout + index
            )
            for prompt, (number, index) in zip(prompts, rollouts, strict=True)
        ]
        no_tokens = partial(torch.zeros, len(rollouts), self.policy.vocab_size, dtype=torch.bool, device=device)
        seen = no_tokens() if self.sampler.needs_seen else None
        for row, prompt in zip(seen, prompts, strict=True) if seen is not None else ():
            row[prompt.input_ids.to(device)] = True
        return Cohort(
            rollouts,
            paths,
            torch.stack([self.last_hidden[path[-1]] for path in paths]),
            torch.tensor([prompt.next_position for prompt in prompts]).to(device, non_blocking=True),
            torch.from_numpy(uniforms(keys, self.settings.max_new_tokens)).to(device),
            seen,
            no_tokens() if self.sampler.needs_generated else None,
            records,
        )

    def _sample(self) -> None:
        """Sample the next token of every rollout; finish those that end with it."""
        cohorts = self.cohorts
        logits = self.policy.logits(_joined([cohort.hidden for cohort in cohorts]))
        choice = self.sampler.choose(
            logits,
            _joined([cohort.uniform for cohort in cohorts]),
            [cohort.num_generated for cohort in cohorts for _ in range(cohort.num_rows)],
            _joined([cohort.seen for cohort in cohorts]),
            _joined([cohort.generated for cohort in cohorts]),
        )
        # The only look at the device from the host, once a token.
        token_ids = choice.tokens.tolist()
        start = 0
        for cohort in cohorts:
            rows = slice(start, start + cohort.num_rows)
            cohort.record(choice, rows, token_ids[rows])
            for row in cohort.running_rows():
                reason = self.engine.finish_reason(cohort.tokens_of(row))
                if reason is not None:
                    finished = cohort.finish(row, reason)
                    if finished.prompt in self.forwards and cohort.num_generated > 1:
                        assert self.decoder.ring is not None
                        put = self.forwards[finished.prompt].put
                        finished = replace(finished, recorded=self.decoder.ring.recorded_rows(cohort, row, put))
                    self._finish(finished)
            start = rows.stop

    def _finish(self, rollout: FinishedRollout) -> None:
        group = self.finished[rollout.prompt]
        group.append(rollout)
        if forwards := self.forwards.get(rollout.prompt):
            forwards.release(self.settings.max_new_tokens)
            forwards.count(rollout.recorded)
        self.stats.new_tokens += len(rollout.token_ids)
        if len(group) == self.rollouts_each:
            self.waiting.done(rollout.prompt)

    def _evict_finished(self, below: float) -> None:
        """Cohorts without a running rollout end; others drop finished ones if fewer than this share still run."""
        remaining = []
        for cohort in self.cohorts:
            rows = cohort.running_rows()
            if rows:
                remaining.append(cohort)
            if len(rows) < below * cohort.num_rows:
                if rows:
                    cohort.evict_finished()
                self.decoder.retain(cohort, rows)
        self.cohorts = remaining

    def _forward(self) -> None:
        """The tokens sampled last through the model."""
        cohorts = self.cohorts
        if self.divided is not None:
            self.divided.meet(self.decoder.rows(), self.engine.stop_together())
        tokens = _joined([cohort.last_tokens for cohort in cohorts])
        positions = _joined([cohort.positions for cohort in cohorts])
        hidden = self.decoder.step(tokens, positions)
        for cohort, part in zip(cohorts, hidden.split([cohort.num_rows for cohort in cohorts]), strict=True):
            cohort.hidden = part
        self.stats.decode_steps += 1

    def _rollout(self, finished: FinishedRollout) -> Rollout:
        forward = None
        if (prompt := self.recorded.get(finished.prompt)) is not None:
            forward = RecordedForward(prompt, finished.recorded, finished.logprobs, finished.entropies)
        return Rollout(
            token_ids=finished.token_ids,
            rollout_logprobs=finished.logprobs,
            finish_reason=finished.finish_reason,
            text=self.engine.text(finished.token_ids.tolist()),
            sampling_logprobs=finished.sampling_logprobs,
            entropies=finished.entropies,
            forward=forward,
        )


def _joined(of_cohorts: Sequence[Any]) -> Any:
    """The rows of all cohorts; of one, as they are. None where none has any."""
    if len(of_cohorts) == 1 or of_cohorts[0] is None:
        return of_cohorts[0]
    return torch.cat(list(of_cohorts))


def stop_token_ids(policy: Policy | WeightlessPolicy) -> tuple[int, ...]:
    """What ends a response: the end tokens of the model's generation config, and the tokenizer's."""
    configured = getattr(policy.model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    if policy.processor is not None:
        ids.add(policy.tokenizer.eos_token_id)
    ids.discard(None)
    if not ids:
        raise ValueError(
            "The model names no end-of-sequence token; set eos_token_id in its generation_config.json, "
            "or every response would run to rollout.max_new_tokens."
        )
    return tuple(sorted(ids))
