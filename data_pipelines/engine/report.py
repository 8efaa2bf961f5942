"""The outcome of a preparation: its summary page and the checks of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from data_pipelines.engine.media_finder import MISSING_MEDIA
from data_pipelines.engine.output_folder import MISSING, claim, program
from data_pipelines.engine.resume import Verdict
from data_pipelines.engine.splits import REFUSED, Tally
from vlm_pg.errors import ConfigError, SampleError, printable
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia

_THUMBNAIL_PIXELS = 160 * 120
_FRAMES = 4
# The share of missing media is judged from so many records on: a folder of which little was downloaded shows early.
_MIN_JUDGED = 20


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
    pictures: list[list[str]] = [[] for _ in samples]
    if media_root is not None:
        sizes = {"min_pixels": 1, "max_pixels": _THUMBNAIL_PIXELS}
        sizes |= {f"image_{name}": pixels for name, pixels in sizes.items()}
        frames = {"max_frames": _FRAMES, "min_frames": _FRAMES}
        settings = MediaSettings.model_validate({**frames, **sizes, "workers": 1})
        with MediaLoader(settings, media_root, pool=pool) as loader:
            pictures = [list(_data_urls(loader.load(sample.media))) for sample in samples]
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


def too_many_missing(missing: int, usable: int, max_share: float) -> bool:
    """Whether a larger share of the otherwise usable questions than ``max_share`` has missing media."""
    return missing > max_share * (missing + usable) and missing + usable >= _MIN_JUDGED


def check_outcome(tally: Tally, first: str, out: Path, max_missing_share: float, verdicts: Iterable[Verdict]) -> None:
    """Refuse a set without records in the split ``first``, or with too many missing media.

    Raises ConfigError: with the numbers; the parts are kept.
    """
    missing, usable = tally.refused[MISSING_MEDIA], sum(tally.counts.values())
    if too_many_missing(missing, usable, max_missing_share):
        path = out / MISSING
        claim(out, [MISSING])
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for one in verdicts:
                if one.refused is not None and one.refused.reason == MISSING_MEDIA:
                    file.write(f"{one.refused.where}\t{one.refused.sample_id}\t{one.refused.message}\n")
        raise ConfigError(
            f"The media of {missing} of {missing + usable} questions are not there. At most a share of "
            f"{max_missing_share:g} may be missing; '{path}' lists them. Fetch the media, correct "
            f"--media-root, or raise --max-missing-share.\n{tally.summary()}"
        )
    if not tally.counts[first]:
        raise ConfigError(
            f"No record is left for {first}. At least one is needed.\n{tally.summary()}\nCorrect the files or the "
            "options."
        )


def print_prepared(out: Path, manifest: Mapping[str, Any], max_missing_share: float) -> None:
    """Print what a set that was prepared before holds and lacks, and how to retry what was refused.

    Raises ConfigError: a larger share than ``max_missing_share`` of its questions had missing media.
    """
    counts = manifest.get("counts", {})
    usable, refused = counts.get("train", 0) + counts.get("eval", 0), counts.get("refused", {})
    missing = refused.get(MISSING_MEDIA, 0)
    if too_many_missing(missing, usable, max_missing_share):
        raise ConfigError(
            f"'{out}' was prepared when the media of {missing} of {missing + usable} questions were not there; "
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
