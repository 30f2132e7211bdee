#!/usr/bin/env bash
# One computer, with or without a GPU:
#
#   bash recipes/laptop.sh --input-data cells.h5ad
#
# After an interruption, run the same command again to resume. Other options of `alphastomics train` may follow.
set -euo pipefail

# A step may use this many GiB. If needed, batches are split and activations recomputed to stay within it.
exec alphastomics train --exp-name laptop --resume last --memory-budget "${MEMORY:-8}" "$@"
