"""The command: checks the sets of a configuration, or a file or folder under it, record by record."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vlm_pg.check.findings import Finding, SetTally
from vlm_pg.check.judge import Judge
from vlm_pg.check.leakage import Crossing
from vlm_pg.check.lengths import LengthRules, Lengths
from vlm_pg.check.probing import Facts, Place, Prober
from vlm_pg.check.report import REFUSED, WARNED, lines, write_reports
from vlm_pg.check.sets import Asked, CheckedSet, mixture_fault, sets_of, too_many_bad
from vlm_pg.config import RunConfig
from vlm_pg.data.bad import line_of
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.files import count_raw
from vlm_pg.distributed import launched_world_size
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.files import replacing
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.media.probe import MediaFacts
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.progress import Bar
from vlm_pg.threads import use_threads
from vlm_pg.types import BadSample, Sample


def check(config: RunConfig, data: Path | None = None, decode: bool = False, out: Path | None = None) -> bool:
    """Check every record of a run's sets; print what was found, and return whether there was no error.

    Args:
        config: the run.
        data: a file or folder of records in the place of the configuration's sets.
        decode: decode all that would be shown of every medium, into the cache where there is one.
        out: folder for ``check.json``, ``check.html``, ``refused.jsonl`` and ``warned.jsonl``.

    Raises:
        ConfigError: nothing to check, records that cannot be read, several processes, a reward that cannot be
            computed, or weights (``data.mixture``) that training would refuse, which shows when all was read.
        ModelError: the model's processor cannot be read, or it reads text alone and records have media.
    """
    if launched_world_size() > 1:
        raise ConfigError(f"check runs in one process, {launched_world_size()} were started. Start it by itself.")
    use_threads(config.training.torch_threads)
    quiet_libraries()
    console = Console(enabled=True)
    model = WeightlessPolicy(config.model)
    keep = decode and config.cache.folder is not None and config.cache.frames
    for line in _introduction(config, data, decode, keep):
        console.info(line)
    tallies: list[SetTally] = []
    with ExitStack() as stack:
        sets = _sets(config, data, _places(config, model.pixel_factor, keep, stack))
        ledger = stack.enter_context(Ledger())
        lengths = stack.enter_context(Lengths(config.media.workers, model))
        judge = stack.enter_context(Judge(config.reward, lengths, _token_counter(model.processor), console.warn))
        on_finding = stack.enter_context(_written(out))
        checks = SetCheck(ledger, Prober(ledger, decode, keep), judge, on_finding, names_sets=len(sets) > 1)
        for one in sets:
            tallies.append(SetTally(one.name, str(one.path), one.asked.rules.prompt.max_prompt_tokens))
            checks.run(one, tallies[-1])
    ends = [] if data is not None else too_many_bad(config.data, sets, tallies)
    _say(console, tallies, ends, out)
    if out is not None:
        write_reports(out, tallies, _settings(config, decode))
    fault = None if data is not None else mixture_fault(config.data, sets)
    if fault is not None:
        raise fault
    return not ends and not any(one.with_errors for one in tallies)


def _introduction(config: RunConfig, data: Path | None, decode: bool, keep: bool) -> Iterator[str]:
    """What is looked at, and what is not."""
    if decode:
        yield "media: all that is shown is decoded" + (f" and kept in {config.cache.folder}" if keep else "")
    else:
        yield "media: read through, one frame of each video decoded (--decode decodes all that is shown)"
    if config.reward.judge.weight:
        yield "reward.judge is not asked about gold answers"
    if not config.prompt.subtitles:
        yield "prompt.subtitles=false: files of subtitles are not read"
    if config.rollout.engine == "server":
        yield "rollout.engine=server: no server is asked whether it takes these prompts (docs/servers.md)"
    if data is None:
        yield from config.data.left_out()
        yield from config.eval.left_out(list(config.data.eval))
    for name in config.eval.chosen_sets(list(config.data.eval)) if data is None else ():
        if name in config.eval.protocols:
            yield (
                f"data.eval.{name}: prompts in the words, frames and limits of protocol {config.eval.protocols[name]}; "
                "questions that it does not ask are left out"
            )


def _asked(config: RunConfig, name: str | None) -> Asked:
    """How the evaluation set ``name`` is asked; None: what is trained on.

    Raises:
        ConfigError: the frames of its protocol do not go together with the limits of section ``media``.
    """
    protocol = None if name is None else config.eval.protocol_of(name)
    if name is None or protocol is None:
        return Asked(LengthRules(config.model, config.prompt, config.rollout.max_new_tokens), config.media)
    try:
        media = protocol.media_settings(config.media)
    except ValueError as error:
        raise ConfigError(f"Protocol {protocol.name} of the set {name} cannot be used: {error}") from None
    rules = LengthRules(
        config.model,
        protocol.prompt_settings(config.prompt),
        protocol.max_new_tokens,
        config.eval.wording_of(name),
        protocol.answer_prefix,
    )
    return Asked(rules, media, protocol.asks, protocol.as_asked)


def _sets(config: RunConfig, data: Path | None, place: Callable[[str, Path, Asked], Place]) -> list[CheckedSet]:
    if data is not None:
        # One of the configuration's own sets has its media where they are for the run, and is asked as the run asks it.
        own = [*config.data.train_sets.items(), *config.data.eval.items()]
        name = next((name for name, path in own if path == data), "")
        is_held = data not in config.data.train_sets.values() and config.data.eval.get(name) == data
        asked = _asked(config, name if is_held else None)
        return [CheckedSet("DATA", data, place(name, data, asked), asked, trains=False)]
    if not config.data.train_sets and not config.data.eval:
        raise ConfigError(
            "Neither data.train nor data.eval is set. Records to check are needed. Set one, or name a file or folder "
            "before the configuration."
        )
    chosen = config.eval.chosen_sets(list(config.data.eval))
    return sets_of(config.data, chosen, config.eval.limit, place, partial(_asked, config))


def _places(config: RunConfig, factor: int, keep: bool, stack: ExitStack) -> Callable[[str, Path, Asked], Place]:
    """Where the media of a set lie, by its name, the path of its records and how it is asked; ``stack`` ends who reads
    them."""
    kept = config.cache if keep else None
    pool = decoding_pool(config.media, kept)
    if pool is not None:
        stack.enter_context(pool)

    def place(name: str, path: Path, asked: Asked) -> Place:
        root, remote, subtitles = (
            config.data.root_for(path, name),
            config.data.allow_remote,
            asked.rules.prompt.subtitles,
        )
        how = hashlib.sha256(f"{subtitles} {asked.media.model_dump_json()}".encode()).hexdigest()[:16]
        return Place(MediaLoader(asked.media, root, remote, factor, pool, subtitles, kept), root, remote, how)

    return place


def _token_counter(processor: Any) -> Callable[[str], int]:
    """Tokens of a response, with the one that ends it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1


