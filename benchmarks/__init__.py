"""Benchmarks of AlphaSTomics on real tissues; run from the repository root as ``python -m benchmarks.<name>``."""
