# SPDX-License-Identifier: Apache-2.0
"""Storage of the parameters: each kind of matrix is one stacked tensor, every checkpoint name is a view into it.

q|k|v and gate|up are stored as one matrix per layer (their rows one after the other), so one GEMM serves them, and the layers of a
kind are stacked on dimension 0. A writer that fills the named views fills the fused matrices; nothing is rebuilt, so captured
graphs stay valid, and a handful of version counters tells whether anybody wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rlinf_phyai.models.pi05.checkpoint import (
    EMBEDDING,
    EXPERT_LM_HEAD,
    LM_HEAD,
    NOISE_HEAD,
    OPTIONAL_PARTS,
    VALUE_HEAD,
)
from rlinf_phyai.models.pi05.configuration import NOISE_HEAD_SIZES, GemmaConfig, PI05Config
from rlinf_phyai.models.pi05.exposed import ExposedMemory

NOISE_LAYERS = f"{NOISE_HEAD}mlp_logvar."
"""The noise head without its bounds, which are no weights."""

_TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
_PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear."
_PREFIX = "paligemma_with_expert.paligemma.model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."


@dataclass(frozen=True)
class VisionLayer:
    """Views of one SigLIP layer; q|k|v rows in this order."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor
    fc1_bias: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor


@dataclass(frozen=True)
class GemmaLayer:
    """Views of one Gemma layer: qkv [(q + 2 kv heads) * hd, width], kv (its last rows), gate_up [2 * mlp, width]."""

    qkv: Tensor
    kv: Tensor
    v: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


