#!/usr/bin/env bash
# Everything that needs a GPU, in one run of at most 10 minutes: correctness on the device, then
# times. Needs only a Python with torch and triton (ours, or whatever the machine has); nothing is
# installed. The report goes to $OUT when set, else to bench/results/, and to the terminal.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONSAFEPATH=1
export PYTHONPATH="kernels:storage:service:bench"
export TRITON_DEFAULT_FP_FUSION=1
out=${OUT:-bench/results}
mkdir -p "$out"

for candidate in "${PYTHON:-}" .venv/bin/python python3 python; do
  if [ -n "$candidate" ] && "$candidate" -c 'import torch, triton, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "${python:-}" ]; then
  echo "gpu.sh: no Python with torch, triton and a GPU; set PYTHON=/path/to/python" >&2
  exit 2
fi
"$python" bench/gpu.py --seconds "${SECONDS_BUDGET:-540}" --report "$out/gpu.md" "$@"
