#!/usr/bin/env bash
# Train on this machine: scripts/launch_local.sh [NPROC] [flags of pretrain_gpt.py...]
# NPROC defaults to the number of GPUs, or to 1 without any. DRY_RUN=1 prints the command only.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
fi

if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    nproc=$1
    shift
else
    nproc=$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)
    [ "$nproc" -gt 0 ] || nproc=1
fi

# Ranks on CPUs share the cores; without a limit each would start a thread per core.
if [ -z "${OMP_NUM_THREADS:-}" ] && [ "$nproc" -gt 1 ]; then
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
fi

if [ "$nproc" -eq 1 ]; then
    command=("$python" "$root/pretrain_gpt.py" "$@")
else
    command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc"
        "$root/pretrain_gpt.py" "$@")
fi
printf '%q ' "${command[@]}"
printf '\n'
[ "${DRY_RUN:-0}" = 1 ] || exec "${command[@]}"
