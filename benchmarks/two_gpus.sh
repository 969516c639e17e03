#!/usr/bin/env bash
# Synchronised statistics on the GPUs of one host, in at most four minutes: whether they are right (every precision, uneven
# and empty ranks, CUDA graphs, torch.compile), how long calls take beside SyncBatchNorm, the two collectives by
# themselves, and the example. Writes <GPU>-x<GPUs>.json after every part.
#
#   OUT=out benchmarks/two_gpus.sh
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
export OMP_NUM_THREADS=8
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
timeout 215 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" benchmarks/ranks.py \
  --seconds 180 --json "$out/$gpu-x$gpus.json" 2>&1 | tee "$out/ranks.log"
status=${PIPESTATUS[0]}
for flag in "" --eager; do
  timeout 30 python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" examples/simsiam_sync.py \
    --steps 100 $flag 2>&1 | tee -a "$out/example.log"
done
exit "$status"
