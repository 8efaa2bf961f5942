"""Disk cache of sampled frames and of outputs of a frozen vision tower."""
