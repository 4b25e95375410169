#!/usr/bin/env bash
# Latencies of Qwen3-4B and 8B shapes with random weights on one GPU, as JSON under $OUT; under 8 minutes.
#
#     OUT=results benchmarks/gpu.sh            # makes .venv-gpu and installs jax[cuda12] into it
#     PYTHON=python benchmarks/gpu.sh          # uses this interpreter's packages as they are
#     benchmarks/gpu.sh --tiny                 # small shapes on whatever is there: does the script work?
#
# After LIMIT seconds it is ended, whatever it is at, with exit code 124; what was measured by then is written.
set -euo pipefail
export LIMIT="${LIMIT:-475}"
if [[ -z "${BOUNDED:-}" ]]; then
    BOUNDED=yes exec timeout --kill-after=5 "$LIMIT" "$0" "$@"
fi
cd "$(dirname "$0")/.."
export OUT="${OUT:-runs/gpu}"
mkdir -p "$OUT"
if [[ -z "${PYTHON:-}" ]]; then
    python3 -m venv .venv-gpu
    PYTHON=.venv-gpu/bin/python
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e . 'jax[cuda12]'
fi
# The last measurement has half a minute to end and be written.
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" benchmarks/gpu.py \
    --out "$OUT/gpu.json" --seconds $((LIMIT - 30 - SECONDS)) "$@"
