"""Published rules of reading, by name ("set/whose"): how other projects read and score outputs, their faults included.

A figure is comparable with a published one only where outputs are read alike, so these rules do what the named code
does, right or wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from vlm_pg.answers.published import charades_sta, mathematics, mathvista, video_choices, video_mmmu, vsi_bench
from vlm_pg.answers.published.rule import Rule
from vlm_pg.answers.verdict import Reader
from vlm_pg.errors import ConfigError, printable

_SETS = (video_choices, vsi_bench, video_mmmu, mathvista, mathematics, charades_sta)

PUBLISHED: Mapping[str, Rule] = MappingProxyType({rule.name: rule for one in _SETS for rule in one.RULES})


def published_rule(name: str) -> Reader:
    """The reader that does what the rule of this name does.

    Raises:
        ConfigError: there is no such rule; the message names the nearest, or those of the set.
    """
    if name in PUBLISHED:
        return PUBLISHED[name].read
    near = difflib.get_close_matches(name, PUBLISHED, n=1, cutoff=0.0)
    of_set = [known for known in PUBLISHED if known.split("/")[0] == name.split("/")[0]]
    raise ConfigError(
        f"There is no published rule of reading called '{printable(name, 100)}'. The nearest is '{near[0]}'. "
        f"Known are {', '.join(of_set or PUBLISHED)}. Choose one of them, or name a function of your own as "
        "path/to/file.py:function."
    )
