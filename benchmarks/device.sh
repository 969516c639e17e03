#!/usr/bin/env bash
# What needs a Hopper GPU, stage by stage; full logs in $OUT, the ends of them on the terminal.
#
#   benchmarks/device.sh tests sanitize split cases bench
#
#   tests     pytest -m gpu, with its counts for the result file
#   sanitize  every kernel at small sizes under memcheck, synccheck, racecheck and initcheck
#   candidates  every candidate of the planner's, at SIZES or all that CANDIDATES seconds allow; with ADD=FILE what that lacks, and all again with AGAIN=--again, or those where NEAR=gram competes
#   split     float32 by split operands beside the library's float32, errors and times
#   cases     every strategy at every case, errors and times
#   random    problems of the seeds RANDOM_SEEDS (0,1,2,3,4), COUNT of each (12), in PRECISIONS (bf16)
#   shapes    thin products, few rows and rows that are no whole lines, in bf16
#   fuzz      COUNT (2000) random problems, models and files, of SEED (24), as tests/fuzzing.py has them
#   bench     the result file: benchmarks/results/<GPU>.json is what it writes
#
#   OUT       where logs and results go (out)        CASES   of the suite (kb33,kb39,projector,v0)
#   WORKERS   of pytest (12)
#   BUDGET    seconds of sampling a cell (0.4)    LIMIT   seconds a stage may take (400)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,temperature.gpu --format=csv,noheader | tee "$out/gpu.txt"

logged() { # NAME LINES COMMAND…: run it, keep all it says, show the end
  local name=$1 lines=$2 begun=$SECONDS
  shift 2
  timeout -s INT -k 20 "${LIMIT:-400}" "$@" >"$out/$name.log" 2>&1  # interrupted, pytest still says what failed
  local code=$?
  tail -n "$lines" "$out/$name.log"
  printf '== %s: exit code %s, %s s\n' "$name" "$code" "$((SECONDS - begun))"
  return "$code"
}

for stage in "${@:-tests}"; do
  case "$stage" in
    tests)
      logged tests 25 python3 -m pytest -m gpu -n "${WORKERS:-12}" --dist worksteal --junitxml "$out/gpu.xml"
      [ $? -ne 124 ] || rm -f "$out/gpu.xml" # cut off: no counts
      ;;
    sanitize) # the tools beside each other; racecheck and synccheck on what has an own product
      for tool in memcheck "synccheck --forward --without-small" "racecheck --forward" "racecheck --turns" "initcheck --plain"; do
        read -r name what <<<"$tool"
        logged "$name${what// /}" 3 compute-sanitizer --tool "$name" --report-api-errors no --print-limit 100000 \
          python3 benchmarks/sanitize.py $what &
      done
      wait
      ;;
    candidates)
      logged candidates 25 python3 benchmarks/candidates.py --out "$out/candidates.json.gz" --budget "${CANDIDATES:-300}" \
        ${SIZES:+--sizes $SIZES} ${ADD:+--add $ADD} ${AGAIN:-} ${NEAR:+--near $NEAR} ${ONLY:+--only $ONLY}
      ;;
    split) logged split 30 python3 lab/device_check.py --precision fp32 --case kb33 kb39 projector odd --strategy one_kernel cublas_folded_bn ;;
    cases) logged cases 80 python3 lab/device_check.py --precision bf16 tf32 ;;
    bench)
      junit=()
      [ -f "$out/gpu.xml" ] && junit=(--junit "$out/gpu.xml")
      logged bench 60 python3 -m gemmnorm bench --suite h200 --case "${CASES:-kb33,kb39,projector,v0}" --budget "${BUDGET:-0.4}" \
        --quiet --resume --json "$out/$gpu.json" "${junit[@]}"
      ;;
    random)
      logged random 60 python3 -m gemmnorm bench --random "${RANDOM_SEEDS:-0,1,2,3,4}" --count "${COUNT:-12}" \
        --precision "${PRECISIONS:-bf16}" --budget "${BUDGET:-0.05}" --quiet --resume --json "$out/$gpu-random.json"
      ;;
    shapes) logged shapes 60 python3 -m gemmnorm bench --suite shapes --budget "${BUDGET:-0.1}" --quiet --json "$out/$gpu-shapes.json" ;;
    fuzz)
      logged fuzz 40 python3 benchmarks/fuzz.py --device cuda --count "${COUNT:-2000}" --seed "${SEED:-24}" --jobs "${WORKERS:-12}" \
        --minutes 6 --out "$out/fuzz-$gpu.json"
      ;;
    *) echo "no such stage: $stage" >&2 && exit 2 ;;
  esac
done
