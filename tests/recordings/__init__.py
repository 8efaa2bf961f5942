"""What other programs computed, recorded once, and the scripts that recorded it."""
