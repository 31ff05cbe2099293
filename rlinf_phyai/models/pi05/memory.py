# SPDX-License-Identifier: Apache-2.0
"""How much device memory an engine takes: exact sizes of what is stored, and what its largest call works in.

With B observations and T = camera tokens + 24 prompt tokens, plus the 257 padding rows of an exact value (docs/performance.md
measured 9.42 GiB at B = 64):

    weights      bytes of the storages, and of the FP8 copies where there are any
    cache        2 * layers * B * (T + suffix) * kv_heads * head_dim values
    activations  B * T * (mlp_dim + 8 * width) values: the gated MLP's product, and eight rows of the hidden size
    inputs       twice B float32 images per camera: the buckets of smaller batches add up to one more
"""

from __future__ import annotations

import torch

from rlinf_phyai.errors import PhyaiError
from rlinf_phyai.models.pi05 import fp8
from rlinf_phyai.models.pi05.configuration import PI05Config
from rlinf_phyai.models.pi05.weights import PI05Weights

PROMPT_TOKENS = 24
PADDING_ROWS = 257
HIDDEN_ROWS = 8


def engine_bytes(
    config: PI05Config, batch: int, cameras: int, params_dtype: torch.dtype, fp8_prefix: bool = False
) -> dict[str, int]:
    """Bytes by part: ``weights``, ``key/value cache``, ``activations`` (with the inputs).

    Args:
        config: its ``value_mode`` tells whether the engine computes values.
        batch: the most observations of one call.
        cameras: images of an observation.
    """
    prefix, width = config.prefix, params_dtype.itemsize
    tokens = cameras * config.vision.num_tokens + min(PROMPT_TOKENS, config.tokenizer_max_length)
    computed = tokens + (PADDING_ROWS if config.critic_after_vlm else 0)
    weights = PI05Weights(config, torch.device("meta"), params_dtype).num_bytes
    cache = 2 * prefix.depth * batch * (tokens + config.suffix_length) * prefix.num_kv_heads * prefix.head_dim * width
    activations = batch * computed * (prefix.mlp_dim + HIDDEN_ROWS * prefix.width) * width
    inputs = 2 * batch * cameras * 3 * config.vision.image_size**2 * 4
    return {
        "weights": weights + (fp8.num_bytes(config) if fp8_prefix else 0),
        "key/value cache": cache,
        "activations": activations + inputs,
    }


def check_memory(
    config: PI05Config,
    batch: int,
    cameras: int,
    device: torch.device,
    params_dtype: torch.dtype,
    fp8_prefix: bool = False,
) -> None:
    """Refuses a model that cannot fit before anything is allocated. Arguments as for :func:`engine_bytes`.

    Raises:
        PhyaiError: the estimate exceeds the free memory of the GPU.
    """
    if device.type != "cuda":
        return
    parts = engine_bytes(config, batch, cameras, params_dtype, fp8_prefix)
    free, total = torch.cuda.mem_get_info(device)
    needed = sum(parts.values())
    if needed > free:
        listed = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in parts.items())
        raise PhyaiError(
            f"the engine needs about {needed / 2**30:.1f} GiB ({listed}) for max_batch_size {batch}, but {device} has "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free. Lower max_batch_size, or move the actor to another GPU."
        )
