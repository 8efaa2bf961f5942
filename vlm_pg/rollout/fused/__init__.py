"""A decode step's small operations as few Triton kernels: each operand is read once, each result written once.

Sums, norms, gates, rotary positions, storing of keys and values, and merging attention's parts take torch some sixty
kernels a layer, each of which reads and writes memory. Here they are torch operators ("vlm_pg::..."), which dispatch
modes see. They round where transformers' modules round; a compiler may leave out roundings between two operations
(``tests/unit/rollout/test_compiled_kernels.py`` says which), so a step is nearer to exact arithmetic than other passes
through the same layers, by no more than the dtype's own error. Products and sums are not fused, whatever Triton's
default is.
Importing a file with a kernel needs Triton, which comes with torch's builds for GPUs; ``choice`` says where they run.
"""

# Names of the kernels.
NORMS, SUMS, GATES, ROTATION = "norms", "residual sums", "gates", "rotary positions"
MERGING, OWN, DRAWING, STATISTICS = "merging", "own tokens", "drawing", "log-probabilities"
KERNELS = (NORMS, SUMS, GATES, ROTATION, MERGING, OWN, DRAWING, STATISTICS)
