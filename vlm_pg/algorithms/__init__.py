"""The policy-gradient family: pure functions on numbers and tensors.

Rewards to advantages: ``shaping`` (what depends on the group), ``advantages``. What trains: ``pruning``,
``allocation``. The loss: ``ratios``, ``losses``, ``kl``, ``weights``. ``presets`` are points in the family with their
papers' values. Reading ``settings`` does not load torch.
"""
