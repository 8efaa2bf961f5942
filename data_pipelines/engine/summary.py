"""A page about a prepared set for people: what was kept and refused, how long it is, a few records with their media."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from data_pipelines.engine.tally import Histogram, Tally
from vlm_pg.errors import SampleError
from vlm_pg.media.loader import MediaLoader
from vlm_pg.media.pool import WorkerPool
from vlm_pg.media.settings import MediaSettings
from vlm_pg.types import DecodedMedia, Sample

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
