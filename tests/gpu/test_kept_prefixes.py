# SPDX-License-Identifier: Apache-2.0
"""The memory of kept prefixes on a device that another process uses too."""

from __future__ import annotations

import torch

from benchmarks.actor import held_by_another_process
from rlinf_phyai.actor.kept_prefixes import KeptPrefixes
from rlinf_phyai.actor.prefix import PrefixKeys
from rlinf_phyai.actor.prefix_budget import CudaMeter

GIB, SLACK = 2**30, 2**28
DEVICE = torch.device("cuda", 0)


def test_own_memory_and_that_of_others() -> None:
    meter = CudaMeter(DEVICE)
    before = meter.begin()
    first = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    assert abs(meter.outside() - before) < SLACK
    del first  # torch keeps the memory, so it is ours still
    assert abs(meter.outside() - before) < SLACK
    allocated, reserved = meter.peaks()
    assert GIB <= allocated <= reserved < meter.total
    with held_by_another_process(2):
        grown = meter.outside() - before
        print(f"another process with 2 GiB takes {grown / GIB:.2f} GiB")
        assert 2 * GIB <= grown < 4 * GIB
    assert abs(meter.outside() - before) < SLACK


def test_the_memory_is_returned_before_an_engine_needs_it() -> None:
    from rlinf_phyai.actor.in_process import start_process_group

    start_process_group()
    lines: list[str] = []
    prefixes = KeptPrefixes("auto", DEVICE, lines.append, repeatable=True)
    kept = []
    for _ in range(3):
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(DEVICE)[0]
        prefixes.begin([20, 24, 22])
        for length in (20, 24, 22):  # 16 MiB for a token of each of 2 samples
            shape = (2, 1, 4 + length, 2**22)
            layer = torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
            prefixes.add(PrefixKeys([layer], [layer], torch.ones(2, 4 + length, dtype=torch.bool, device=DEVICE)))
            del layer
        prefixes.agree()
        kept.append(prefixes.metrics["actor/prefixes_kept"])
        with prefixes.training():
            torch.cuda.empty_cache()  # as RLinf does between global batches
            taken = free - torch.cuda.mem_get_info(DEVICE)[0]
            assert abs(taken - prefixes.store.nbytes) < SLACK  # blocks of their own, without gaps
        torch.cuda.empty_cache()
        assert abs(free - torch.cuda.mem_get_info(DEVICE)[0]) < SLACK
    assert kept == [0, 1, 1]
    assert len(lines) == 2
    print(*lines, sep="\n")
