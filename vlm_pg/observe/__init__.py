"""What is seen of a run: its folder, metrics, console lines and report."""
