#!/usr/bin/env bash
# What is to be run where there is a GPU: conformance, kernels, models and the operators' cases on it, and the figures.
# Each part has a limit of its own; the results are in the folder given as the first argument (default: gpu-results).
# No Ray is needed.
#   bash tests/gpu.sh [FOLDER]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
mkdir -p "$out"
failed=0
part() { # name, seconds, command
  local name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  local code=$?
  echo "$name: exit code $code; $(tail -n 1 "$out/$name.log" | cut -c 1-200)"
  [ "$code" = 0 ] || failed=1
}
part conformance 90 python -m pytest -p no:cacheprovider -rf tests/runtime/devices/test_conformance.py -k CUDA
part cuda 60 python -m pytest -p no:cacheprovider -rf tests/cuda/test_cuda.py
part benchmarks 180 python benchmarks/gpu.py --limit 45 --json "$out/figures.json"
part kernels 90 python -m pytest -p no:cacheprovider -rf tests/cuda/test_warp_matrix.py tests/cuda/test_attention.py tests/cuda/test_scatter.py
part models 90 python -m pytest -p no:cacheprovider -rf tests/cuda/test_cuda_training.py tests/cuda/test_llm.py
part operators 200 python -m pytest -p no:cacheprovider -rf tests/cuda/test_cuda_ops.py
exit "$failed"
