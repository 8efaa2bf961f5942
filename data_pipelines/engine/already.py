"""What is said of a set that was prepared before: what it has, what was refused, and how to have that tried again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_pipelines.engine.assembling import REFUSED
from data_pipelines.engine.missing import REASON
from data_pipelines.engine.outcome import too_many_missing
from data_pipelines.program import program
from vlm_pg.errors import ConfigError, printable


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
