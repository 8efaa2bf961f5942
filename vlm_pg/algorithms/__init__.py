"""Advantages, losses and loss weights: pure functions on numbers and tensors.

The formulas live in ``advantages`` (rewards to advantages), ``losses`` (clipped ratio, KL) and ``weights`` (what one
response token counts for). This package imports nothing itself, so that reading its settings does not load torch.
"""
