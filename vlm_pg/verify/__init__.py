"""``vlm-pg verify``: is sharing exact for the user's own model and data, and what does it save there?"""
