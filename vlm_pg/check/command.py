"""The command: checks the sets of a configuration, or a file or folder under it, record by record."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from vlm_pg.check.findings import REFUSED, WARNED, Finding, SetTally, lines, write_reports
from vlm_pg.check.lengths import LengthRules, PromptLengths
from vlm_pg.check.records import LeakageCheck, RecordChecker
from vlm_pg.check.sets import CheckedSet, MediaSource, Presentation, Prober, mixture_fault, sets_of, too_many_bad
from vlm_pg.config import RunConfig
from vlm_pg.data.bad import line_of
from vlm_pg.data.dedup import Ledger
from vlm_pg.data.files import count_raw
from vlm_pg.distributed import launched_world_size
from vlm_pg.errors import ConfigError, SampleError
from vlm_pg.files import replacing
from vlm_pg.media.decode_file import MediaFacts
from vlm_pg.media.loader import MediaLoader, decoding_pool
from vlm_pg.models.loading import WeightlessPolicy
from vlm_pg.observe.console import Console, quiet_libraries
from vlm_pg.progress import Bar
from vlm_pg.threads import use_threads
from vlm_pg.types import BadSample, Sample

# Records checked together, in parallel.
BATCH = 128
# Records whose media are read while earlier ones are checked; bounds memory.
WINDOW = 512


def check(config: RunConfig, data: Path | None = None, decode: bool = False, out: Path | None = None) -> bool:
    """Check every record of a run's sets; print the findings, and return whether there was no error.

    Args:
        data: a file or folder of records instead of the configuration's sets.
        decode: decode all frames that would be shown of every medium, into the cache where there is one.
        out: folder for ``check.json``, ``check.html``, ``refused.jsonl`` and ``warned.jsonl``.

    Raises:
        ConfigError: nothing to check, records that cannot be read, several processes, a reward that cannot be
            computed, or weights (``data.mixture``) that training would refuse, which shows once all was read.
        ModelError: the model's processor cannot be read, or it reads text alone and records have media.
    """
    if launched_world_size() > 1:
        raise ConfigError(f"check runs in one process, {launched_world_size()} were started. Start it by itself.")
    use_threads(config.training.torch_threads)
    quiet_libraries()
    console = Console(enabled=True)
    model = WeightlessPolicy(config.model)
    keep = decode and config.cache.folder is not None and config.cache.frames
    console.info(*_introduction(config, data, decode, keep))
    tallies: list[SetTally] = []
    tokenizer = getattr(model.processor, "tokenizer", model.processor)
    with ExitStack() as stack:
        sets = _sets(config, data, _media_sources(config, model.pixel_factor, keep, stack))
        ledger = stack.enter_context(Ledger())
        lengths = stack.enter_context(PromptLengths(config.media.workers, model))

        def num_tokens(text: str) -> int:  # with the one that ends a response
            return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1

        checker = stack.enter_context(RecordChecker(config.reward, lengths, num_tokens, console.warn))
        on_finding = stack.enter_context(_written(out))
        prober = Prober(ledger, decode, keep)
        for one in sets:
            tallies.append(SetTally(one.name, str(one.path), one.presentation.rules.prompt.max_prompt_tokens))
            prefix = f"{one.name}, " if len(sets) > 1 else ""
            check_set(one, tallies[-1], ledger, prober, checker, on_finding, prefix)
    ends = [] if data is not None else too_many_bad(config.data, sets, tallies)
    console.info(*(line for tally in tallies for line in lines(tally)))
    console.warn(*ends)
    bad, warnings = sum(one.with_errors for one in tallies), sum(one.warnings.counts.total() for one in tallies)
    end = f"{bad:,} record(s) cannot be used as they are" if bad else "every record can be used"
    end += "; a run would end at once" if ends else ""
    console.info(f"check: {end}; {warnings:,} warning(s)" + (f"; written to {out}" if out is not None else ""))
    if out is not None:
        media = config.media
        settings = {
            "model": config.model.path,
            "frames": f"{media.fps:g} a second" if media.num_frames is None else f"{media.num_frames}, evenly",
            "max_frames": media.most_frames,
            "max_pixels": media.max_pixels,
            "max_prompt_tokens": config.prompt.max_prompt_tokens,
            "max_new_tokens": config.rollout.max_new_tokens,
            "decoded": decode,
            "protocols": config.eval.protocols,
        }
        write_reports(out, tallies, settings)
    fault = None if data is not None else mixture_fault(config.data, sets)
    if fault is not None:
        raise fault
    return not ends and not bad


def check_set(
    one: CheckedSet,
    tally: SetTally,
    ledger: Ledger,
    prober: Prober,
    checker: RecordChecker,
    on_finding: Callable[[Finding], object],
    prefix: str = "",
) -> None:
    """Check a set, after the training sets; its tally grows.

    Args:
        on_finding: called with every finding, in order.
        prefix: of the locations in findings.

    Raises:
        ConfigError: its file cannot be read on.
        ModelError: it has media and the model reads text alone.
    """
    total, table = count_raw(one.path), f"ids of {one.name}"
    total = total if one.limit is None else min(total, one.limit)
    leakage = LeakageCheck(ledger, one.name, one.trains, checker.same_gold)
    # Records with the keys of their media.
    waiting: deque[tuple[Sample | BadSample, list[str | SampleError]]] = deque()

    def settle(count: int) -> None:
        """Check some records once the facts of their media are there."""
        batch = [waiting.popleft() for _ in range(count)]
        facts = [[prober.facts(key) for key in keys] for _, keys in batch]
        read = [(record, of) for (record, _), of in zip(batch, facts, strict=True) if isinstance(record, Sample)]
        checked = checker.check(
            [sample for sample, _ in read], [of for _, of in read], one.presentation.rules, tally.add_prompt
        )
        for (record, _), of_media in zip(batch, facts, strict=True):
            found = [Finding(record)] if isinstance(record, BadSample) else next(checked)
            if isinstance(record, Sample):
                for ref, fact in zip(record.media, of_media, strict=True):
                    # Each medium of a set counts once, under any file name.
                    if isinstance(fact, MediaFacts) and ledger.add(f"media of {one.name}", fact.content):
                        tally.media += 1
                        if ref.kind == "video":
                            tally.seconds.add(fact.seconds)
                if not any(finding.is_refusal for finding in found):
                    # Training leaves refused records out: they neither repeat a question nor leak.
                    found += leakage.findings(record, [fact for fact in of_media if isinstance(fact, MediaFacts)])
            found = [replace(each, bad=replace(each.bad, where=f"{prefix}{each.bad.where}")) for each in found]
            tally.add(found)
            for each in found:
                on_finding(each)

    with Bar(f"Checking {one.name}", total) as bar:
        for record in one.records(lambda name, where: ledger.first(table, name, where), tally):
            media = record.media if isinstance(record, Sample) else ()
            waiting.append((record, [prober.request(ref, one.media) for ref in media]))
            if len(waiting) == WINDOW:
                settle(BATCH)
                bar.advance(BATCH)
        while waiting:
            count = min(BATCH, len(waiting))
            settle(count)
            bar.advance(count)


def _introduction(config: RunConfig, data: Path | None, decode: bool, keep: bool) -> Iterator[str]:
    """What is checked, and what is not."""
    if decode:
        yield "media: all that is shown is decoded" + (f" and kept in {config.cache.folder}" if keep else "")
    else:
        yield "media: read through, one frame of each video decoded (--decode decodes all that is shown)"
    if config.reward.judge.weight:
        yield "reward.judge does not grade gold answers"
    if not config.prompt.subtitles:
        yield "prompt.subtitles=false: files of subtitles are not read"
    if config.rollout.engine == "server":
        yield "rollout.engine=server: no server is asked whether it takes these prompts (docs/servers.md)"
    if data is not None:
        return
    yield from config.data.left_out()
    yield from config.eval.left_out(list(config.data.eval))
    for name in config.eval.chosen_sets(list(config.data.eval)):
        if name in config.eval.protocols:
            yield (
                f"data.eval.{name}: prompts in the words, frames and limits of protocol {config.eval.protocols[name]}; "
                "questions that it does not ask are left out"
            )


def _presentation(config: RunConfig, name: str | None) -> Presentation:
    """How the evaluation set ``name`` is presented; None: training sets."""
    protocol = None if name is None else config.eval.protocol_of(name)
    if name is None or protocol is None:
        longest, objective = config.rollout.max_new_tokens, "rl" if name else config.training.objective
        return Presentation(LengthRules(config.model, config.prompt, longest, objective=objective), config.media)
    rules = LengthRules(
        config.model,
        protocol.prompt_settings(config.prompt),
        protocol.max_new_tokens,
        config.eval.wording_of(name),
        protocol.answer_prefix,
    )
    return Presentation(rules, protocol.media_settings(config.media), protocol.includes, protocol.with_shown_media)


def _sets(
    config: RunConfig, data: Path | None, media_of: Callable[[str, Path, Presentation], MediaSource]
) -> list[CheckedSet]:
    if data is not None:
        # One of the configuration's own sets is found and presented as in the run.
        own = [*config.data.train_sets.items(), *config.data.eval.items()]
        name = next((name for name, path in own if path == data), "")
        is_held = data not in config.data.train_sets.values() and config.data.eval.get(name) == data
        presentation = _presentation(config, name if is_held else None)
        return [CheckedSet("DATA", data, media_of(name, data, presentation), presentation, trains=False)]
    if not config.data.train_sets and not config.data.eval:
        raise ConfigError(
            "Neither data.train nor data.eval is set. Records to check are needed. Set one, or name a file or folder "
            "before the configuration."
        )
    chosen = config.eval.chosen_sets(list(config.data.eval))
    return sets_of(config.data, chosen, config.eval.limit, media_of, partial(_presentation, config))


def _media_sources(
    config: RunConfig, factor: int, keep: bool, stack: ExitStack
) -> Callable[[str, Path, Presentation], MediaSource]:
    """Media of a set, by its name, the path of its records and its presentation; ``stack`` ends the decoders."""
    cache = config.cache if keep else None
    pool = decoding_pool(config.media, cache)
    if pool is not None:
        stack.enter_context(pool)

    def media_of(name: str, path: Path, presentation: Presentation) -> MediaSource:
        media, subtitles = presentation.media, presentation.rules.prompt.subtitles
        root, remote = config.data.root_for(path, name), config.data.allow_remote
        key = hashlib.sha256(f"{subtitles} {media.model_dump_json()}".encode()).hexdigest()[:16]
        return MediaSource(MediaLoader(media, root, remote, factor, pool, subtitles, cache), root, remote, key)

    return media_of


@contextmanager
def _written(out: Path | None) -> Iterator[Callable[[Finding], object]]:
    """Writes findings in order, in the form of a run's bad samples."""
    if out is None:
        yield lambda finding: None
        return
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / REFUSED, durable=False) as refused, replacing(out / WARNED, durable=False) as warned:
        yield lambda finding: (refused if finding.is_error else warned).write(line_of(finding.bad))
