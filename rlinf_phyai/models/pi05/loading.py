# SPDX-License-Identifier: Apache-2.0
"""Fills the named views from a checkpoint: everything is checked by name and shape before the first byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    OPTIONAL_PARTS,
    TRANSFORMERS,
    LoadReport,
    add_shapes,
    canonical_name,
    iterate_tensors,
    load_state_file,
    tensor_headers,
    tensor_shapes,
    weight_files,
)
from rlinf_phyai.models.pi05.finite import all_finite, magnitudes, non_finite
from rlinf_phyai.models.pi05.lora import merge_adapters
from rlinf_phyai.models.pi05.stated_sizes import actor_params_dtype
from rlinf_phyai.models.pi05.weights import PI05Weights
from rlinf_phyai.signs import mark

_SHOWN = 8


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_SHOWN]) + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def plan_load(
    views: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    is_optional: Callable[[str], bool],
    subset: bool,
    where: str,
) -> LoadReport:
    """Report of a load that would write ``shapes`` (canonical names) into ``views``.

    Args:
        subset: whether absent names are fine.
        where: the source, for messages.

    Raises:
        CheckpointError: unknown names, wrong shapes, or (not ``subset``) missing names; all at once.
    """
    report = LoadReport()
    wrong = []
    problems = []
    for name, shape in shapes.items():
        view = views.get(name)
        if view is None:
            report.unexpected.append(name)
        elif tuple(view.shape) != tuple(shape):
            wrong.append(f"{name}: found {tuple(shape)}, the model has {tuple(view.shape)}")
        elif view.is_meta:
            report.ignored.append(name)
        else:
            report.loaded.append(name)
    if report.unexpected:
        problems.append(
            f"holds tensors that this model does not have: {_some(report.unexpected)}. Is it a PI0.5 checkpoint of this size, "
            "and (for value_head.*) is the critic configured, (for noise_head.*) is noise_method flow_noise?"
        )
    if wrong:
        problems.append(f"holds tensors of the wrong shape: {'; '.join(wrong[:_SHOWN])}.")
    tied = {EMBEDDING, LM_HEAD}
    for name, view in views.items():
        if name in shapes or view.is_meta or (name in tied and tied & set(shapes)):
            continue
        (report.optional if is_optional(name) else report.missing).append(name)
    if report.missing and not subset:
        problems.append(f"lacks {len(report.missing)} tensors of the model: {_some(report.missing)}.")
    if problems:
        raise CheckpointError(f"{where} {' It '.join(problems)}")
    return report


def check_heads_whole(report: LoadReport, is_head: Callable[[str], bool], where: str) -> None:
    """A head comes whole or not at all: half of one would act with what it was initialised with.

    Raises:
        CheckpointError: a part of a head was loaded; its missing tensors are named.
    """

    def heads(names: Iterable[str]) -> set[str]:
        return {name.partition(".")[0] for name in names if is_head(name)}

    halves = heads(report.loaded) & heads(report.optional)
    if halves:
        absent = [name for name in report.optional if name.partition(".")[0] in halves]
        words = {stem.rstrip("."): f"the {part}" for part, stem in OPTIONAL_PARTS.items()}
        listed = " and ".join(words.get(head, head) for head in sorted(halves))
        raise CheckpointError(f"{where} holds a part of {listed} only; missing: {_some(absent)}.")


@torch.no_grad()
def write_tensors(
    views: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    report: LoadReport,
    progress: bool,
    where: str,
) -> None:
    """Copies ``tensors`` (their names in the file) into ``views`` as planned; casts are added to the report.

    Raises:
        CheckpointError: embedding and output head, one tensor in this model, differ.
    """
    written_tied: Tensor | None = None
    bar = tqdm(
        tensors,
        total=len(report.loaded) + len(report.ignored),
        desc="Loading weights",
        disable=None if progress else True,  # None: only where a terminal can redraw it
        leave=False,
    )
    for name, tensor in bar:
        mark("loaded weight", name)
        target = canonical_name(name)
        view = views[target]
        if view.is_meta:
            continue
        if target in (EMBEDDING, LM_HEAD):
            if written_tied is not None and not torch.equal(written_tied, tensor):
                raise CheckpointError(
                    f"{where}: {EMBEDDING} and {LM_HEAD} are one tensor in this model but differ in the checkpoint."
                )
            written_tied = tensor
        if tensor.dtype != view.dtype:
            report.casts.append(f"{target}: {tensor.dtype} -> {view.dtype}")
        view.copy_(tensor)


@torch.no_grad()
def round_transformers(weights: PI05Weights) -> None:
    """Rounds the float32 parts of the two transformers to bfloat16 values, as openpi's loaders leave them.

    Those cast the whole pair to bfloat16 after loading and only then return norms, patch and position embeddings to
    float32 (``PaliGemmaWithExpertModel.to_bfloat16_for_selected_params``). Weights that come later, from ``ckpt_path`` or a
    weight update, are not rounded there, nor here.
    """
    for name, view in weights.views.items():
        if name.startswith(TRANSFORMERS) and view.dtype == torch.float32:
            view.copy_(view.to(torch.bfloat16))


def load_checkpoint(
    weights: PI05Weights, checkpoint_dir: str | Path, extra: str | Path | None, progress: bool
) -> LoadReport:
    """Loads a checkpoint directory and, on top of it, an optional ``.pt`` state dict (any subset of the parameters; of a
    LoRA run, whose adapters are merged).

    Where the actor holds it in bfloat16, the checkpoint is also rounded (:func:`round_transformers`).

    Raises:
        CheckpointError: see :func:`plan_load`; also unreadable files, and weights that hold NaN or infinity.
    """
    where = f"checkpoint {checkpoint_dir}"
    report = plan_load(weights.views, tensor_shapes(checkpoint_dir), weights.is_optional, subset=False, where=where)
    write_tensors(weights.views, iterate_tensors(weight_files(checkpoint_dir)), report, progress, where)
    if actor_params_dtype(checkpoint_dir) == "bfloat16":
        round_transformers(weights)
    if extra is not None:
        where = f"weights file {extra}"
        content = load_state_file(extra)
        try:
            state = merge_adapters(content)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        shapes: dict[str, tuple[int, ...]] = {}
        add_shapes(shapes, tensor_headers(state), where)
        top = plan_load(weights.views, shapes, weights.is_optional, subset=True, where=where)
        if not top.loaded:
            raise CheckpointError(f"{where} holds no parameter of the model.")
        write_tensors(weights.views, state.items(), top, progress, where)
        report.optional = [name for name in report.optional if name not in top.loaded]
        report.casts += top.casts
        report.loaded = sorted(set(report.loaded) | set(top.loaded))
        where = f"{where} on top of checkpoint {checkpoint_dir}"
    check_heads_whole(report, weights.is_optional, where)
    if not all_finite(magnitudes(weights.storages.values())):
        raise CheckpointError(f"{where} holds NaN or infinity in {_some(non_finite(weights.views))}.")
    return report
