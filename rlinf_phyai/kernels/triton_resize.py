# SPDX-License-Identifier: Apache-2.0
"""Camera images to model pixels in one launch: both passes of Pillow's resize, the black frame, and the scaling to [-1, 1].

The arithmetic is that of :mod:`rlinf_phyai.models.pi05.resize`, in integers, so the pixels are the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlinf_phyai.kernels.triton_common import unsupported_reason

__all__ = ["resize_to_levels", "unsupported_reason"]

_BLOCK = 256
_FRACTION_BITS = tl.constexpr(22)
_HALF = tl.constexpr(1 << 21)


@triton.jit
def _rounded_level(total):
    """Fixed point to a grey level, as each pass of Pillow ends."""
    return tl.minimum(tl.maximum((total + _HALF) >> _FRACTION_BITS, 0), 255)


@triton.jit
def _resize_kernel(
    image_ptr, levels_ptr, out_ptr, column_ptr, column_weight_ptr, row_ptr, row_weight_ptr,
    height_in, width_in, height, width, top, left, out_height, out_width, out_stride,
    CHANNELS: tl.constexpr, COLUMN_TAPS: tl.constexpr, ROW_TAPS: tl.constexpr, COLUMNS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image, channel = tl.program_id(1).to(tl.int64) // CHANNELS, tl.program_id(1) % CHANNELS
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x = position // out_width - top, position % out_width - left
    framed = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    source = image_ptr + image * height_in * width_in * CHANNELS + channel
    total = tl.zeros([BLOCK], tl.int32)
    # The pass that comes first is the inner loop: its result is rounded to a grey level before the other pass sums it.
    for outer in range(COLUMN_TAPS if COLUMNS_FIRST else ROW_TAPS):
        inner_total = tl.zeros([BLOCK], tl.int32)
        for inner in range(ROW_TAPS if COLUMNS_FIRST else COLUMN_TAPS):
            row_at = (inner if COLUMNS_FIRST else outer) * height + y
            column_at = (outer if COLUMNS_FIRST else inner) * width + x
            row = tl.load(row_ptr + row_at, mask=framed, other=0)
            column = tl.load(column_ptr + column_at, mask=framed, other=0)
            pixel = tl.load(source + (row * width_in + column) * CHANNELS, mask=framed, other=0).to(tl.int32)
            if COLUMNS_FIRST:
                inner_total += pixel * tl.load(row_weight_ptr + row_at, mask=framed, other=0)
            else:
                inner_total += pixel * tl.load(column_weight_ptr + column_at, mask=framed, other=0)
        if COLUMNS_FIRST:
            weight = tl.load(column_weight_ptr + outer * width + x, mask=framed, other=0)
        else:
            weight = tl.load(row_weight_ptr + outer * height + y, mask=framed, other=0)
        total += _rounded_level(inner_total) * weight
    inside = position < out_height * out_width
    value = tl.load(levels_ptr + _rounded_level(total))
    out = out_ptr + image * out_stride + channel * (out_height * out_width)
    tl.store(out + position, value, mask=inside)


def resize_to_levels(
    images: Tensor, columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], corner: tuple[int, int],
    columns_first: bool, levels: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Resizes a batch, frames it with black and looks its grey levels up.

    Args:
        images: uint8 [n, height_in, width_in, channels], contiguous.
        columns, rows: source index and weight of every filter tap, int32 [taps, width] and [taps, height].
        corner: row and column of the resized image inside the output.
        columns_first: filter along the height before the width.
        levels: [256], the output value of each grey level.
        out: [n, channels, out_height, out_width] in levels' type, written; an image's planes are contiguous.
    """
    n, height_in, width_in, channels = images.shape
    out_height, out_width = out.shape[2:]
    _resize_kernel[(triton.cdiv(out_height * out_width, _BLOCK), n * channels)](
        images, levels, out, *columns, *rows,
        height_in, width_in, rows[0].shape[1], columns[0].shape[1], *corner, out_height, out_width, out.stride(0),
        CHANNELS=channels, COLUMN_TAPS=columns[0].shape[0], ROW_TAPS=rows[0].shape[0], COLUMNS_FIRST=columns_first,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
