"""The report of a preparation: counts, summary page, and checks of the outcome."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.judging import Verdict, data_type
from data_pipelines.engine.media_finder import REASON
from data_pipelines.engine.output_folder import MISSING, claim, program
from data_pipelines.engine.splits import REFUSED, Repeat
from vlm_pg.errors import ConfigError, SampleError, VlmPgError, printable
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import BadSample, DecodedMedia, Sample

if TYPE_CHECKING:
    from vlm_pg.media.probe import MediaFacts


_SHOWN = 12


@dataclass
class Histogram:
    """Counts by size, in bins that double: bin 0 is up to ``first``, bin 1 up to twice as much, and so on."""

    title: str
    first: float
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, size: float) -> None:
        self.counts[max(0, math.ceil(math.log2(max(size, self.first) / self.first)))] += 1

    def label(self, place: int) -> str:
        return f"up to {self.first * 2**place:,.0f}"


@dataclass
class Tally:
    """What became of the questions, counted; and a few of them to show.

    Args:
        option_columns: how many fields of a row hold an option each; 0 where options come otherwise.
        subtitled: whether records name subtitles where their video has any.
    """

    option_columns: int = 0
    subtitled: bool = False
    fewer_options: int = 0
    without_subtitles: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    by_data_type: Counter[str] = field(default_factory=Counter)
    by_answer_kind: Counter[str] = field(default_factory=Counter)
    by_source: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, BadSample] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    repeats: dict[str, Repeat] = field(default_factory=dict)
    shown: list[tuple[str, Sample]] = field(default_factory=list)
    words: Histogram = field(default_factory=lambda: Histogram("Words of question and options", 8))
    clips: Histogram = field(default_factory=lambda: Histogram("Seconds of clips", 1))
    seconds: Histogram = field(default_factory=lambda: Histogram("Seconds of whole videos", 1))
    tokens: Histogram = field(default_factory=lambda: Histogram("Visual tokens of a question", 16))

    def keep(self, split: str, sample: Sample, facts: Sequence[MediaFacts] = ()) -> None:
        """Count a question that was written. ``facts``: of its media, where they were looked at."""
        self.counts[split] += 1
        self.by_data_type[data_type(sample)] += 1
        self.by_answer_kind[sample.answer_kind] += 1
        self.by_source[sample.source] += 1
        self.words.add(sum(len(text.split()) for text in (sample.question, *sample.options)))
        self.fewer_options += 0 < len(sample.options) < self.option_columns
        self.without_subtitles += all(not ref.subtitles for ref in sample.media)
        for ref in sample.media:
            if ref.end is not None:
                self.clips.add(ref.end - (ref.start or 0.0))
        for one in facts:
            if one.seconds:
                self.seconds.add(one.seconds)
        if facts:
            self.tokens.add(sum(one.visual_tokens for one in facts))
        # A few that depend on nothing but themselves; largest of all hashes, so that the choice needs no second look.
        rank = hashlib.sha256(sample.sample_id.encode(errors="surrogatepass")).hexdigest()
        self.shown = nlargest(_SHOWN, [*self.shown, (rank, sample)], key=lambda one: one[0])

    def histograms(self) -> list[Histogram]:
        """How long questions, clips and videos are."""
        return [self.words, self.clips, self.seconds, self.tokens]

    def refuse(self, bad: BadSample) -> None:
        """Count a question that cannot be used."""
        self.refused[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad)

    def repeat(self, repeat: Repeat) -> None:
        """Count a kept question that was asked before."""
        self.repeated[repeat.answers] += 1
        self.repeats.setdefault(repeat.answers, repeat)

    def report(self) -> dict[str, Any]:
        """As ``report.json`` has it."""
        fewer = {"fewer_options_than_columns": self.fewer_options} if self.option_columns else {}
        silent = {"without_subtitles": self.without_subtitles} if self.subtitled else {}
        return {
            "train": self.counts["train"],
            "eval": self.counts["eval"],
            "kept_by_data_type": _sorted(self.by_data_type),
            "kept_by_answer_kind": _sorted(self.by_answer_kind),
            "kept_by_source": _sorted(self.by_source),
            "left_out": _sorted(self.left_out),
            "refused": _sorted(self.refused),
            "repeated": _sorted(self.repeated),
            **fewer,
            **silent,
        }

    def summary(self) -> str:
        """A few lines for people: how many were kept, left out, refused and asked twice, and why."""
        lines = [f"kept     {self.counts['train']} for training, {self.counts['eval']} for evaluation"]
        lines += [f"left out {count:6}  {name}" for name, count in self.left_out.most_common()]
        for reason, count in self.refused.most_common():
            example = self.examples[reason]
            lines.append(f"refused  {count:6}  {reason}, for example {example.sample_id}: {example.message}")
        lines += [f"repeated {count:6}  {self.repeats[answers]}" for answers, count in self.repeated.most_common()]
        if self.fewer_options:
            lines.append(
                f"kept     {self.fewer_options:6}  of them have fewer options than {self.option_columns} columns"
            )
        if self.subtitled:
            lines.append(f"kept     {self.without_subtitles:6}  of them have no subtitles")
        return "\n".join(lines)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))


_THUMBNAIL_PIXELS = 160 * 120
_FRAMES = 4


def write_summary(
    path: Path,
    name: str,
    tally: Tally,
    media_root: Path | None,
    pool: WorkerPool | None = None,
    unread: Sequence[object] = (),
) -> None:
    """Write the page. It holds everything in itself and runs no script.

    Args:
        path: the file.
        name: of the data set.
        tally: what was written.
        media_root: where media lie; None: none are shown. One that cannot be decoded is shown by its name and fault.
        pool: the processes that decode; by default one that ends with this.
        unread: annotation files that were not read, as texts.
    """
    from jinja2 import Environment, StrictUndefined

    template = resources.files("data_pipelines.engine").joinpath("summary.html.jinja").read_text("utf-8")
    samples = [sample for _, sample in tally.shown]
    pictures = _pictures(samples, media_root, pool) if media_root is not None else [[] for _ in samples]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = page.from_string(template).render(
        name=name,
        tally=tally,
        unread=[str(one) for one in unread],
        tables=[
            ("Kept, by medium", tally.by_data_type.most_common()),
            ("Kept, by answer kind", tally.by_answer_kind.most_common()),
            ("Kept, by source", tally.by_source.most_common(30)),
            ("Left out", tally.left_out.most_common()),
        ],
        repeated=[(count, tally.repeats[answers]) for answers, count in tally.repeated.most_common()],
        refused=[(reason, count, tally.examples[reason]) for reason, count in tally.refused.most_common()],
        histograms=[_bars(one) for one in tally.histograms() if one.counts],
        shown=list(zip(samples, pictures, strict=True)),
    )
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _bars(histogram: Histogram) -> tuple[str, list[tuple[str, int, float]]]:
    """Title, and of each bar its label, count and width in percent."""
    most = max(histogram.counts.values())
    bars = [
        (histogram.label(place), histogram.counts[place], 100 * histogram.counts[place] / most)
        for place in range(min(histogram.counts), max(histogram.counts) + 1)
    ]
    return histogram.title, bars


def _pictures(samples: Sequence[Sample], media_root: Path, pool: WorkerPool | None) -> list[list[str]]:
    """Of each sample its media's pictures as data URLs, or what is wrong with them."""
    settings = MediaSettings(
        max_frames=_FRAMES,
        min_frames=_FRAMES,
        min_pixels=1,
        max_pixels=_THUMBNAIL_PIXELS,
        image_min_pixels=1,
        image_max_pixels=_THUMBNAIL_PIXELS,
        workers=1,
    )
    with MediaLoader(settings, media_root, pool=pool) as loader:
        return [list(_of(loader.load(sample.media))) for sample in samples]


