"""Run inside the environment of a peer: ``python -P _inside.py SCRIPT INPUT OUTPUT SEED GIBIBYTES``.

INPUT has the arrays ``reference``, ``positions``, ``query`` and ``is_counts``, OUTPUT the positions under the name of each method.
``-P`` keeps this folder, where the scripts have the names of the packages that they import, from the import path.
"""

from __future__ import annotations

import importlib.util
import resource
import sys

import numpy as np


def main(script: str, source: str, target: str, seed: str, gibibytes: str) -> None:
    """Place the query of INPUT by the function ``place(data, seed)`` of SCRIPT within a limit of memory."""
    limit = int(float(gibibytes) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    spec = importlib.util.spec_from_file_location("peer_script", script)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{script} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with np.load(source) as data:
        np.savez(target, **module.place(dict(data), int(seed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
