# SPDX-License-Identifier: Apache-2.0
"""Image resize that gives the very pixels Pillow gives, on any torch device.

The policy was trained on images that Pillow's bilinear filter shrank, and the training actor keeps resizing with Pillow. A
resize that differs by a single grey level would add rollout/actor mismatch, so this module repeats Pillow's integer
arithmetic instead of using an interpolation of torch:

* For one axis, output pixel ``o`` has its centre at ``(o + 0.5) * scale`` with ``scale = input / output``. A triangle filter of
  half width ``max(scale, 1)`` around it gives float64 weights, normalised to sum 1.
* The weights become integers with 22 fraction bits, rounded half away from zero.
* Horizontal pass, then vertical pass; each sums ``pixel * weight`` in integers, adds half a unit, shifts right by 22 and clips
  to 0..255. The rounding between the two passes is part of the result.

A pass whose input and output sizes agree is skipped, as Pillow does.
"""

from __future__ import annotations

import functools
import math

import torch

_FRACTION_BITS = 22  # 32-bit sums of 8-bit pixels leave 22 bits (and two spare ones) for the weight's fraction


@functools.lru_cache(maxsize=64)
def _axis_taps(size_in: int, size_out: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Filter taps of one axis: for each tap, the source index and the integer weight of every output pixel.

    Taps that no output pixel uses are left out, so 256 -> 224 needs three. Unused entries carry weight 0.
    """
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    rows: list[list[tuple[int, int]]] = []
    for out in range(size_out):
        centre = (out + 0.5) * scale
        first = max(int(centre - stretch + 0.5), 0)
        last = min(int(centre + stretch + 0.5), size_in)
        weights = [max(1.0 - abs((index - centre + 0.5) * (1.0 / stretch)), 0.0) for index in range(first, last)]
        total = 0.0
        for weight in weights:  # the order of this sum is Pillow's; it decides the last bit
            total += weight
        fixed = [int(0.5 + weight / total * (1 << _FRACTION_BITS)) for weight in weights]
        rows.append([(first + offset, weight) for offset, weight in enumerate(fixed) if weight])
    taps = max(len(row) for row in rows)
    padded = [row + [(row[-1][0], 0)] * (taps - len(row)) for row in rows]
    return tuple((tuple(row[tap][0] for row in padded), tuple(row[tap][1] for row in padded)) for tap in range(taps))


class PilBilinearResize:
    """Resizes uint8 images to a fixed square or rectangle, keeping the aspect ratio and padding with black.

    Args:
        height, width: output size in pixels.
        device: where the images are; index and weight tables live there.
    """

    def __init__(self, height: int, width: int, device: torch.device | str = "cpu") -> None:
        if height < 1 or width < 1:
            raise ValueError(f"resize target is {height}x{width}; both sides must be at least 1 pixel")
        self.height = height
        self.width = width
        self.device = torch.device(device)
        # A robot has a handful of camera sizes; more than this many would mean varying input sizes.
        self._tables = functools.lru_cache(maxsize=32)(self._make_tables)

    def _make_tables(self, size_in: int, size_out: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        return tuple(
            (
                torch.tensor(indices, dtype=torch.int32, device=self.device),
                torch.tensor(weights, dtype=torch.int32, device=self.device),
            )
            for indices, weights in _axis_taps(size_in, size_out)
        )

    def _pass(self, images: torch.Tensor, size_out: int, axis: int) -> torch.Tensor:
        """One filter pass along ``axis`` of uint8 ``[n, channels, height, width]`` images; returns uint8."""
        size_in = images.shape[axis]
        if size_in == size_out:
            return images
        total: torch.Tensor | None = None
        for indices, weights in self._tables(size_in, size_out):
            column = weights if axis == 3 else weights[:, None]
            part = images.index_select(axis, indices) * column  # uint8 * int32 -> int32
            total = part.add_(1 << (_FRACTION_BITS - 1)) if total is None else total.add_(part)
        assert total is not None
        return (total >> _FRACTION_BITS).clamp_(0, 255).to(torch.uint8)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Resizes a batch.

        Args:
            images: uint8 ``[n, height_in, width_in, 3]`` on this object's device, channels last as cameras deliver them.

        Returns:
            uint8 ``[n, 3, height, width]``, channels first.

        Raises:
            ValueError: wrong dtype or rank, or an image so elongated that one side would shrink to nothing.
        """
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(
                f"images have dtype {images.dtype} and shape {tuple(images.shape)}; expected uint8 [n, height, width, channels]"
            )
        height_in, width_in = images.shape[1:3]
        images = images.permute(0, 3, 1, 2)
        if (height_in, width_in) == (self.height, self.width):
            return images.contiguous()
        ratio = max(width_in / self.width, height_in / self.height)
        inner_height, inner_width = int(height_in / ratio), int(width_in / ratio)
        if inner_height < 1 or inner_width < 1:
            raise ValueError(
                f"an image of {height_in}x{width_in} pixels would become {inner_height}x{inner_width} inside"
                f" {self.height}x{self.width}; crop it to a less elongated shape"
            )
        # Channels first and contiguous: gathers along either axis then read whole rows of one colour plane.
        resized = self._pass(self._pass(images.contiguous(), inner_width, 3), inner_height, 2)
        if (inner_height, inner_width) == (self.height, self.width):
            return resized
        top, left = int((self.height - inner_height) / 2), int((self.width - inner_width) / 2)
        framed = resized.new_zeros(*resized.shape[:2], self.height, self.width)
        framed[:, :, top : top + inner_height, left : left + inner_width] = resized
        return framed


def padded_size(height_in: int, width_in: int, height: int, width: int) -> tuple[int, int]:
    """Size of the picture itself inside the padded output frame, before padding (rows, columns)."""
    ratio = max(width_in / width, height_in / height)
    return math.floor(height_in / ratio), math.floor(width_in / ratio)
