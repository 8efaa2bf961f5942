"""``vlm-pg bench rollout``: generating G responses per prompt, as the measuring process does it."""
