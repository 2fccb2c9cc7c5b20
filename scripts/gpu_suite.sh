#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under eight minutes:
#
#   scripts/gpu_suite.sh [FOLDER]           tests, then throughput; results in FOLDER
#                                           (default: $OUT, else gpu-report)
#   scripts/gpu_suite.sh --dry-run [FOLDER] the same without a GPU: collects, runs tiny sizes
#
# Needs torch, numpy, pyyaml and pytest; nothing is installed. PYTHON chooses the interpreter.
# Leaves tests.log, tests.json, throughput.log and throughput.json; fails if any part failed.
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

"$python" - <<'PY'
import platform, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
print(f"python {platform.python_version()}, torch {torch.__version__}, {device}")
PY

failed=0
echo "== tests"
MEGATRON_GPU_REPORT="$out/tests.json" timeout 270 "$python" -m pytest tests/gpu -rsfE \
  -p no:cacheprovider --durations=5 2>&1 | tee "$out/tests.log" || failed=1

echo "== throughput"
timeout 180 "$python" tests/gpu/throughput.py "${dry[@]}" --json "$out/throughput.json" 2>&1 \
  | tee "$out/throughput.log" || failed=1

if [[ $failed == 0 ]]; then echo "== passed; results in $out"; else echo "== FAILED; see $out"; fi
exit $failed