def _of(media: Sequence[DecodedMedia | SampleError]) -> Iterator[str]:
    from PIL import Image

    for one in media:
        if isinstance(one, SampleError):
            yield str(one)
            continue
        for frame in one.frames:
            content = io.BytesIO()
            Image.fromarray(frame.transpose(1, 2, 0)).save(content, "JPEG", quality=80)
            yield "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


# As records are judged before their share is: a folder of which little was downloaded shows early.
_JUDGED_FROM = 20


def too_many_missing(missing: int, kept: int, most: float) -> bool:
    """Whether of questions that would be kept otherwise a larger share than ``most`` has media that are not there."""
    return missing > most * (missing + kept) and missing + kept >= _JUDGED_FROM


def check_all_judged(tally: Tally, rows: int, judged: tuple[int, int]) -> None:
    """Every row was judged, and every question of one was kept, refused or left out.

    Args:
        rows: of all files.
        judged: rows and verdicts of all parts.

    Raises:
        VlmPgError: some are lost.
    """
    ended = sum(tally.counts.values()) + sum(tally.refused.values()) + sum(tally.left_out.values())
    if judged != (rows, ended):
        raise VlmPgError(
            f"The files have {rows} rows, of which {judged[0]} were judged; of their {judged[1]} questions {ended} "
            "were kept, refused or left out. None may be lost. Give the same command again with --overwrite, and "
            "report this if it is said again."
        )


