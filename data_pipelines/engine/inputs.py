"""The files that a set is prepared from: which form each is of, what judging depends on, what the manifest tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipelines.common import state_of
from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.dataset import DataSet
from data_pipelines.engine.guarding import refuse_inside
from data_pipelines.engine.judging import Source
from data_pipelines.engine.reading import files_beside
from data_pipelines.engine.rows import form_of, row_names
from data_pipelines.manifest import fingerprint, sha256_of
from vlm_pg.data.files import files_of
from vlm_pg.data.prepared import SCHEMA_VERSION
from vlm_pg.errors import ConfigError, printable

MANY_FILES = 50


def sources_of(dataset: DataSet, arguments: Arguments) -> list[Source]:
    """The annotation files, each with its form.

    Raises:
        ConfigError: a file is of no form, or what is read lies in the folder that is written.
    """
    paths = [*arguments.train, *arguments.eval]
    refuse_inside(arguments.out, (file for path in paths for file in files_of(path)))
    refuse_inside(arguments.out, dataset.described_in)
    names = row_names(paths)
    found = []
    for split, some in (("train", arguments.train), ("eval", arguments.eval)):
        form = None
        for number, path in enumerate(some):
            # Of thousands of files of one object each the first tells for all.
            form = form_of(dataset, path) if form is None or number < MANY_FILES else form
            found.append(Source(path, dataset.forms.index(form), names[path], split))  # type: ignore[arg-type]
    refuse_inside(arguments.out, _beside(dataset, found))
    return found


def inputs_of(dataset: DataSet, sources: Sequence[Source], arguments: Arguments) -> dict[str, Any]:
    """What judging depends on, as JSON values; files by their size and time of change."""
    files: dict[str, Any] = {}
    for split in ("train", "eval"):
        of_split = [source for source in sources if source.split == split]
        states = [state_of(source.path, f"--{split}") for source in of_split]
        states += [state_of(path, "the folder") for path in sorted(_beside(dataset, of_split))]
        files[f"{split}_files"] = states if len(states) <= MANY_FILES else [len(states), fingerprint({"all": states})]
    inputs: dict[str, Any] = {"pipeline": dataset.name, "schema_version": SCHEMA_VERSION, **files}
    if dataset.described_in:
        inputs["described_in"] = [state_of(path, "the command") for path in dataset.described_in]
    inputs |= {"data_types": sorted(arguments.data_types), "answer_kinds": sorted(arguments.answer_kinds)}
    inputs["sources"] = sorted(arguments.sources)
    if dataset.media is not None:
        inputs |= {
            "media_root": str(arguments.media_root.resolve()),
            "skip_media_check": arguments.skip_media_check,
        }
    return inputs


def details_of(dataset: DataSet, sources: Sequence[Source], rows: Mapping[Path, int]) -> list[dict[str, Any]]:
    """Of the first files, as the manifest tells. ``rows``: of each."""
    return [
        {
            "path": str(source.path),
            "form": dataset.forms[source.form].name,
            "split": source.split,
            "rows": rows[source.path],
            "sha256": sha256_of(files_of(source.path)),
        }
        for source in sources[:MANY_FILES]
    ]


def refuse_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse files that were written while they were read: nobody knows which rows were seen.

    Args:
        before: ``inputs_of`` when the run began.
        now: the same, after all was read.

    Raises:
        ConfigError: they differ.
    """
    changed = [name for name in before if before[name] != now[name]]
    if not changed:
        return
    old = {str(one) for name in changed for one in before[name]}
    paths = [one["path"] for name in changed for one in now[name] if isinstance(one, dict) and str(one) not in old]
    shown = ", ".join(f"'{printable(path, 300)}'" for path in paths[:6]) or "One of the files"
    raise ConfigError(
        f"{shown} changed while the set was prepared: a download that goes on, or another program. Files that stay as "
        "they are, are needed; nothing was replaced. Wait until they are complete, and give the same command again."
    )


def _beside(dataset: DataSet, sources: Iterable[Source]) -> set[Path]:
    return {path for source in sources for path in files_beside(source.path, dataset.forms[source.form].beside)}
