"""What ``scripts/build_tiny_model.py`` is made of."""
