"""report.html of an evaluation: one self-contained file, made from results folders alone."""
