"""What a decode step does to single numbers, as few kernels of Triton: each operand is read once, each result written.

Norms, gates, rotary positions, and the merging of attention's parts take torch some sixty kernels a layer, and each of
them reads and writes memory. Here they are operators of torch ("vlm_pg::..."), so whoever watches operators sees them.
They round where transformers' modules round, so a step gives what the other passes through the same layers give.
Importing a file with a kernel needs Triton, which comes with torch's builds for GPUs; ``choice`` says where it is used.
"""
