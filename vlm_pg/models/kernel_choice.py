"""Which attention kernel a model's forward runs on."""

from __future__ import annotations

import torch

from vlm_pg.attention.kernels import Kernel, select_kernel
from vlm_pg.attention.selfcheck import check_kernel, checked_kernel


class KernelChoice:
    """The kernel of that name for a model as it is now, checked; and the one for wherever its weights are later.

    Args:
        heads: query heads, key-value heads, head dim.
        name: ``model.attention_kernel``.
        check: against plain softmax, which takes tensors with values.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], name: str, check: bool = True
    ):
        self._checked_for, self._heads, self._name = (device, dtype), heads, name
        self._given = False
        self.kernel: Kernel = select_kernel(device, dtype, name)
        self.error = check_kernel(self.kernel, device, dtype, *heads) if check else 0.0

    def use(self, kernel: Kernel) -> None:
        """This one everywhere, whatever it was checked for."""
        self.kernel, self._given = kernel, True

    def here(self, device: torch.device, dtype: torch.dtype) -> Kernel:
        """The kernel for a forward that begins here and now, checked.

        Under autocast activations have another dtype than the weights for which ``kernel`` was chosen, and somebody may
        have moved or cast the weights since. Asked before any layer runs: within a checkpointed layer the check would
        become part of it.
        """
        if self._given or self.kernel.name == "oracle":
            return self.kernel
        if torch.is_autocast_enabled(device.type):
            return checked_kernel(device, torch.get_autocast_dtype(device.type), *self._heads)
        if (device, dtype) == self._checked_for:
            return self.kernel
        return checked_kernel(device, dtype, *self._heads, self._name)
