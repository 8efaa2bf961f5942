"""Training records of a chosen difficulty: the share of sampled responses that were right (``data.difficulty``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlm_pg.data.sample_sets import chosen_samples, ids_of, sources_of
from vlm_pg.data.sampled import SampledFile
from vlm_pg.data.settings import DataSettings
from vlm_pg.errors import ConfigError, printable
from vlm_pg.types import Sample


def within_difficulty(
    samples: Sequence[Sample], data: DataSettings, announce: Callable[[str], None] = lambda line: None
) -> Sequence[Sample]:
    """The samples that ``data.difficulty`` keeps; all without it. Of prepared sets two columns are read.

    Records of a source that ``data.mixture`` leaves out stay and do not count.

    Args:
        samples: of ``data.train``, the first ``data.limit``.
        announce: called with a line about what is left out.

    Raises:
        ConfigError: the file cannot be read, lacks a record, or no record of a source or set is kept.
    """
    settings = data.difficulty
    if settings is None or not samples:
        return samples
    known = SampledFile(settings.file).p_correct
    names, sources_N = sources_of(samples)
    used_N = np.array([name not in data.weightless for name in names])[sources_N]
    ids = list(ids_of(samples))
    absent_N = used_N & np.array([one not in known for one in ids])
    total = int(used_N.sum())
    if absent_N.any() and settings.missing == "refuse":
        raise ConfigError(
            f"data.difficulty.file={settings.file} has no row of {int(absent_N.sum()):,} of {total:,} training records "
            f"(the first is {printable(ids[int(absent_N.argmax())], 200)}), so their difficulty is unknown. Sample "
            "them (vlm-pg sample with this data.train and data.limit), or set data.difficulty.missing to keep or drop."
        )
    values = (known.get(one) for one in ids)
    p_correct_N = np.array([np.nan if value is None else value for value in values])
    inside_N = (settings.low <= p_correct_N) & (p_correct_N <= settings.high)
    kept_N = inside_N | (absent_N & (settings.missing == "keep"))
    bounds = f"p_correct within [{settings.low:g}, {settings.high:g}]"
    # Without weights all records of a single set are drawn from together.
    drawn_from = names if data.mixture or isinstance(data.train, dict) else []
    emptied = [n for i, n in enumerate(drawn_from) if n not in data.weightless and not kept_N[sources_N == i].any()]
    if emptied or not (kept_N & used_N).any():
        raise ConfigError(
            f"data.difficulty keeps no record of {', '.join(emptied) or data.train_shown}: none has {bounds} in "
            f"{settings.file}. Training needs at least one. Widen data.difficulty.low and high, or leave out what it "
            "empties."
        )
    left_out = {
        "below": p_correct_N < settings.low,
        "above": p_correct_N > settings.high,
        "without a value": np.isnan(p_correct_N) & ~absent_N,
        "without a row": absent_N & ~kept_N,
    }
    counts = ", ".join(f"{int((one & used_N).sum()):,} {what}" for what, one in left_out.items())
    announce(
        f"data.difficulty: {int((kept_N & used_N).sum()):,} of {total:,} records have {bounds}; left out: {counts}"
    )
    return chosen_samples(samples, kept_N | ~used_N)
