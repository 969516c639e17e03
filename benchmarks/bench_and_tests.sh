#!/usr/bin/env bash
# All that the result file needs, on a machine with two Hopper GPUs, in about six minutes: the bench on the first while the
# GPU suite and two sanitizers run on the second, each on cores of its own. (Host times are then noisier than alone.)
#
#   OUT=out benchmarks/bench_and_tests.sh
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cores=$(nproc)
split=$((cores * 2 / 5))
bench() {
  CUDA_VISIBLE_DEVICES=0 taskset -c "0-$((split - 1))" timeout 345 python3 -m gemmnorm bench --suite h200 \
    --case kb33,kb39,projector,v0 --budget 0.2 --quiet --resume --json "$out/$gpu.json" "$@"
}
second() { # SECONDS COMMAND…: on the other GPU
  CUDA_VISIBLE_DEVICES=1 taskset -c "$split-$((cores - 1))" timeout -s INT "$@"
}
(
  second 290 python3 -m pytest -m gpu -n 18 --dist worksteal -v --junitxml "$out/gpu.xml" >"$out/tests.log" 2>&1
  for tool in memcheck racecheck; do
    second 80 compute-sanitizer --tool "$tool" --report-api-errors no \
      python3 benchmarks/sanitize.py --own "one tile" "whole panels" >"$out/$tool.log" 2>&1
  done
) &
bench >"$out/bench.log" 2>&1
wait
bench --junit "$out/gpu.xml" >>"$out/bench.log" 2>&1 # measures nothing again: puts the suite's counts into the file
python3 -m pytest -m gpu tests/test_gpu_system.py -k not_the_current_one >"$out/second.log" 2>&1
tail -n 3 "$out"/{tests,memcheck,racecheck,second}.log
echo "hazards in kernels of this package: $(grep -c "Race.*fused_" "$out/racecheck.log")" # the library's are reported too
tail -n 40 "$out/bench.log"
