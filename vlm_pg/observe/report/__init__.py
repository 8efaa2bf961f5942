"""report.html: one self-contained file about a run, made from the run's folder alone."""
