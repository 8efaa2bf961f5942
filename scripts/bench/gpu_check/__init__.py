"""``scripts/gpu_check.sh``: does all of it work on this machine's GPU, how fast, and what was counted beforehand?

A run is a list of stages. Each is a few commands in processes of their own, with a limit on time and a log file;
whatever becomes of one, the next one runs. What a bare machine may lack is imported by those processes alone, and by
the page: missing packages are named, and stages that need them are left out.
"""
