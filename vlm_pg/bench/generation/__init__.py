"""The measurement behind ``vlm-pg bench rollout``: generating G responses per prompt, ours against transformers'."""
