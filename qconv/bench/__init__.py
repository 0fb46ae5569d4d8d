"""Benchmarks: each checks correctness first, then times both sides in turn in one run."""
