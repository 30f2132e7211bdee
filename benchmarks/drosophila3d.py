"""A random half of the positions is the reference, the other half is placed (Drosophila embryo in 3D, no counts).

Run as ``python -m benchmarks.drosophila3d``; ``--help`` lists the options.
"""

from __future__ import annotations

from benchmarks._runner import main

if __name__ == "__main__":
    main("drosophila3d")
