"""``python -m alphastomics``."""

from __future__ import annotations

from alphastomics.main import main

if __name__ == "__main__":
    raise SystemExit(main())
