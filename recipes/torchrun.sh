#!/usr/bin/env bash
# One machine with several GPUs:
#
#   bash recipes/torchrun.sh --data-dir DATASET
#
# Several machines: run the same command on each, with a shared output folder:
#
#   NODES=2 HEAD=first.example.org:29500 bash recipes/torchrun.sh --data-dir DATASET --output-dir /shared/outputs
#
# If a process dies, torchrun restarts all of them, and they resume from the last checkpoint. After any other interruption, run
# the same command again.
set -euo pipefail

NODES=${NODES:-1}
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} # per machine
# Without this, restarted processes would receive the address of the processes that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "$NODES" --nproc-per-node "$PROCESSES" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:0}" --rdzv-id alphastomics \
  -m alphastomics train --strategy "${STRATEGY:-ddp}" --devices "$PROCESSES" --num-nodes "$NODES" \
  --exp-name torchrun --resume last "$@"
