"""Placement of half of the cells of a Drosophila embryo in 3D, with the other half as the reference; values are not counts.

Run as ``python -m benchmarks.drosophila3d``; ``--help`` lists the options.
"""

from __future__ import annotations

from benchmarks._runner import main

if __name__ == "__main__":
    main("drosophila3d")
