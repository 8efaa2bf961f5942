"""Reading answers: one grader per kind, whole outputs, and published rules of benchmarks."""
