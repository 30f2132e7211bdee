#!/usr/bin/env bash
# One computer, with a GPU, with Apple's, or without:
#
#   bash recipes/laptop.sh --input-data cells.h5ad
#
# Whatever stopped it, the same line goes on from the last checkpoint. Other options of `alphastomics train` may follow.
set -euo pipefail

# What a step needs is estimated first: at most so many GiB, with smaller parts of a batch and recomputation if need be.
exec alphastomics train --exp-name laptop --resume last --memory-budget "${MEMORY:-8}" "$@"
