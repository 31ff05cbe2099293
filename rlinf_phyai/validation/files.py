# SPDX-License-Identifier: Apache-2.0
"""The only checks that look outside the config: files that a worker would open minutes later, and installed kernels.

Nothing is written and no weight is read: headers, directory entries and small JSON files only.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_phyai.errors import CheckpointError, KernelPolicyError
from rlinf_phyai.validation.devices import FP32_NAMES, MIXED_PRECISION, PRECISION_REASON
from rlinf_phyai.validation.engine_group import GROUP
from rlinf_phyai.validation.problems import Problem, show
from rlinf_phyai.validation.settings import Settings

if TYPE_CHECKING:
    from rlinf_phyai.engine.kernel_policy import KernelPolicy

ASSET_ID = "physical-intelligence/libero"
"""Where openpi's LIBERO data config keeps its statistics, inside the checkpoint."""
TOKENIZER = Path("big_vision") / "paligemma_tokenizer.model"
VALUE_HEAD_SIZES = {"pi05_libero": (1024, 512, 256), "pi0_libero": (512, 256, 128)}
"""Hidden sizes that RLinf gives the critic."""
FSDP_WEIGHTS = Path("model_state_dict") / "full_weights.pt"


def checkpoint(s: Settings) -> Iterator[Problem]:
    """The checkpoint must be a local directory with weights."""
    key = f"{s.model}.model_path"
    path = s.path(key)
    if path is None:
        return
    if "://" in (s.text(key) or ""):
        yield Problem(key, show(str(s.get(key))), "a local directory", "download the checkpoint and name its directory")
    elif not path.is_dir():
        found = f"{show(str(path))}, which {'is a file' if path.exists() else 'does not exist'}"
        fix = (
            f"set {key} to the folder of a downloaded LIBERO checkpoint (README, 'Train the full model'), or write random weights "
            "there: rlinf-phyai make-tiny-checkpoint for a config with size=tiny, make-random-checkpoint for the full size"
        )
        yield Problem(key, found, "a checkpoint directory", fix)
    elif not _weights(path):
        yield Problem(
            key,
            f"{show(str(path))}, which holds no weights",
            f"a directory with *.safetensors, {FSDP_WEIGHTS} or actor/{FSDP_WEIGHTS}",
            "finish the download, or name the directory that holds the weights",
        )


def weights_readable(s: Settings) -> Iterator[Problem]:
    """The weights must be complete files of the model that ``config_name`` names."""
    path = checkpoint_dir(s)
    if path is None:
        return
    key = f"{s.model}.model_path"
    try:
        shapes = _shapes(path)
    except CheckpointError as error:
        yield Problem(
            key, show(str(path)), "a complete PI0.5 or PI0 checkpoint", "download the checkpoint again", str(error)
        )
        return
    name = s.text(f"{s.openpi}.config_name") or ""
    found, wanted = (
        ("PI0.5" if "time_mlp_in.weight" in shapes else "PI0"),
        "PI0" if name.startswith("pi0_") else "PI0.5",
    )
    if found != wanted:
        fix = f"name a {wanted} checkpoint, or set {s.openpi}.config_name for {found}"
        yield Problem(key, f"{show(str(path))}, a {found} model", f"a {wanted} model ({name})", fix)


def value_head(s: Settings) -> Iterator[Problem]:
    """A critic in the checkpoint must have the sizes that RLinf builds."""
    path = checkpoint_dir(s)
    built = VALUE_HEAD_SIZES.get(s.text(f"{s.openpi}.config_name") or "")
    if path is None or not s.has_critic or built is None:
        return
    try:
        shapes = _shapes(path)
        own = own_config(path)
    except (CheckpointError, ValueError):
        return  # reported by the checks above and below
    prefix, expert = "paligemma_with_expert.paligemma.model.language_model.norm.weight", "action_in_proj.weight"
    width = shapes[prefix][0] if s.critic_after_vlm and prefix in shapes else shapes[expert][0]
    hidden = tuple(own.get("value_head_sizes", built))
    sizes = (width, *hidden, 1)
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        name = f"value_head.mlp.{2 * layer}.weight"
        found = shapes.get(name, (outputs, inputs))
        if found != (outputs, inputs):
            after = "the VLM" if s.critic_after_vlm else "the expert"
            yield Problem(
                f"{s.openpi}.value_after_vlm",
                f"{show(s.critic_after_vlm)}, while the checkpoint's {name} has the shape {list(found)}",
                f"a critic with {name} of shape {[outputs, inputs]}",
                f"set {s.openpi}.value_after_vlm as in the checkpoint's training, or use one without value head",
                f"RLinf builds the critic after {after} with layer sizes {' -> '.join(map(str, sizes))}",
            )
            return


