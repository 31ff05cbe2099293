#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets the environment up where it is missing, then checks style and types and runs the tests.
# Arguments go to pytest: bash tests/run.sh tests/unit -k sampler
# Real runs marked `long` are left out unless the first argument is --long.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash requirements/install.sh --python 3.12 --torch 2.11.0 --install-rlinf embodied --model openpi --env libero \
  --engine phyai --venv "${RLINF_PHYAI_VENV:-.venv}" --no-hints
source "${RLINF_PHYAI_VENV:-.venv}/bin/activate"

chosen=(-m "not long")
if [ "${1:-}" = --long ]; then chosen=(); shift; fi

failed=0
check() { echo "== $*"; "$@" || failed=1; }
if [ $# -eq 0 ]; then
  check ruff format --check .
  check ruff check .
  check mypy
  [ $failed = 0 ] || echo "== style or types failed (above); the tests run all the same"
fi
echo "== pytest $*"
pytest "${chosen[@]}" "$@" || failed=1
exit $failed
