"""The policy-gradient family: small functions on records, numbers and tensors, settings last.

Rewards to advantages: ``advantages``. What trains: ``pruning``. The loss: ``tokens`` in, ``losses``. ``registry`` names
losses, estimators and presets (points in the family with their papers' values), ``own`` loads them, the user's own too.
Reading ``settings`` does not load torch.
"""