@contextmanager
def _written(out: Path | None) -> Iterator[Callable[[Finding], None]]:
    """Writes findings as they come, in the form of a run's bad samples."""
    if out is None:
        yield lambda finding: None
        return
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / REFUSED, durable=False) as refused, replacing(out / WARNED, durable=False) as warned:

        def write(finding: Finding) -> None:
            line = line_of(finding.bad).encode(errors="backslashreplace")
            (refused if finding.is_error else warned).write(line)

        yield write


def _say(console: Console, tallies: Sequence[SetTally], ends: Sequence[str], out: Path | None) -> None:
    for tally in tallies:
        for line in lines(tally):
            console.info(line)
    for line in ends:
        console.warn(line)
    bad, warnings = sum(one.with_errors for one in tallies), sum(one.warnings.counts.total() for one in tallies)
    end = f"{bad:,} record(s) cannot be used as they are" if bad else "every record can be used"
    end += "; a run would end at once" if ends else ""
    console.info(f"check: {end}; {warnings:,} warning(s)" + (f"; written to {out}" if out is not None else ""))


def _settings(config: RunConfig, decode: bool) -> dict[str, Any]:
    """What decides about the figures."""
    media = config.media
    return {
        "model": config.model.path,
        "frames": f"{media.fps:g} a second" if media.num_frames is None else f"{media.num_frames}, evenly",
        "max_frames": media.most_frames,
        "max_pixels": media.max_pixels,
        "max_prompt_tokens": config.prompt.max_prompt_tokens,
        "max_new_tokens": config.rollout.max_new_tokens,
        "decoded": decode,
        "protocols": config.eval.protocols,
    }


