#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two training steps of a tiny PI0.5 on the real LIBERO simulator, on any machine with Python and no GPU.
# Arguments are passed on as Hydra overrides: bash examples/quickstart.sh rollout.phyai.debug_logprob_offset=0.01
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=libero_spatial_ppo_openpi_pi05_phyai_tiny
checkpoint=checkpoints/tiny_pi05 # the path that the config names
started=$SECONDS

echo "== 1/3 Environment"
bash requirements/install.sh --python 3.12 --torch 2.11.0 --install-rlinf embodied --model openpi --env libero \
  --engine phyai --venv "${RLINF_PHYAI_VENV:-.venv}" --no-hints
source "${RLINF_PHYAI_VENV:-.venv}/bin/activate"

echo "== 2/3 Tiny checkpoint"
if [ -f "$checkpoint/config.json" ]; then echo "$checkpoint exists"; else rlinf-phyai make-tiny-checkpoint "$checkpoint"; fi

echo "== 3/3 Two training steps"
before=$SECONDS
# RLinf's account of nodes and placements (INFO shows it), and its table of all metrics after each step (1 shows it).
export RLINF_LOG_LEVEL=${RLINF_LOG_LEVEL:-WARNING} RLINF_PHYAI_STEP_TABLE=${RLINF_PHYAI_STEP_TABLE:-0}
bash examples/embodiment/run_embodiment.sh "$config" "$@"
echo "trained in $((SECONDS - before)) s"

log_dir=$(ls -dt logs/*-"$config" | head -1)
rlinf-phyai show-run "$log_dir"
cat <<EOF
Everything took $((SECONDS - started)) s. Next, after source ${RLINF_PHYAI_VENV:-.venv}/bin/activate:
  the curves:             tensorboard --logdir $log_dir
  make the engine lie:    bash examples/quickstart.sh rollout.phyai.debug_logprob_offset=0.01
  train the full model:   README.md, with a GPU and a checkpoint
EOF
