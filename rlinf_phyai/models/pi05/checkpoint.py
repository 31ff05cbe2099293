# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: which files, what the tensors are called, and what a load reports.

Names become *canonical* first: those of RLinf's actor model (``paligemma_with_expert.paligemma.model.vision_tower...``). Accepted
are the openpi layout, the LeRobot layout (everything under ``model.``), the older transformers nesting of PaliGemma, and the two
layouts that RLinf's runner writes (``[actor/]model_state_dict/full_weights.pt``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlinf_phyai.errors import CheckpointError

TRANSFORMERS = "paligemma_with_expert."
"""openpi's pair of transformers; the projections and the heads lie beside it."""
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_LM_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""The action path never reads the expert's output head; it is accepted and dropped."""

VALUE_HEAD, NOISE_HEAD = "value_head.", "noise_head."
OPTIONAL_PARTS = {"critic": VALUE_HEAD, "noise head": NOISE_HEAD}
"""What reinforcement learning adds to the model; a checkpoint of supervised training holds none of it."""

_ROOTS = (
    TRANSFORMERS,
    "action_in_proj.",
    "action_out_proj.",
    "time_mlp_in.",
    "time_mlp_out.",
    "state_proj.",
    "action_time_mlp_in.",
    "action_time_mlp_out.",
    VALUE_HEAD,
    NOISE_HEAD,
)
_PALIGEMMA = "paligemma_with_expert.paligemma."
_NOT_WEIGHTS = ("policy_preprocessor", "policy_postprocessor")
_OLD_NESTING = (  # transformers < 4.52
    (f"{_PALIGEMMA}language_model.lm_head.", f"{_PALIGEMMA}lm_head."),
    (f"{_PALIGEMMA}language_model.model.", f"{_PALIGEMMA}model.language_model."),
    (f"{_PALIGEMMA}vision_tower.", f"{_PALIGEMMA}model.vision_tower."),
    (f"{_PALIGEMMA}multi_modal_projector.", f"{_PALIGEMMA}model.multi_modal_projector."),
    (f"{_PALIGEMMA}language_model.", f"{_PALIGEMMA}model.language_model."),
)


@dataclass
class LoadReport:
    """What a load or a weight update did, by canonical name.

    Attributes:
        loaded: written names. missing: names of the model that did not come (an error in a full load).
        optional: missing names that may be absent (a critic or noise head that the checkpoint does not have).
        unexpected: names that the model does not have (an error). ignored: known names that the engine never reads.
        casts: written names whose type differed, as ``name: from -> to``.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line with the counts."""
        parts = ("loaded", "missing", "optional", "unexpected", "ignored", "casts")
        return ", ".join(f"{len(getattr(self, part))} {part}" for part in parts)


def canonical_name(name: str) -> str:
    """The actor's name of a checkpoint tensor; an unknown name comes back unchanged."""
    if name.startswith("model.") and name[len("model.") :].startswith(_ROOTS):
        name = name[len("model.") :]
    for old, new in _OLD_NESTING:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def weight_files(checkpoint_dir: str | Path) -> list[Path]:
    """The files that hold a checkpoint's weights: one ``full_weights.pt`` of an RLinf run, or all safetensors files.

    Raises:
        CheckpointError: the directory does not exist or holds neither.
    """
    directory = Path(checkpoint_dir).expanduser()
    if not directory.is_dir():
        raise CheckpointError(
            f"checkpoint directory {directory} does not exist; set the model path to a downloaded checkpoint."
        )
    for relative in ("model_state_dict/full_weights.pt", "actor/model_state_dict/full_weights.pt"):
        if (directory / relative).is_file():
            return [directory / relative]
    # LeRobot keeps the state of its normalisers in safetensors files beside the weights.
    files = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith(_NOT_WEIGHTS))
    if not files:
        raise CheckpointError(
            f"checkpoint directory {directory} holds no *.safetensors, no model_state_dict/full_weights.pt and no "
            "actor/model_state_dict/full_weights.pt; is the download complete?"
        )
    return files


def load_state_file(path: str | Path) -> dict[str, Tensor]:
    """A ``.pt`` state dict, memory-mapped on the CPU.

    Raises:
        CheckpointError: the file is missing, unreadable or no flat mapping of names to tensors.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        found = "is a directory; name the .pt file inside" if file.is_dir() else "does not exist"
        raise CheckpointError(f"weights file {file} {found}.")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"weights file {file} cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(f"weights file {file} holds no flat mapping of parameter names to tensors.")
    for name, value in state.items():
        # An engine's own state_dict() holds the expert's output head, which nobody reads, as a meta tensor.
        if value.layout is not torch.strided or (value.is_meta and canonical_name(name) != EXPERT_LM_HEAD):
            kind = "meta" if value.is_meta else value.layout
            raise CheckpointError(
                f"weights file {file} holds {name} as a {kind} tensor; save it as a dense one with data."
            )
    return state


def iterate_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the files with the names they have there, one at a time."""
    for file in files:
        if file.suffix == ".pt":
            yield from load_state_file(file).items()
            continue
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                yield name, handle.get_tensor(name)


def tensor_shapes(checkpoint_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes, without reading the weights of safetensors files.

    Raises:
        CheckpointError: no PI0.5 model, a parameter that comes twice, or one that is no floating-point tensor.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(checkpoint_dir):
        add_shapes(shapes, _headers(file), f"weights file {file}")
    if "action_in_proj.weight" not in shapes or not {"time_mlp_in.weight", "action_time_mlp_in.weight"} & set(shapes):
        raise CheckpointError(
            f"{checkpoint_dir} holds no PI0.5 or PI0 model: action_in_proj.weight or [action_]time_mlp_in.weight is missing "
            f"(found {len(shapes)} tensors, for example {sorted(shapes)[:3]})."
        )
    return shapes


def add_shapes(
    shapes: dict[str, tuple[int, ...]], headers: Iterable[tuple[str, tuple[int, ...], str, bool]], where: str
) -> None:
    """Adds (name, shape, dtype, is floating point) entries to ``shapes`` under their canonical names.

    Raises:
        CheckpointError: two names that mean the same parameter, or a parameter of an integer type.
    """
    for name, shape, dtype, is_float in headers:
        target = canonical_name(name)
        if target in shapes:
            raise CheckpointError(f"{where} holds {target} twice (once as {name}); remove one of the two.")
        if not is_float:
            raise CheckpointError(f"{where} holds {name} with dtype {dtype}; parameters are floating-point tensors.")
        shapes[target] = shape


def _headers(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    if file.suffix == ".pt":
        yield from tensor_headers(load_state_file(file))
        return
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            part = handle.get_slice(name)
            dtype = part.get_dtype()  # safetensors' own spelling, such as BF16 or I32
            yield name, tuple(part.get_shape()), dtype, "F" in dtype


def tensor_headers(state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...], str, bool]]:
    """(name, shape, dtype, is floating point) of a state dict."""
    for name, tensor in state.items():
        yield name, tuple(tensor.shape), str(tensor.dtype), tensor.is_floating_point()


def _open(file: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights file {file} cannot be read, it may be truncated ({error}).") from error
