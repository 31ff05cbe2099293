# SPDX-License-Identifier: Apache-2.0
"""SigLIP tower and projector: pixels to prefix tokens, all cameras of the batch at once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rlinf_phyai.kernels import Kernels
from rlinf_phyai.models.pi05.weights import PI05Weights


def embed_images(kernels: Kernels, weights: PI05Weights, pixels: Tensor) -> Tensor:
    """Tokens of n images.

    Args:
        pixels: [n, 3, S, S], float, scaled to [-1, 1].

    Returns:
        [n, T, prefix width] in the parameters' type.
    """
    c = weights.config.vision
    images, side = pixels.shape[0], c.image_size // c.patch_size
    # The patch convolution has stride = kernel, so it is one GEMM over flattened patches; it stays in float32.
    patches = pixels.float().view(images, 3, side, c.patch_size, side, c.patch_size).permute(0, 2, 4, 1, 3, 5)
    embedded = F.linear(patches.reshape(images * c.num_tokens, -1), weights.patch_weight, weights.patch_bias)
    embedded = embedded.view(images, c.num_tokens, -1) + weights.position_embedding
    x = embedded.to(weights.params_dtype).view(images * c.num_tokens, -1)

    scale, eps = c.head_dim**-0.5, c.layer_norm_eps
    layers = weights.vision_layers
    h = kernels.layer_norm(x, layers[0].norm1_weight, layers[0].norm1_bias, eps)
    for i, layer in enumerate(layers):
        qkv = kernels.linear(h, layer.qkv_weight, layer.qkv_bias)
        attended = kernels.vision_attention(qkv.view(images, c.num_tokens, 3, c.num_heads, c.head_dim), scale)
        y = kernels.linear(attended.view(images * c.num_tokens, -1), layer.out_weight, layer.out_bias)
        h = kernels.add_layer_norm(x, y, layer.norm2_weight, layer.norm2_bias, eps)
        y = kernels.linear(kernels.linear_gelu(h, layer.fc1_weight, layer.fc1_bias), layer.fc2_weight, layer.fc2_bias)
        last = i + 1 == len(layers)
        norm_weight = weights.post_norm_weight if last else layers[i + 1].norm1_weight
        norm_bias = weights.post_norm_bias if last else layers[i + 1].norm1_bias
        h = kernels.add_layer_norm(x, y, norm_weight, norm_bias, eps)
    return kernels.linear(h, weights.projector_weight, weights.projector_bias).view(images, c.num_tokens, -1)
