"""Stepwell beside its peers: `python -m benchmarks`. How to read it, and what is fair about it: README.md."""
