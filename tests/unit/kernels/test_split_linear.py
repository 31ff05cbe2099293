# SPDX-License-Identifier: Apache-2.0
"""Where a product is cut so that its first call fills whole waves of tiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from rlinf_phyai.kernels.split_linear import whole_waves

H200 = 132


@pytest.mark.parametrize(
    ("rows", "columns", "head"),
    [
        (17152, 2048, 16896),  # 1072 tiles = 8 x 132 + 16
        (17152, 2560, 16896),  # 1340 = 10 x 132 + 20
        (4288, 2048, 4224),  # 272 = 2 x 132 + 8
        (4224, 2048, 4224),  # whole waves
        (4224 + 128 * 5, 2048, 4224 + 128 * 5),  # the last wave is filled by 40 tiles: worth its time
        (536, 2048, 536),  # less than one wave
        (16384, 3456, 16384),
    ],
)
def test_rows_of_whole_waves(rows: int, columns: int, head: int) -> None:
    assert whole_waves(rows, columns, H200) == head
