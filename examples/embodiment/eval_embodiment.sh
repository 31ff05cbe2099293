#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Evaluates the policy of the named training config in the environments of its env.eval section:
#
#   bash examples/embodiment/eval_embodiment.sh CONFIG [hydra overrides...]
#
# runner.ckpt_path=FILE.pt evaluates the weights of an RL run. Everything else is as in run_embodiment.sh.
export PROGRAM=eval_embodied_agent.py
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_embodiment.sh" "$@"