def model_sizes(s: Settings) -> Iterator[Problem]:
    """The sizes that a checkpoint states for itself must be readable, describe a model and hold the action chunk."""
    from rlinf_phyai.models.pi05.stated_sizes import read_stated_sizes

    path = checkpoint_dir(s)
    if path is None:
        return
    try:
        own = own_config(path)
        read_stated_sizes(path)
    except ValueError as error:
        yield Problem(
            f"{s.model}.model_path", show(str(path)), "a valid config.json, or none", "repair config.json", str(error)
        )
        return
    horizon = own.get("action_horizon")
    if isinstance(horizon, int) and s.chunk is not None and s.chunk > horizon:
        yield Problem(
            f"{s.model}.num_action_chunks",
            show(s.chunk),
            f"1 to {horizon} (action_horizon in {path / 'config.json'})",
            f"lower {s.model}.num_action_chunks",
            f"the action expert predicts {horizon} actions at once",
        )


def fp32_precision(s: Settings) -> Iterator[Problem]:
    """A precision of fp32 is neutral for a float32 checkpoint only."""
    if not s.trains:
        return
    path = checkpoint_dir(s)
    try:
        own = own_config(path) if path is not None else {}
    except ValueError:
        return
    if own.get("params_dtype") == "float32":
        return
    for key in (f"{s.model}.precision", *MIXED_PRECISION):
        if s.get(key) in FP32_NAMES:
            yield Problem(key, show(s.get(key)), "null", f"set {key}: null", PRECISION_REASON)


def norm_stats(s: Settings) -> Iterator[Problem]:
    """The statistics that normalise states and actions lie inside the checkpoint."""
    key = f"{s.model}.model_path"
    path = s.path(key)
    if path is None or not path.is_dir():
        return
    file = path / _asset_id(s) / "norm_stats.json"
    if not file.is_file():
        yield Problem(
            key,
            f"a checkpoint without {file}",
            f"a checkpoint directory with {_asset_id(s)}/norm_stats.json",
            f"copy the checkpoint's norm_stats.json to {file}, or name the folder in {s.model}.openpi_data.repo_id",
            "states and actions are normalised with these statistics, by the actor and by the rollout",
        )
        return
    problem = _stats_problem(file)
    if problem:
        yield Problem(
            key,
            f"a checkpoint whose {file} {problem}",
            "openpi's norm_stats.json with q01 and q99 for state and actions",
            "take norm_stats.json from the checkpoint's source",
            "PI0.5 normalises by quantiles",
        )


def tokenizer(s: Settings) -> Iterator[Problem]:
    """The prompt tokenizer must lie in the checkpoint or in openpi's cache."""
    path = s.path(f"{s.model}.model_path")
    if path is not None and not path.is_dir():
        return  # reported by the first check; a checkpoint may bring its tokenizer
    cache = Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser()
    places = [*([path / TOKENIZER] if path is not None else []), cache / TOKENIZER]
    if any(place.is_file() for place in places):
        return
    yield Problem(
        f"{s.model}.model_path",
        f"no tokenizer at {' nor at '.join(map(str, places))}",
        "paligemma_tokenizer.model at one of these places",
        "let openpi fetch it once, with internet access: python -c 'from openpi.models.tokenizer import PaligemmaTokenizer; "
        "PaligemmaTokenizer()'; or set OPENPI_DATA_HOME to the folder that holds big_vision",
        "prompts are tokenised with PaliGemma's SentencePiece model, which most checkpoints do not bring along",
    )


def rl_weights(s: Settings) -> Iterator[Problem]:
    """``runner.ckpt_path`` must name a whole ``.pt`` state dict. Its index is read, not its weights."""
    from rlinf_phyai.models.pi05.checkpoint import load_state_file

    key, allowed = "runner.ckpt_path", "null, or the .pt state dict of an RL run"
    path = s.path(key)
    if path is None:
        return
    if not path.is_file():
        found = f"{show(str(path))}, which {'is a directory' if path.is_dir() else 'does not exist'}"
        fix = (
            f"name the .pt file inside, for example {path / FSDP_WEIGHTS}"
            if path.is_dir()
            else f"correct {key}, or set it to null"
        )
        yield Problem(key, found, allowed, fix)
    elif path.suffix != ".pt" or path.stat().st_size == 0:
        found = f"{show(str(path))}, {'an empty file' if path.suffix == '.pt' else 'which is no .pt file'}"
        yield Problem(key, found, allowed, f"correct {key}, or set it to null")
    else:
        try:
            holds = "" if load_state_file(path) else "it holds no tensor"
        except CheckpointError as error:
            holds = " ".join(str(error).split())
        if holds:
            found = f"{show(str(path))}, {path.stat().st_size} bytes that are no state dict"
            fix = f"copy the file again where it was cut short, or name another one in {key}"
            yield Problem(key, found, allowed, fix, holds[:400])