class PI05Weights:
    """All parameters of one model on one device.

    Attributes:
        views: checkpoint name -> view, in the order of the actor's ``state_dict()``. The expert's output head, which the
            engine never reads, is a meta tensor; ``lm_head`` and ``embed_tokens`` of PaliGemma are one storage.
        storages: the stacks that the views lie in. Written through these and the views only: their counters tell of it.
        memory: what owns the bytes. The layers below are views of its owners, so they survive an offload untouched.
    """

    def __init__(self, config: PI05Config, device: torch.device, params_dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.params_dtype = params_dtype
        self.storages: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}
        self._build_vision()
        self._build_prefix()
        self._build_expert()
        self._build_heads()
        self.memory = ExposedMemory(self.storages, self.views)
        self.storages, self.views = self.memory.wholes, self.memory.views
        self._heads = {  # picked once: every request asks
            stem: [view for name, view in self.views.items() if name.startswith(stem)]
            for stem in (VALUE_HEAD, NOISE_LAYERS)
        }

    # -- memory --

    def _new(self, key: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype or self.params_dtype, device=self.device)
        self.storages[key] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(t.numel() * t.element_size() for t in self.storages.values())

    def write_counters(self) -> tuple[int, ...]:
        """torch's version counter of every storage; any in-place write to a storage or a view of it raises its counter."""
        return self.memory.write_counters()

    def head_written(self, stem: str) -> bool:
        """Whether every tensor of a head was written at least once; ``stem`` is ``VALUE_HEAD`` or :data:`NOISE_LAYERS`.

        A tensor that nobody wrote has version 0; RLinf's patch syncer writes in place, past the load report.
        """
        return all(view._version for view in self._heads[stem])

    def vision_counters(self) -> tuple[int, ...]:
        """The write counters of everything that an image's tokens depend on: the vision tower and its projector."""
        return tuple(t._version for key, t in self.storages.items() if key.startswith("vision."))

    # -- vision --

    def _build_vision(self) -> None:
        c = self.config.vision
        depth, width, mlp = c.num_layers, c.hidden_size, c.intermediate_size
        f32 = torch.float32
        patch = self._new("vision.patch.weight", width, 3, c.patch_size, c.patch_size, dtype=f32)
        self.patch_weight = patch.view(width, -1)
        self.patch_bias = self._new("vision.patch.bias", width, dtype=f32)
        self.position_embedding = self._new("vision.position", c.num_tokens, width, dtype=f32)
        norms = self._new("vision.norms", depth, 4, width)  # norm1 weight, bias, norm2 weight, bias
        qkv, qkv_bias = self._new("vision.qkv", depth, 3 * width, width), self._new("vision.qkv.bias", depth, 3 * width)
        out, out_bias = self._new("vision.out", depth, width, width), self._new("vision.out.bias", depth, width)
        fc1, fc1_bias = self._new("vision.fc1", depth, mlp, width), self._new("vision.fc1.bias", depth, mlp)
        fc2, fc2_bias = self._new("vision.fc2", depth, width, mlp), self._new("vision.fc2.bias", depth, width)
        post = self._new("vision.post_norm", 2, width)
        projector = self._new("vision.projector", self.config.prefix.width, width)
        projector_bias = self._new("vision.projector.bias", self.config.prefix.width)

        views = self.views
        views[f"{_TOWER}embeddings.patch_embedding.weight"] = patch
        views[f"{_TOWER}embeddings.patch_embedding.bias"] = self.patch_bias
        views[f"{_TOWER}embeddings.position_embedding.weight"] = self.position_embedding
        self.vision_layers: list[VisionLayer] = []
        for i in range(depth):
            stem = f"{_TOWER}encoder.layers.{i}."
            views[f"{stem}layer_norm1.weight"], views[f"{stem}layer_norm1.bias"] = norms[i, 0], norms[i, 1]
            for part, row in (("k", 1), ("v", 2), ("q", 0)):
                rows = slice(row * width, (row + 1) * width)
                views[f"{stem}self_attn.{part}_proj.weight"] = qkv[i, rows]
                views[f"{stem}self_attn.{part}_proj.bias"] = qkv_bias[i, rows]
            views[f"{stem}self_attn.out_proj.weight"], views[f"{stem}self_attn.out_proj.bias"] = out[i], out_bias[i]
            views[f"{stem}layer_norm2.weight"], views[f"{stem}layer_norm2.bias"] = norms[i, 2], norms[i, 3]
            views[f"{stem}mlp.fc1.weight"], views[f"{stem}mlp.fc1.bias"] = fc1[i], fc1_bias[i]
            views[f"{stem}mlp.fc2.weight"], views[f"{stem}mlp.fc2.bias"] = fc2[i], fc2_bias[i]
            self.vision_layers.append(
                VisionLayer(
                    norms[i, 0], norms[i, 1], qkv[i], qkv_bias[i], out[i], out_bias[i],
                    norms[i, 2], norms[i, 3], fc1[i], fc1_bias[i], fc2[i], fc2_bias[i],
                )
            )  # fmt: skip
        self.post_norm_weight, self.post_norm_bias = post[0], post[1]
        self.projector_weight, self.projector_bias = projector, projector_bias
        views[f"{_TOWER}post_layernorm.weight"], views[f"{_TOWER}post_layernorm.bias"] = post[0], post[1]
        views[f"{_PROJECTOR}weight"], views[f"{_PROJECTOR}bias"] = projector, projector_bias

    # -- Gemma stacks --

    def _build_layers(self, key: str, stem: str, c: GemmaConfig) -> list[GemmaLayer]:
        """Stacks of one Gemma and the views of its matrices; the norms' views follow per layer through ``_norm_views``."""
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = self._new(f"{key}.qkv", c.depth, q_rows + 2 * kv_rows, c.width)
        o = self._new(f"{key}.o", c.depth, c.width, q_rows)
        gate_up = self._new(f"{key}.gate_up", c.depth, 2 * c.mlp_dim, c.width)
        down = self._new(f"{key}.down", c.depth, c.width, c.mlp_dim)
        layers = []
        for i in range(c.depth):
            layer = f"{stem}layers.{i}."
            self.views[f"{layer}self_attn.q_proj.weight"] = qkv[i, :q_rows]
            self.views[f"{layer}self_attn.k_proj.weight"] = qkv[i, q_rows : q_rows + kv_rows]
            self.views[f"{layer}self_attn.v_proj.weight"] = qkv[i, q_rows + kv_rows :]
            self.views[f"{layer}self_attn.o_proj.weight"] = o[i]
            self.views[f"{layer}mlp.gate_proj.weight"] = gate_up[i, : c.mlp_dim]
            self.views[f"{layer}mlp.up_proj.weight"] = gate_up[i, c.mlp_dim :]
            self.views[f"{layer}mlp.down_proj.weight"] = down[i]
            self._norm_views(layer, i)
            layers.append(GemmaLayer(qkv[i], qkv[i, q_rows:], qkv[i, q_rows + kv_rows :], o[i], gate_up[i], down[i]))
        return layers

    def _norm_views(self, layer: str, i: int) -> None:
        for offset, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            row = 2 * i + offset
            if layer.startswith(_PREFIX):
                self.views[f"{layer}{name}.weight"] = self.prefix_norms[row]
            elif not self.config.pi05:
                self.views[f"{layer}{name}.weight"] = self.expert_norms[row]
            else:
                self.views[f"{layer}{name}.dense.weight"] = self.ada_weight[row]
                self.views[f"{layer}{name}.dense.bias"] = self.ada_bias[row]

    def _build_prefix(self) -> None:
        c = self.config.prefix
        self.embedding = self._new("prefix.embedding", self.config.vocab_size, c.width)
        self.prefix_norms = self._new("prefix.norms", 2 * c.depth + 1, c.width, dtype=torch.float32)
        self.views[EMBEDDING] = self.embedding
        self.prefix_layers = self._build_layers("prefix", _PREFIX, c)
        self.views[f"{_PREFIX}norm.weight"] = self.prefix_norms[-1]
        self.views[LM_HEAD] = self.embedding

    def _build_expert(self) -> None:
        c = self.config.expert
        norms = 2 * c.depth + 1
        if self.config.pi05:
            # One stack for all AdaRMS layers: their modulations for all denoise steps are then one GEMM.
            self.ada_weight = self._new("expert.ada.weight", norms, 3 * c.width, c.width, dtype=torch.float32)
            self.ada_bias = self._new("expert.ada.bias", norms, 3 * c.width, dtype=torch.float32)
        else:
            self.expert_norms = self._new("expert.norms", norms, c.width, dtype=torch.float32)
        self.expert_layers = self._build_layers("expert", _EXPERT, c)
        if self.config.pi05:
            self.views[f"{_EXPERT}norm.dense.weight"] = self.ada_weight[-1]
            self.views[f"{_EXPERT}norm.dense.bias"] = self.ada_bias[-1]
        else:
            self.views[f"{_EXPERT}norm.weight"] = self.expert_norms[-1]
        self.views[EXPERT_LM_HEAD] = torch.empty(
            self.config.vocab_size, c.width, dtype=self.params_dtype, device="meta"
        )

    # -- projections and critic --

    def _linear(self, name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weight = self._new(f"{name}.weight", rows, columns, dtype=torch.float32)
        bias = self._new(f"{name}.bias", rows, dtype=torch.float32)
        self.views[f"{name}.weight"], self.views[f"{name}.bias"] = weight, bias
        return weight, bias

    def _build_heads(self) -> None:
        width, dim = self.config.expert.width, self.config.action_dim
        self.action_in = self._linear("action_in_proj", width, dim)
        self.action_out = self._linear("action_out_proj", dim, width)
        if self.config.pi05:
            self.time_in = self._linear("time_mlp_in", width, width)
            self.time_out = self._linear("time_mlp_out", width, width)
        else:
            self.state = self._linear("state_proj", width, dim)
            self.action_time_in = self._linear("action_time_mlp_in", width, 2 * width)
            self.action_time_out = self._linear("action_time_mlp_out", width, width)
        self.value_head: list[tuple[Tensor, Tensor]] = []
        if self.config.value_mode is not None:
            sizes = (self.config.value_input_width, *self.config.value_head_sizes, 1)
            for i, (columns, rows) in enumerate(pairwise(sizes)):
                self.value_head.append(self._linear(f"{VALUE_HEAD}mlp.{2 * i}", rows, columns))
        self.noise_head: list[tuple[Tensor, Tensor]] = []
        if self.config.noise_method == "flow_noise":
            self.noise_logvar = []
            for name, std in zip(("logvar_min", "logvar_max"), self.config.noise_std_range, strict=True):
                bound = self._new(f"{NOISE_HEAD}{name}", 1, dtype=torch.float32)
                bound.copy_(torch.tensor([std**2], dtype=torch.float32, device="cpu").log())
                self.views[f"{NOISE_HEAD}{name}"] = bound
                self.noise_logvar.append(bound)
            for i, (columns, rows) in enumerate(pairwise((width, *NOISE_HEAD_SIZES, dim))):
                self.noise_head.append(self._linear(f"{NOISE_HEAD}mlp_logvar.moduleList.{i}.linear_1", rows, columns))

    def is_optional(self, name: str) -> bool:
        """Whether a full checkpoint may lack this name: SFT checkpoints have no critic and no noise head."""
        return name.startswith(tuple(OPTIONAL_PARTS.values()))
