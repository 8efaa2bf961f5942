"""``vlm-pg check``: what is wrong with records before anything is trained on them."""
