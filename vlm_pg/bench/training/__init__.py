"""``vlm-pg bench step``: one group's loss and gradient, ours and others', as the measuring process runs them."""