# Judged together, so that processes have something to share.
BATCH = 128
# Records that are read while the media of earlier ones are looked at.
WINDOW = 512


@dataclass
class _Waiting:
    record: Sample | BadSample
    keys: list[str | SampleError] = field(default_factory=list)


class SetCheck:
    """Checks one set after the other; those that are trained on come first.

    Args:
        ledger, prober, judge: shared by all sets.
        on_finding: told of everything that is found, in order.
        names_sets: findings say which set they are of.
    """

    def __init__(
        self,
        ledger: Ledger,
        prober: Prober,
        judge: Judge,
        on_finding: Callable[[Finding], None],
        names_sets: bool,
    ):
        self._ledger, self._prober, self._judge = ledger, prober, judge
        self._on_finding, self._names_sets = on_finding, names_sets

    def run(self, one: CheckedSet, tally: SetTally) -> None:
        """Check a set; its tally grows.

        Raises:
            ConfigError: its file cannot be read on.
            ModelError: it has media and the model reads text alone.
        """
        total, table = count_raw(one.path), f"ids of {one.name}"
        crossing = Crossing(self._ledger, one.name, one.trains, self._judge.same_gold)
        waiting: deque[_Waiting] = deque()
        with Bar(f"Checking {one.name}", total if one.limit is None else min(total, one.limit)) as bar:
            for record in one.records(lambda name, where: self._ledger.first(table, name, where), tally):
                keys = [self._prober.ask(ref, one.place) for ref in record.media] if isinstance(record, Sample) else []
                waiting.append(_Waiting(record, keys))
                if len(waiting) == WINDOW:
                    self._settle([waiting.popleft() for _ in range(BATCH)], one, crossing, tally)
                    bar.advance(BATCH)
            while waiting:
                last = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
                self._settle(last, one, crossing, tally)
                bar.advance(len(last))

    def _settle(self, batch: list[_Waiting], one: CheckedSet, crossing: Crossing, tally: SetTally) -> None:
        """Judge some records, whose media are waited for."""
        facts = [[self._prober.facts(key) for key in item.keys] for item in batch]
        read = [(item.record, of) for item, of in zip(batch, facts, strict=True) if isinstance(item.record, Sample)]
        judged = self._judge.judge(
            [sample for sample, _ in read], [of for _, of in read], one.asked.rules, tally.add_prompt
        )
        for item, of_media in zip(batch, facts, strict=True):
            if isinstance(item.record, BadSample):
                self._found(one, tally, [Finding(item.record)])
                continue
            found = next(judged)
            self._count(one, item.record, of_media, tally)
            if not any(finding.is_refusal for finding in found):
                # What training leaves out is neither asked twice nor trained on.
                facts_of_all = [fact for fact in of_media if isinstance(fact, MediaFacts)]
                found += crossing.findings(item.record, facts_of_all)
            self._found(one, tally, found)

    def _found(self, one: CheckedSet, tally: SetTally, findings: list[Finding]) -> None:
        if self._names_sets:
            findings = [
                replace(found, bad=replace(found.bad, where=f"{one.name}, {found.bad.where}")) for found in findings
            ]
        tally.add(findings)
        for found in findings:
            self._on_finding(found)

    def _count(self, one: CheckedSet, sample: Sample, facts: list[Facts], tally: SetTally) -> None:
        """Each medium of a set counts once, whatever its files are called."""
        for ref, fact in zip(sample.media, facts, strict=True):
            if isinstance(fact, MediaFacts) and self._ledger.add(f"media of {one.name}", fact.content):
                tally.media += 1
                if ref.kind == "video":
                    tally.seconds.add(fact.seconds)
