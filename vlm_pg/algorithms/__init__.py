"""The policy-gradient family: small functions on records, numbers and tensors, settings last.

Rewards to advantages: ``shaping`` (what depends on the group), ``advantages`` by ``scales``, ``token_advantages``. What
trains: ``pruning``, ``allocation``. The loss: ``tokens`` in, ``losses``, ``ratios``, ``kl``, ``weights``. ``registry``
names losses and estimators, ``own`` loads them, the user's own too. ``presets`` are points in the family with their
papers' values. Reading ``settings`` does not load torch.
"""
