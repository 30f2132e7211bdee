"""Placement of all cells of embryo2_z2 with both planes of embryo 1 as the reference (seqFISH mouse embryo).

Run as ``python -m benchmarks.seqfish``; ``--help`` lists the options.
"""

from __future__ import annotations

from benchmarks._runner import main

if __name__ == "__main__":
    main("seqfish")
