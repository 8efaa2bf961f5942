"""What of the processor tests depend on."""

from __future__ import annotations

import torch

# Without, kernels for bf16 are others: they round and put aside otherwise.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
