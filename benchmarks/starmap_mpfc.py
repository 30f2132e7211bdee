"""Placement of the cells of each of three mice with the other two as the reference (STARmap medial prefrontal cortex).

Run as ``python -m benchmarks.starmap_mpfc``; ``--help`` lists the options.
"""

from __future__ import annotations

from benchmarks._runner import main

if __name__ == "__main__":
    main("starmap_mpfc")
