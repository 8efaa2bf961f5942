"""torchrun on several nodes, without its five minutes of waiting for a node whose launcher has ended.

    python -m vlm_pg.distributed.torchrun OPTIONS_OF_TORCHRUN --module MODULE ARGUMENTS

When its ranks are done, torchrun's agent waits for the agents of the other nodes. One that was ended by a signal never
comes, and torchrun has no option that bounds the wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed import run
from torch.distributed.launcher import api

# Ranks meet before they exit, so agents are done within a second or two of each other. One that comes later than this
# still ends with its ranks' exit code.
EXIT_BARRIER_SECONDS = 10.0


def main() -> None:
    launcher: Any = api
    launcher.LocalElasticAgent = partial(launcher.LocalElasticAgent, exit_barrier_timeout=EXIT_BARRIER_SECONDS)
    run.main()


if __name__ == "__main__":
    main()
