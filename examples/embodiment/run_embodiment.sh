#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains the named config:
#
#   bash examples/embodiment/run_embodiment.sh CONFIG [hydra overrides...]
#
# CONFIG is a file of examples/embodiment/config without .yaml. Overrides are key=value and come last, so they win.
# Logs go to logs/<timestamp>-<CONFIG>/ under the current folder (LOG_ROOT to choose another).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
program=${PROGRAM:-train_embodied_agent.py}

if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  sed -n '3,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  echo "Configs:"
  for file in "$here"/config/*.yaml; do echo "  $(basename "$file" .yaml)"; done
  [ $# -gt 0 ] && exit 0 || exit 2
fi
config=$1
shift
if [ ! -f "$here/config/$config.yaml" ]; then
  echo "There is no config $config in $here/config; run without arguments for a list." >&2
  exit 2
fi

# The active environment's Python, or the one that requirements/install.sh made.
if [ -n "${VIRTUAL_ENV:-}" ]; then
  python=$VIRTUAL_ENV/bin/python
elif [ -x "$repo/.venv/bin/python" ]; then
  python=$repo/.venv/bin/python
else
  python=$(command -v python3 || command -v python)
fi
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} # works without `pip install -e .` too

# A second run of the same second gets a folder of its own.
first=${LOG_ROOT:-$PWD/logs}/$(date +%Y%m%d-%H%M%S)-$config
mkdir -p "$(dirname "$first")"
logs=$first
for ((n = 2; ; n++)); do
  if mkdir "$logs" 2>/dev/null; then break; fi
  [ -d "$logs" ] || { echo "cannot make the log folder $logs; LOG_ROOT chooses another place" >&2; exit 1; }
  logs=$first-$n
done
command=("$python" "$here/$program" --config-path "$here/config" --config-name "$config"
  "runner.logger.log_path=$logs" "runner.logger.experiment_name=$config" "$@")
printf '%q ' "${command[@]}" >"$logs/run.log"
echo >>"$logs/run.log"
echo "Logs: $logs"

# exec: signals reach the program itself, and its exit code is ours. tee ignores Ctrl-C to write the shutdown too.
exec "${command[@]}" > >(trap '' INT TERM; exec tee -a "$logs/run.log") 2>&1
