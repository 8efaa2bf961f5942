"""The page around the sections: head, key numbers, data, and a policy that lets the browser load nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_pg import __version__
from vlm_pg.errors import ConfigError
from vlm_pg.eval.report.compare import comparison_rows
from vlm_pg.eval.report.embed import Embedded, Room, embed
from vlm_pg.eval.report.figures import judged_rows, k_rows, note_rows, protocol_rows, set_views, step_charts, totals
from vlm_pg.eval.report.results import Results, label, read_marks, read_results
from vlm_pg.files import write_bytes_atomic
from vlm_pg.observe.report.markup import environment, number, number_or_none, percent

MAX_RUNS = 6  # as many as there are colours
_OBSERVE, _EVAL = "vlm_pg.observe.report", "vlm_pg.eval.report"


def write_eval_report(
    folder: Path,
    title: str = "",
    compare: Sequence[Path] = (),
    checkpoints: Sequence[Path] = (),
    room: Room | None = None,
) -> Path:
    """Write ``report.html`` into a results folder: figures, protocol, and a browser of its questions.

    Args:
        folder: holds ``result.json`` and ``answers_<set>.jsonl``; one of the two may be missing.
        title: heading of the page, the folder's name by default.
        compare: other results folders, shown side by side with this one.
        checkpoints: results folders of other checkpoints of the same run, for the curve over training steps; this one's
            own is added where its step is known.
        room: how large the file may become, a little below 100 MB by default.

    Returns:
        The file's path.

    Raises:
        ConfigError: a folder holds no results, there are too many to compare, or a checkpoint's step is unknown.
    """
    if len(compare) >= MAX_RUNS:
        raise ConfigError(
            f"{len(compare)} folders are given for comparison. At most {MAX_RUNS - 1} can be told apart in one report; "
            "give fewer, or those of one run as checkpoints."
        )
    runs = [read_results(Path(one)) for one in (folder, *compare)]
    _name_apart(runs)
    page = _page_of(runs, title, [read_results(Path(one)) for one in checkpoints], room)
    path = Path(folder) / "report.html"
    write_bytes_atomic(path, page.encode("utf-8", "replace"))
    return path


def _name_apart(runs: Sequence[Results]) -> None:
    """Runs of the same folder name also get the name of the folder above."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"


def _page_of(runs: Sequence[Results], title: str, checkpoints: Sequence[Results], room: Room | None) -> str:
    this = runs[0]
    marks = [read_marks(run) for run in runs]
    others = [(run.name, found) for run, found in zip(runs[1:], marks[1:], strict=True)]
    embedded = embed(this, others, room)
    curve = [this, *checkpoints] if checkpoints and this.step is not None else list(checkpoints)
    rows, more_rows = protocol_rows(runs)
    ks, by_k = k_rows(runs)
    style = _piece(_OBSERVE, "style.css") + _piece(_EVAL, "style.css")
    scripts = [_piece(_OBSERVE, "hover.js"), _piece(_EVAL, "window.js"), _piece(_EVAL, "browser.js")]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        environment(_EVAL, _OBSERVE)
        .get_template("eval_page.html")
        .render(
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}",
            style=style,
            scripts=scripts,
            title=title or label(this.name),
            checkpoint=this.protocol.get("checkpoint") or "",
            runs=[label(run.name) for run in runs],
            missing=[f"{label(run.name)}: {run.missing}" for run in runs if run.missing],
            tiles=_tiles(this),
            sets=set_views(runs),
            judged=judged_rows(runs),
            notes=note_rows(runs),
            has_judge=any("judged" in entry for entry in this.sets.values()),
            ks=ks,
            by_k=by_k,
            comparison=comparison_rows(marks[0], others),
            charts=step_charts(curve),
            protocol=rows,
            more_protocol=more_rows,
            embedded=embedded,
            data=_data(embedded),
            version=__version__,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _piece(package: str, name: str) -> Markup:
    """One of our own files, as it is."""
    return Markup(resources.files(package).joinpath(name).read_text("utf-8"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _data(embedded: Embedded) -> list[tuple[str, Markup]]:
    """Element id and content of each piece of data. Base64 and lists of it hold nothing that could be markup."""
    pieces = [("index", embedded.index)]
    pieces += [(f"page-{number}", page) for number, page in enumerate(embedded.pages)]
    pieces += [(f"frames-{number}", chunk) for number, chunk in enumerate(embedded.frames)]
    return [(name, Markup(piece)) for name, piece in pieces]


def _tiles(this: Results) -> list[dict[str, Any]]:
    """Key numbers: accuracy where there is one set alone, since a mean over sets is nobody's figure."""
    summed = totals(this)
    tiles = []
    if len(this.sets) == 1:
        ((name, entry),) = this.sets.items()
        error = number_or_none(entry.get("standard_error"))
        note = label(name) if error is None else f"± {100 * error:.1f} points (1 standard error)"
        tiles.append({"title": "accuracy", "value": percent(number_or_none(entry.get("accuracy"))), "note": note})
    else:
        names = [label(name) for name in this.sets]
        note = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        tiles.append({"title": "evaluation sets", "value": number(float(len(names))), "note": note})
    tiles.append(_count("questions scored", summed["n"], "of", summed["n_total"]))
    tiles.append(_count("unparsed", summed["n_unparsed"], "truncated:", summed["n_truncated"]))
    tiles.append(_count("bad media", summed["n_bad_media"], "questions that could not be asked", None))
    return tiles


def _count(title: str, value: float | None, words: str, more: float | None) -> dict[str, Any]:
    return {"title": title, "value": number(value), "note": words if more is None else f"{words} {number(more)}"}
