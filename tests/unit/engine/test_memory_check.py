# SPDX-License-Identifier: Apache-2.0
"""An engine that cannot fit is refused before anything is allocated, by the estimate that the doctor shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlinf_phyai.doctor.memory import engine_parts
from rlinf_phyai.engine import PhyaiError
from rlinf_phyai.models.pi05 import PI05Config
from rlinf_phyai.models.pi05.memory import check_memory, engine_bytes

GIB = 2**30
PUBLISHED = replace(PI05Config(), value_mode=None)
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("fp8_prefix", [False, True])
def test_the_doctor_shows_what_the_engine_checks(fp8_prefix: bool) -> None:
    parts = engine_bytes(PUBLISHED, 64, 2, torch.bfloat16, fp8_prefix)
    shown = engine_parts(PUBLISHED, 64, 2, torch.bfloat16, fp8_prefix)
    assert shown == {f"engine {name}": size / GIB for name, size in parts.items()}


def test_fp8_copies_count() -> None:
    plain, fp8 = (engine_bytes(PUBLISHED, 1, 2, torch.bfloat16, on)["weights"] for on in (False, True))
    mlps = 18 * 3 * 2048 * 16384  # layers of gate, up and down, a byte each; their scales are small
    assert fp8 - plain == pytest.approx(mlps, rel=0.01)


def test_what_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's memory is the only thing that is not real here."""
    needed = sum(engine_bytes(PUBLISHED, 64, 2, torch.bfloat16).values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 80 * GIB))
    with pytest.raises(
        PhyaiError, match=r"about 9\.\d GiB \(weights 6\.\d, key/value cache .* of 80\.0 GiB free\. Lower"
    ):
        check_memory(PUBLISHED, 64, 2, CUDA, torch.bfloat16)
    check_memory(PUBLISHED, 63, 2, CUDA, torch.bfloat16)
    check_memory(PUBLISHED, 10**6, 2, torch.device("cpu"), torch.bfloat16)  # a host swaps
