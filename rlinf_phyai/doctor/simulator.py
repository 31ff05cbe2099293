# SPDX-License-Identifier: Apache-2.0
"""LIBERO: its path file, its assets, its robosuite, and one rendered frame."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rlinf_phyai.doctor.finding import Broken, Check

ROBOSUITE = "1.4."
_TIMEOUT = 120

# In a process of its own: a broken driver may crash, and the variables are read once per process.
_RENDER = """
import mujoco, numpy, sys
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="0.5" rgba="1 0 0 1"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    frame = renderer.render()
if numpy.ptp(frame) == 0:
    sys.exit("the rendered frame is empty")
try:
    from OpenGL.GL import GL_RENDERER, glGetString
    context = mujoco.GLContext(8, 8)
    context.make_current()
    print(glGetString(GL_RENDERER).decode())
except Exception:
    print("unknown renderer")
"""


def path_file() -> str:
    """Without this file LIBERO asks questions on stdin, and a worker waits forever."""
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser()
    file = folder / "config.yaml"
    if not file.is_file():
        raise Broken(
            f"{file} does not exist, so LIBERO would ask for its paths",
            "activate the environment that the installer made, or set LIBERO_CONFIG_PATH to its etc/libero",
        )
    return str(file)


def assets() -> str:
    path_file()
    from libero.libero import get_libero_path

    folder = Path(get_libero_path("assets"))
    if not (folder / "scenes").is_dir():
        raise Broken(f"no assets at {folder}")
    for name in ("bddl_files", "init_states"):
        if not Path(get_libero_path(name)).is_dir():
            raise Broken(f"LIBERO's {name} folder, {get_libero_path(name)}, does not exist", f"correct {path_file()}")
    return str(folder)


def robosuite() -> str:
    found = version("robosuite")
    if not found.startswith(ROBOSUITE):
        raise Broken(f"robosuite {found}; LIBERO needs {ROBOSUITE}x", f"install robosuite=={ROBOSUITE}1 with --no-deps")
    return f"robosuite {found}, mujoco {version('mujoco')}"


def rendering() -> str:
    how = os.environ.get("MUJOCO_GL", "mujoco's default")
    try:
        result = subprocess.run(
            [sys.executable, "-c", _RENDER], capture_output=True, text=True, check=False, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise Broken(f"rendering one frame with MUJOCO_GL={how} takes more than {_TIMEOUT} s") from error
    if result.returncode != 0:
        lines = [line for line in result.stderr.strip().splitlines() if line and not line.startswith(" ")]
        last = next(
            (line for line in reversed(lines) if "Error" in line or "rror:" in line), lines[-1] if lines else ""
        )
        raise Broken(f"MUJOCO_GL={how} renders no frame: {last[:200] or f'exit code {result.returncode}'}")
    return f"one frame with MUJOCO_GL={how} on {result.stdout.strip().splitlines()[-1]}"


CHECKS = (
    Check("LIBERO paths", path_file),
    Check(
        "LIBERO assets",
        assets,
        "run `libero-download-assets`, or install requirements/libero-assets.txt and --link them",
    ),
    Check("robosuite", robosuite),
    Check(
        "rendering",
        rendering,
        "set MUJOCO_GL=egl and install libegl1 libegl-mesa0 libgl1-mesa-dri or NVIDIA's EGL driver; on a GPU point "
        "__EGL_VENDOR_LIBRARY_FILENAMES at its JSON file; or MUJOCO_GL=osmesa",
    ),
)
