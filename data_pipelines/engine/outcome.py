"""Whether what became of a set's questions is worth writing."""

from __future__ import annotations

from collections.abc import Iterable

from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.missing import REASON
from data_pipelines.engine.tally import Tally
from data_pipelines.owned import MISSING, claim
from vlm_pg.errors import ConfigError, VlmPgError

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
