#!/usr/bin/env bash
# One machine with several GPUs:
#
#   bash recipes/torchrun.sh --data-dir DATASET
#
# Several machines, the same line on each, with a folder that all of them see:
#
#   NODES=2 HEAD=first.example.org:29500 bash recipes/torchrun.sh --data-dir DATASET --output-dir /shared/outputs
#
# When a process dies, torchrun starts all of them again, and they go on from the last checkpoint; so does the same line.
set -euo pipefail

NODES=${NODES:-1}
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} # on each machine
# Else those that are started again would be told where to find the processes that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:0}" --rdzv-id alphastomics \
  -m alphastomics train --strategy "${STRATEGY:-ddp}" --devices "$PROCESSES" --num-nodes "$NODES" \
  --exp-name torchrun --resume last "$@"
