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
from data_pipelines.engine.media_finder import MISSING_MEDIA
from data_pipelines.engine.output_folder import MISSING, claim, program
from data_pipelines.engine.splits import REFUSED, Repeat
from vlm_pg.errors import ConfigError, SampleError, VlmPgError, printable
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import BadSample, DecodedMedia, Sample

if TYPE_CHECKING:
    from vlm_pg.media.decode_file import MediaFacts

_SHOWN = 12
_THUMBNAIL_PIXELS = 160 * 120
_FRAMES = 4
# The share of missing media is judged from so many records on: a folder of which little was downloaded shows early.
_MIN_JUDGED = 20


@dataclass
class Histogram:
    """Counts by size, in bins that double: bin 0 is up to ``first``, bin 1 up to twice as much, and so on."""

    title: str
    first: float
    counts: Counter[int] = field(default_factory=Counter)

    def add(self, size: float) -> None:
        self.counts[max(0, math.ceil(math.log2(max(size, self.first) / self.first)))] += 1

    def bars(self) -> list[tuple[str, int, float]]:
        """Label, count and width in percent of each bar."""
        most, bins = max(self.counts.values()), range(min(self.counts), max(self.counts) + 1)
        return [(f"up to {self.first * 2**i:,.0f}", self.counts[i], 100 * self.counts[i] / most) for i in bins]


@dataclass
class Tally:
    """Counts of questions by outcome, and a few kept ones to show.

    Args:
        option_columns: how many fields of a row hold an option each; 0: none.
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
        """Count a question that was written. ``facts``: of its media, where they were probed."""
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
        # Samples with the largest hashes: a choice that depends on the samples alone and needs one pass.
        rank = hashlib.sha256(sample.sample_id.encode(errors="surrogatepass")).hexdigest()
        self.shown = nlargest(_SHOWN, [*self.shown, (rank, sample)], key=lambda one: one[0])

    def refuse(self, bad: BadSample) -> None:
        """Count a question that cannot be used."""
        self.refused[bad.reason] += 1
        self.examples.setdefault(bad.reason, bad)

    def repeat(self, repeat: Repeat) -> None:
        """Count a kept duplicate of a question."""
        self.repeated[repeat.answers] += 1
        self.repeats.setdefault(repeat.answers, repeat)

    def report(self) -> dict[str, Any]:
        """The counts in ``report.json``."""
        report: dict[str, Any] = {"train": self.counts["train"], "eval": self.counts["eval"]}
        counters = {"kept_by_data_type": self.by_data_type, "kept_by_answer_kind": self.by_answer_kind,
                    "kept_by_source": self.by_source, "left_out": self.left_out, "refused": self.refused,
                    "repeated": self.repeated}  # fmt: skip
        for name, counter in counters.items():
            report[name] = dict(sorted(counter.items(), key=lambda one: (-one[1], one[0])))
        if self.option_columns:
            report["fewer_options_than_columns"] = self.fewer_options
        if self.subtitled:
            report["without_subtitles"] = self.without_subtitles
        return report

    def summary(self) -> str:
        """A few lines for people: how many were kept, left out, refused and repeated, and why."""
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


def write_summary(
    path: Path,
    name: str,
    tally: Tally,
    media_root: Path | None,
    pool: WorkerPool | None = None,
    unread: Sequence[object] = (),
) -> None:
    """Write the summary page: self-contained HTML without scripts.

    Args:
        name: of the data set.
        media_root: of the media that are shown; None: none are. One that cannot be decoded is shown by name and fault.
        pool: the processes that decode; by default one that ends with this.
        unread: annotation files that were not read, as texts.
    """
    from jinja2 import Environment, StrictUndefined

    template = resources.files("data_pipelines.engine").joinpath("summary.html.jinja").read_text("utf-8")
    samples = [sample for _, sample in tally.shown]
    pictures = _pictures(samples, media_root, pool) if media_root is not None else [[] for _ in samples]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    histograms = (tally.words, tally.clips, tally.seconds, tally.tokens)
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
        histograms=[(one.title, one.bars()) for one in histograms if one.counts],
        shown=list(zip(samples, pictures, strict=True)),
    )
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _pictures(samples: Sequence[Sample], media_root: Path, pool: WorkerPool | None) -> list[list[str]]:
    """The pictures of each sample's media as data URLs, or their faults."""
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
        return [list(_data_urls(loader.load(sample.media))) for sample in samples]


def _data_urls(media: Sequence[DecodedMedia | SampleError]) -> Iterator[str]:
    from PIL import Image

    for one in media:
        if isinstance(one, SampleError):
            yield str(one)
            continue
        for frame in one.frames:
            content = io.BytesIO()
            Image.fromarray(frame.transpose(1, 2, 0)).save(content, "JPEG", quality=80)
            yield "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def too_many_missing(missing: int, kept: int, max_share: float) -> bool:
    """Whether a larger share of the otherwise usable questions than ``max_share`` has missing media."""
    return missing > max_share * (missing + kept) and missing + kept >= _MIN_JUDGED


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
            "report this if it happens again."
        )


def check_outcome(tally: Tally, first: str, arguments: Arguments, verdicts: Iterable[Verdict]) -> None:
    """Refuse a set without records in the split ``first``, or with too many missing media.

    Raises:
        ConfigError: with the numbers; the parts are kept.
    """
    missing, kept = tally.refused[MISSING_MEDIA], sum(tally.counts.values())
    if too_many_missing(missing, kept, arguments.max_missing_share):
        path = arguments.out / MISSING
        claim(arguments.out, [MISSING])
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for one in verdicts:
                if one.refused is not None and one.refused.reason == MISSING_MEDIA:
                    file.write(f"{one.refused.where}\t{one.refused.sample_id}\t{one.refused.message}\n")
        raise ConfigError(
            f"The media of {missing} of {missing + kept} questions are not there. At most a share of "
            f"{arguments.max_missing_share:g} may be missing; '{path}' lists them. Fetch the media, correct "
            f"--media-root, or raise --max-missing-share.\n{tally.summary()}"
        )
    if not tally.counts[first]:
        raise ConfigError(
            f"No record is left for {first}. At least one is needed.\n{tally.summary()}\nCorrect the files or the "
            "options."
        )


def print_prepared(out: Path, manifest: Mapping[str, Any], max_missing_share: float) -> None:
    """Print what a set that was prepared before holds and lacks, and how to retry what was refused.

    Raises:
        ConfigError: a larger share than ``max_missing_share`` of its questions had missing media.
    """
    counts = manifest.get("counts", {})
    kept, refused = counts.get("train", 0) + counts.get("eval", 0), counts.get("refused", {})
    missing = refused.get(MISSING_MEDIA, 0)
    if too_many_missing(missing, kept, max_missing_share):
        raise ConfigError(
            f"'{out}' was prepared when the media of {missing} of {missing + kept} questions were not there; "
            f"'{out / REFUSED}' lists them. At most a share of {max_missing_share:g} may be missing. Fetch the media "
            "and pass --overwrite, or raise --max-missing-share."
        )
    print(f"{out} is already prepared: {counts.get('train', 0)} for training, {counts.get('eval', 0)} for evaluation.")
    for reason, count in refused.items():
        print(f"refused  {count:6}  {printable(reason, 100)}")
    if refused:
        print(f"{out / REFUSED} lists them. To try them again, with media that were fetched since, pass --overwrite.")
    if manifest.get("program") != program():
        print(
            f"Another version of this program prepared {out}: this one may read, refuse or split otherwise. It is left "
            "as it is. To have it of this version, pass --overwrite."
        )
