#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under eight minutes:
#
#   scripts/gpu_suite.sh [FOLDER]           what is there, tests, speed; results in FOLDER
#                                           (default: $OUT, else gpu-report)
#   scripts/gpu_suite.sh --dry-run [FOLDER] the same without a GPU: collects, runs tiny sizes
#
# Needs torch, numpy, pyyaml and pytest; nothing is installed. PYTHON chooses the interpreter.
# Leaves preflight.txt and .json, tests.log and .json, throughput.log and .json; fails if a part
# failed. Each part has a time limit, and what was measured until then is kept.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=()
if [[ "${1:-}" == --dry-run ]]; then
  dry=(--dry-run)
  shift
fi
folder=${1:-${OUT:-gpu-report}}
out=$(mkdir -p "$folder" && cd "$folder" && pwd)
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

failed=0
echo "== preflight"
timeout 60 "$python" tools/preflight.py 2>&1 | tee "$out/preflight.txt" || failed=1
timeout 60 "$python" tools/preflight.py --json >"$out/preflight.json" || failed=1

echo "== tests"
MEGATRON_GPU_REPORT="$out/tests.json" timeout 180 "$python" -m pytest -m gpu tests/gpu \
  tests/contract/test_fp8_linear.py tests/unit/test_attention.py -rsfE -p no:cacheprovider --durations=5 2>&1 | tee "$out/tests.log" || failed=1

echo "== speed"
timeout 250 "$python" tests/gpu/throughput.py "${dry[@]}" --json "$out/throughput.json" 2>&1 \
  | tee "$out/throughput.log" || failed=1

if [[ $failed == 0 ]]; then echo "== passed; results in $out"; else echo "== FAILED; see $out"; fi
exit $failed
