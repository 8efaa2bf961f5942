"""A rank that torchrun starts anew: python -m tests.integration.restarted_rank ENGINE FILE.

In the first attempt rank 0 writes a note and a stop request, and rank 1 dies. In the next one each rank appends to
FILE what it finds of that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from vlm_pg.distributed import SharedNote, disconnect, gather_objects, join_ranks


def main(engine: str, found: str) -> None:
    if engine == "deepspeed":
        from vlm_pg.training.deepspeed_engine import connect

        connect()
    else:
        join_ranks()
    note, stop, rank = SharedNote("note"), SharedNote("stop"), int(os.environ["RANK"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == 0:
            note.write("stale")
            stop.write("requested")
        note.read(30)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # torchrun ends it
    of_ranks = gather_objects((rank, note.exists(), stop.exists()))
    if rank == 0:
        Path(found).write_text(repr(of_ranks))
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