def check_outcome(tally: Tally, first: str, arguments: Arguments, verdicts: Iterable[Verdict]) -> None:
    """Refuse a set with nothing in it, or of which too many media are not there.

    Raises:
        ConfigError: with the numbers; the parts are kept.
    """
    missing, kept = tally.refused[REASON], sum(tally.counts.values())
    if too_many_missing(missing, kept, arguments.max_missing_share):
        listed = arguments.out / MISSING
        claim(arguments.out, [MISSING])
        with listed.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for one in verdicts:
                if one.refused is not None and one.refused.reason == REASON:
                    file.write(f"{one.refused.where}\t{one.refused.sample_id}\t{one.refused.message}\n")
        raise ConfigError(
            f"The media of {missing} of {missing + kept} questions are not there. At most a share of "
            f"{arguments.max_missing_share:g} may be missing; '{listed}' lists them. Fetch the media, correct "
            f"--media-root, or raise --max-missing-share.\n{tally.summary()}"
        )
    if not tally.counts[first]:
        raise ConfigError(
            f"No record is left for {first}. At least one is needed.\n{tally.summary()}\nCorrect the files or the "
            "options."
        )


def tell_prepared(out: Path, manifest: Mapping[str, Any], most_missing: float) -> None:
    """Print what a prepared set holds and lacks.

    Args:
        most_missing: share of questions whose media may be missing.

    Raises:
        ConfigError: of more it was.
    """
    counts = manifest.get("counts", {})
    kept, refused = counts.get("train", 0) + counts.get("eval", 0), counts.get("refused", {})
    missing = refused.get(REASON, 0)
    if too_many_missing(missing, kept, most_missing):
        raise ConfigError(
            f"'{out}' was prepared when the media of {missing} of {missing + kept} questions were not there; "
            f"'{out / REFUSED}' lists them. At most a share of {most_missing:g} may be missing. Fetch the media and "
            "pass --overwrite, or raise --max-missing-share."
        )
    print("\n".join(_lines(out, manifest, counts, refused)))


def _lines(
    out: Path, manifest: Mapping[str, Any], counts: Mapping[str, Any], refused: Mapping[str, int]
) -> Iterator[str]:
    yield f"{out} is already prepared: {counts.get('train', 0)} for training, {counts.get('eval', 0)} for evaluation."
    for reason, count in refused.items():
        yield f"refused  {count:6}  {printable(reason, 100)}"
    if refused:
        yield f"{out / REFUSED} lists them. To try them again, with media that were fetched since, pass --overwrite."
    if manifest.get("program") != program():
        yield (
            f"Another version of this program prepared {out}: this one may read, refuse or split otherwise. It is left "
            "as it is. To have it of this version, pass --overwrite."
        )
