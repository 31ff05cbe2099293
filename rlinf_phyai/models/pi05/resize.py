# SPDX-License-Identifier: Apache-2.0
"""Image resize that gives the very pixels Pillow gives, on any torch device.

The policy was trained on images that Pillow's bilinear filter shrank, and the training actor keeps resizing with
Pillow. A resize that differs by a single grey level would add rollout/actor mismatch, so this module repeats Pillow's
integer arithmetic instead of using an interpolation of torch:

* For one axis, output pixel ``o`` has its centre at ``(o + 0.5) * scale`` with ``scale = input / output``. A triangle
  filter of half width ``max(scale, 1)`` around it gives float64 weights, normalised to sum 1.
* The weights become integers with 22 fraction bits, rounded half away from zero.
* Two passes, one per axis; each sums ``pixel * weight`` in integers, adds half a unit, shifts right by 22 and clips
  to 0..255. The rounding between the two passes is part of the result, so their order is too.

A pass whose input and output sizes agree is skipped, as Pillow does. Pillow filters rows (horizontally) first; newer
releases filter columns first where that is cheaper, mostly for tall images. The first image of each size is therefore
preceded by one comparison with the installed Pillow, which picks the order.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch

_logger = logging.getLogger(__name__)

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


@functools.lru_cache(maxsize=128)
def _device_taps(size_in: int, size_out: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Source indices and integer weights, each int32 ``[taps, size_out]``."""
    indices, weights = zip(*_axis_taps(size_in, size_out), strict=True)
    return (
        torch.tensor(indices, dtype=torch.int32, device=device),
        torch.tensor(weights, dtype=torch.int32, device=device),
    )


def _filter(images: torch.Tensor, size_out: int) -> torch.Tensor:
    """One filter pass along dimension 2 of uint8 ``[n, channels, length, other]`` images; returns uint8.

    The filtered axis is not the innermost one, so every gather copies whole rows.
    """
    size_in = images.shape[2]
    if size_in == size_out:
        return images
    pixels = images.to(torch.int32)
    total: torch.Tensor | None = None
    for indices, weights in zip(*_device_taps(size_in, size_out, images.device), strict=True):
        rows, weight = pixels.index_select(2, indices), weights[:, None]
        if total is None:
            total = rows.mul_(weight).add_(1 << (_FRACTION_BITS - 1))
        else:
            total.addcmul_(rows, weight.expand_as(rows))
    assert total is not None
    return total.bitwise_right_shift_(_FRACTION_BITS).clamp_(0, 255).to(torch.uint8)


def _filter_rows(images: torch.Tensor, width: int) -> torch.Tensor:
    if images.shape[3] == width:
        return images
    return _filter(images.transpose(2, 3).contiguous(), width).transpose(2, 3).contiguous()


def resample(images: torch.Tensor, height: int, width: int, columns_first: bool) -> torch.Tensor:
    """Both passes over uint8 ``[n, channels, height_in, width_in]`` images on any device; no padding."""
    if columns_first:
        return _filter_rows(_filter(images, height), width)
    return _filter(_filter_rows(images, width), height)


def _pillow_resample(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The same by Pillow itself, image by image: several times faster than torch's integer arithmetic on a CPU."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images.permute(0, 2, 3, 1).contiguous().numpy()]
    size = (width, height)
    resized = [np.asarray(picture.resize(size, resample=Image.Resampling.BILINEAR)) for picture in pictures]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).contiguous()