def resume_directory(s: Settings) -> Iterator[Problem]:
    """``runner.resume_dir`` must be a whole checkpoint that RLinf's runner wrote."""
    from rlinf_phyai.checkpoints import PARTIAL, missing_parts

    key = "runner.resume_dir"
    path = s.path(key)
    if path is None or not s.trains:
        return
    step = path.name.removeprefix("global_step_")
    if path.name.endswith(PARTIAL):
        found = f"{show(str(path))}, which a run was still writing when it ended"
    elif not (path / "actor").is_dir():
        found = f"{show(str(path))}, which {'has no folder actor' if path.is_dir() else 'does not exist'}"
    elif not step.isdigit() or step == path.name:
        found = f"{show(str(path))}, whose name does not end in a step"
    elif missing := missing_parts(path / "actor"):
        found = f"{show(str(path))}, which is not whole: {'; '.join(missing)}"
    else:
        return
    yield Problem(
        key,
        found,
        "null, or <log_path>/<experiment>/checkpoints/global_step_<N> with a folder actor",
        f"name an earlier checkpoint in {key}, or set it to null",
        "RLinf reads the step from the name and the actor's state from the folder",
    )


def kernel_policy(s: Settings) -> Iterator[Problem]:
    """The kernel policy must exist, name known kernels, and run here where the device is known."""
    from rlinf_phyai.engine.kernel_policy import load_kernel_policy, policy_names

    key = f"{GROUP}.kernel_policy"
    value = s.get(key)
    if not s.keys(GROUP) or key in s.unresolved:
        return
    try:
        if value is not None and not isinstance(value, str):
            raise KernelPolicyError("a policy is given by its name or by a path")
        policy = load_kernel_policy(value)
        if s.no_gpu:
            _run_on_cpu(policy)
    except (KernelPolicyError, ValueError) as error:
        found = show(value) if s.has(key) else "missing"
        names = [name for name in policy_names() if not s.no_gpu or _runs_on_cpu(load_kernel_policy(name))]
        allowed = (
            f"{', '.join(names)}, the path of a .yaml file{' whose kernels run on cpu' if s.no_gpu else ''}, or null"
        )
        yield Problem(key, found, allowed, f"set {key}: torch_reference, or correct the policy", str(error))


def _run_on_cpu(policy: KernelPolicy) -> None:
    """Raises ``ValueError`` where the policy names kernels that do not run on a CPU."""
    import torch

    from rlinf_phyai.kernels import resolve

    resolve(policy.operations, torch.device("cpu"), policy.fallback)


def _runs_on_cpu(policy: KernelPolicy) -> bool:
    with contextlib.suppress(ValueError):
        _run_on_cpu(policy)
        return True
    return False


def _weights(path: Path) -> bool:
    return any((path / root / FSDP_WEIGHTS).is_file() for root in ("", "actor")) or any(path.glob("*.safetensors"))


def checkpoint_dir(s: Settings) -> Path | None:
    """The checkpoint directory where :func:`checkpoint` has nothing to say about it."""
    path = s.path(f"{s.model}.model_path")
    return path if path is not None and path.is_dir() and _weights(path) else None


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from rlinf_phyai.models.pi05.checkpoint import tensor_shapes

    return tensor_shapes(path)


def own_config(path: Path) -> dict[str, Any]:
    """The sizes that a checkpoint made by this package states for itself; empty for any other."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error
    own = content.get("rlinf_phyai") if isinstance(content, dict) else None
    return own if isinstance(own, dict) else {}


def _asset_id(s: Settings) -> str:
    """openpi's rule: the asset id, else the dataset id; both can be overridden by ``openpi_data``."""
    data = f"{s.model}.openpi_data"
    return s.text(f"{data}.assets.asset_id") or s.text(f"{data}.repo_id") or ASSET_ID


def _stats_problem(file: Path) -> str:
    """What is wrong with a statistics file, or nothing."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return f"is not valid JSON ({error})"
    stats = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(stats, dict):
        return "has no section norm_stats"
    for part in ("state", "actions"):
        entry = stats.get(part)
        for quantile in ("q01", "q99"):
            if not isinstance(entry, dict) or not isinstance(entry.get(quantile), list) or not entry[quantile]:
                return f"has no {quantile} for {part}"
    return ""


CHECKS = (
    checkpoint,
    weights_readable,
    value_head,
    model_sizes,
    fp32_precision,
    norm_stats,
    tokenizer,
    rl_weights,
    resume_directory,
    kernel_policy,
)
