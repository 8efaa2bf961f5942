"""Whether what became of a set's questions is worth writing."""

from __future__ import annotations

from collections.abc import Iterable

from data_pipelines.engine.arguments import Arguments
from data_pipelines.engine.judging import Verdict
from data_pipelines.engine.spool import Spool
from data_pipelines.engine.tally import Tally
from vlm_pg.errors import ConfigError

MISSING = "missing_media.txt"
_REASON = "missing_media"
# As records are judged before their share is: a folder of which little was downloaded shows early.
_JUDGED_FROM = 20


def check_outcome(tally: Tally, first: str, arguments: Arguments, spool: Spool, verdicts: Iterable[Verdict]) -> None:
    """Refuse a set with nothing in it, or of which too many media are not there.

    Raises:
        ConfigError: with the numbers; the parts are kept, but those that lack media, which may be fetched now.
    """
    missing, kept = tally.refused[_REASON], sum(tally.counts.values())
    if missing > arguments.max_missing_share * (missing + kept) and missing + kept >= _JUDGED_FROM:
        listed = arguments.out / MISSING
        with listed.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for one in verdicts:
                if one.refused is not None and one.refused.reason == _REASON:
                    file.write(f"{one.refused.where}\t{one.refused.sample_id}\t{one.refused.message}\n")
        spool.forget(_REASON)
        raise ConfigError(
            f"The media of {missing} of {missing + kept} questions are not there. At most a share of "
            f"{arguments.max_missing_share:g} may be missing; '{listed}' lists them. Fetch the media, correct "
            f"--media-root, or raise --max-missing-share.\n{tally.summary()}"
        )
    if not tally.counts[first]:
        spool.forget(_REASON)
        raise ConfigError(
            f"No record is left for {first}. At least one is needed.\n{tally.summary()}\nCorrect the files or the "
            "options."
        )