@functools.lru_cache(maxsize=128)
def _columns_first(size_in: tuple[int, int], size_out: tuple[int, int]) -> bool:
    """Whether the installed Pillow filters columns first for this (height, width) pair."""
    if size_in[0] == size_out[0] or size_in[1] == size_out[1]:
        return False  # one pass at most: there is no order
    probe = torch.randint(0, 256, (1, 3, *size_in), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = _pillow_resample(probe, *size_out)
    for order in (False, True):
        if torch.equal(resample(probe, *size_out, columns_first=order), wanted):
            return order
    import PIL

    _logger.warning(
        "The resize %s -> %s differs from that of the installed Pillow %s: its filter has changed. Rollout and actor"
        " see slightly different pixels until one of them is updated.",
        size_in,
        size_out,
        PIL.__version__,
    )
    return False


def runs_triton(device: torch.device) -> bool:
    """Whether :meth:`PilBilinearResize.to_levels` can run on ``device``."""
    if device.type != "cuda":
        return False
    from rlinf_phyai.kernels.triton_resize import unsupported_reason

    return unsupported_reason(device) is None


class PilBilinearResize:
    """Resizes uint8 images to a fixed size, keeping the aspect ratio and padding with black.

    Args:
        height, width: output size in pixels.
        use_pillow: Pillow itself or torch; None takes Pillow for images on the CPU and torch elsewhere. Same results.

    Raises:
        ValueError: a side below one pixel.
    """

    def __init__(self, height: int, width: int, use_pillow: bool | None = None) -> None:
        if height < 1 or width < 1:
            raise ValueError(f"resize target is {height}x{width}; both sides must be at least 1 pixel")
        self.height = height
        self.width = width
        self._use_pillow = use_pillow

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Resizes a batch on the device that holds it.

        Args:
            images: uint8 ``[n, height_in, width_in, channels]``, channels last as cameras deliver them.

        Returns:
            uint8 ``[n, channels, height, width]``, channels first.

        Raises:
            ValueError: wrong dtype or rank, or an image so elongated that one side would shrink to nothing.
        """
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise ValueError(
                f"images have dtype {images.dtype} and shape {tuple(images.shape)}; expected uint8"
                " [n, height, width, channels]"
            )
        planes = images.permute(0, 3, 1, 2).contiguous()
        if tuple(images.shape[1:3]) == (self.height, self.width):
            return planes
        height, width, top, left = self._fit(*images.shape[1:3])
        if self._use_pillow or (self._use_pillow is None and images.device.type == "cpu"):
            resized = _pillow_resample(planes, height, width)
        else:
            resized = resample(planes, height, width, _columns_first(tuple(images.shape[1:3]), (height, width)))
        if (height, width) == (self.height, self.width):
            return resized
        framed = resized.new_zeros(*resized.shape[:2], self.height, self.width)
        framed[:, :, top : top + height, left : left + width] = resized
        return framed

    def to_levels(self, images: torch.Tensor, levels: torch.Tensor, out: torch.Tensor) -> None:
        """The same in one launch, each grey level replaced by its entry in ``levels``.

        Args:
            images: uint8 ``[n, height_in, width_in, channels]`` on a device that runs Triton.
            levels: ``[256]``.
            out: ``[n, channels, height, width]`` in levels' type, written; an image's planes must be contiguous.

        Raises:
            ValueError: as the call.
        """
        from rlinf_phyai.kernels.triton_resize import resize_to_levels

        height_in, width_in = images.shape[1:3]
        height, width, top, left = self._fit(height_in, width_in)
        columns = _device_taps(width_in, width, images.device)
        rows = _device_taps(height_in, height, images.device)
        order = _columns_first((height_in, width_in), (height, width))
        resize_to_levels(images.contiguous(), columns, rows, (top, left), order, levels, out)

    def _fit(self, height_in: int, width_in: int) -> tuple[int, int, int, int]:
        """Height and width of the resized image, and the row and column of its corner in the output."""
        ratio = max(width_in / self.width, height_in / self.height)
        height, width = int(height_in / ratio), int(width_in / ratio)
        if height < 1 or width < 1:
            raise ValueError(
                f"an image of {height_in}x{width_in} pixels would become {height}x{width} inside"
                f" {self.height}x{self.width}; crop it to a less elongated shape"
            )
        return height, width, int((self.height - height) / 2), int((self.width - width) / 2)
