# SPDX-License-Identifier: Apache-2.0
"""Checks an environment that install.sh made; needs the standard library only and imports none of what it checks.

    python check_install.py [--torch VERSION] [--flashinfer] [--cuda-tools] [--assets] [--libero-config DIR] PINS.txt...

Prints one line per problem (what was found, what is needed) and exits with 1 if there is any.
"""

import argparse
import base64
import hashlib
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project may not be installed yet
from rlinf_phyai import cuda_tools

SITE = Path(sysconfig.get_paths()["purelib"])
# The files that the overlay changes lie in these packages of transformers.
OVERLAID = ("transformers/models/gemma/", "transformers/models/paligemma/", "transformers/models/siglip/")


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_pins(files: list[Path], torch: str | None) -> list[str]:
    """Every ``name==version`` line must be installed in just that version."""
    pins = {}
    for file in files:
        for line in file.read_text().splitlines():
            if match := re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)\s*$", line.split("#")[0].strip()):
                pins[match[1]] = match[2]
    if torch:
        pins["torch"] = torch
    problems = []
    for name, wanted in pins.items():
        found = installed(name)
        if found is None:
            problems.append(f"{name} is not installed (needed: {wanted})")
        elif found.split("+")[0] != wanted.split("+")[0]:
            problems.append(f"{name} is {found}, needed is {wanted}")
    return problems


def check_overlay(distribution: str = "rlinf-transformer-openpi") -> list[str]:
    """transformers must hold the overlay's files, not its own: both distributions own the same paths."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return [f"{distribution} is not installed"]
    problems = []
    for file in files:
        if str(file).startswith(OVERLAID) and file.hash is not None:
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                problems.append(f"{file} is not the one of {distribution}: install the overlay last")
    return problems


def check_cuda() -> list[str]:
    """FlashInfer compiles with the nvcc installed beside it: its CUDA major must be torch's."""
    torch_cuda = cuda_tools.torch_cuda(SITE)
    if torch_cuda is None:
        return ["FlashInfer needs a CUDA build of torch; the installed torch has none"]
    found = {"nvidia-cuda-nvcc": installed("nvidia-cuda-nvcc")}
    for cuda_major in (12, 13):
        if version := installed(f"nvidia-cuda-nvcc-cu{cuda_major}"):
            found[f"nvidia-cuda-nvcc-cu{cuda_major}"] = version
    if jit_cache := installed("flashinfer-jit-cache"):
        local = re.search(r"\+cu(\d\d)", jit_cache)
        found["flashinfer-jit-cache"] = f"{local[1]}.x" if local else None
    return [
        f"FlashInfer's CUDA build does not match torch's: {name} is for CUDA {version.split('.')[0]}, "
        f"torch {installed('torch')} is built with CUDA {torch_cuda}; remove the package and repeat the install command, "
        "which holds it to torch's, or use --no-flashinfer"
        for name, version in found.items()
        if version is not None and version.split(".")[0] != torch_cuda.split(".")[0]
    ]


def check_cuda_tools() -> list[str]:
    """The machine's nvcc and driver must go with torch's CUDA."""
    torch_cuda = cuda_tools.torch_cuda(SITE)
    if torch_cuda is None:
        return ["the installed torch has no CUDA, and FlashInfer cannot work with it: use --no-flashinfer"]
    return cuda_tools.disagreements(torch_cuda, cuda_tools.find_nvcc(), cuda_tools.driver_cuda())


def check_libero(config_dir: Path | None, assets: bool) -> list[str]:
    """LIBERO's path file must name this environment, and its assets must be there."""
    problems = []
    package = SITE / "libero" / "libero"
    if config_dir is not None:
        config = config_dir / "config.yaml"
        if not config.is_file():
            problems.append(f"{config} is missing")
        elif str(package) not in config.read_text():
            problems.append(f"{config} names another environment than {package}")
    if assets and not (package / "assets" / "scenes").is_dir():
        problems.append(f"LIBERO's assets are missing: {package / 'assets' / 'scenes'} is no folder")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pins", nargs="*", type=Path, help="requirement files whose exact pins must hold")
    parser.add_argument("--torch", help="version that torch must have")
    parser.add_argument("--overlay", action="store_true", help="check the transformers overlay")
    parser.add_argument("--flashinfer", action="store_true", help="check FlashInfer's CUDA major against torch's")
    parser.add_argument(
        "--cuda-tools", action="store_true", help="check the machine's nvcc and driver against torch's CUDA"
    )
    parser.add_argument("--libero-config", type=Path, help="folder of LIBERO's config.yaml")
    parser.add_argument("--assets", action="store_true", help="check that LIBERO's assets are in place")
    args = parser.parse_intermixed_args()

    problems = check_pins(args.pins, args.torch)
    if args.overlay:
        problems += check_overlay()
    if args.flashinfer:
        problems += check_cuda()
    if args.cuda_tools:
        problems += check_cuda_tools()
    problems += check_libero(args.libero_config, args.assets)
    for problem in problems:
        print(f"  - {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
