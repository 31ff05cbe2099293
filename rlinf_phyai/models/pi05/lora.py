# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters merged into the matrices that they change.

RLinf trains adapters on the vision-language model with peft, which renames its parameters::

    paligemma.base_model.model.<module>.base_layer.weight    W, frozen
    paligemma.base_model.model.<module>.lora_A.default.weight   A [r, in]
    paligemma.base_model.model.<module>.lora_B.default.weight   B [out, r]

The adapted module computes x W^T + s (x A^T) B^T with s = lora_alpha / r. The merged matrix W + s B A computes the same in one product,
rounded once to the type of W: in bfloat16, changes below half a unit in W's last place are lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from rlinf_phyai.errors import CheckpointError
from rlinf_phyai.models.pi05.checkpoint import LM_HEAD

_ADAPTER = re.compile(r"\.lora_([AB])\.default\.weight$")


def plain_name(name: str) -> str:
    """The name that a parameter had before peft; of an adapter, the matrix that it changes."""
    name = name.replace(".paligemma.base_model.model.", ".paligemma.").replace(".base_layer.", ".")
    return _ADAPTER.sub(".weight", name)


def plain_names(names: Iterable[str]) -> list[str]:
    """:func:`plain_name` of each, once. The adapter of the language head is left out: no action depends on it."""
    return [name for name in dict.fromkeys(map(plain_name, names)) if name != LM_HEAD]


@torch.no_grad()
def merge_adapters(
    state: Mapping[str, Tensor], scale: float = 1.0, materialize: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """A state dict by plain names, adapters merged in float32; without adapters, the same tensors.

    Args:
        state: names and tensors of a model with or without adapters.
        scale: lora_alpha / r; RLinf sets lora_alpha to r.
        materialize: makes the tensors that enter a product whole (sharded ones cannot be multiplied).

    Raises:
        CheckpointError: a name that comes twice; an adapter without its other half, without its matrix or of another size; an
            adapted matrix without its adapter.
    """
    adapters: dict[str, dict[str, Tensor]] = {}
    merged: dict[str, Tensor] = {}
    adapted: list[str] = []
    for name, tensor in state.items():
        if found := _ADAPTER.search(name):
            adapters.setdefault(plain_name(name), {})[found[1]] = tensor
            continue
        plain = plain_name(name)
        if plain in merged:
            raise CheckpointError(f"{plain} comes twice (once as {name}); remove one of the two.")
        merged[plain] = tensor
        if name.endswith(".base_layer.weight"):
            adapted.append(plain)
    for name in dict.fromkeys([*adapters, *adapted]):
        halves = adapters.get(name, {})
        if name not in merged or halves.keys() != {"A", "B"}:
            raise CheckpointError(f"the LoRA adapter of {name} is incomplete: it needs the matrix, lora_A and lora_B.")
        if name == LM_HEAD:
            continue  # tied to the embedding, which has no adapter
        _check_sizes(name, merged[name], halves["A"], halves["B"])
        weight, a, b = (materialize(tensor) for tensor in (merged[name], halves["A"], halves["B"]))
        merged[name] = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)
    return merged


def _check_sizes(name: str, weight: Tensor, a: Tensor, b: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (weight, a, b)]
    fits = all(len(shape) == 2 for shape in shapes) and b.shape[1] == a.shape[0]
    if not fits or shapes[0] != (b.shape[0], a.shape[1]):
        raise CheckpointError(
            f"the LoRA adapter of {name} does not fit: found the matrix {shapes[0]}, lora_A {shapes[1]} and lora_B {shapes[2]}; "
            "(out, in), (r, in) and (out, r) are needed."
        )
    for half, tensor in (("lora_A", a), ("lora_B", b)):
        if not tensor.is_floating_point():
            raise CheckpointError(f"{half} of {name} has dtype {tensor.dtype}; parameters are floating-point tensors.")
