"""What a decode step does to single numbers, as few kernels of Triton: each operand is read once, each result written.

Sums, norms, gates, rotary positions, storing of keys and values, and the merging of attention's parts take torch some
sixty kernels a layer, and each of them reads and writes memory. Here they are operators of torch ("vlm_pg::..."), so
whoever watches operators sees them.
They are written to round where transformers' modules round. A compiler may leave out roundings between two operations
(``tests/unit/rollout/test_fused.py`` says which): a step is nearer to exact arithmetic than other passes through the
same layers, by no more than the dtype's own error. Products and sums are not fused, whatever Triton's default is.
Importing a file with a kernel needs Triton, which comes with torch's builds for GPUs; ``choice`` says where it is used.
"""
