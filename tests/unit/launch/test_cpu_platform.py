# SPDX-License-Identifier: Apache-2.0
"""The CPU as RLinf's device."""

from __future__ import annotations

import pytest
import torch

from rlinf_phyai.platforms import cpu


@pytest.fixture
def installed() -> None:
    if not cpu.install():
        pytest.skip("this machine has an accelerator: RLinf stays as it is")


@pytest.mark.usefixtures("installed")
def test_install_twice_and_lookups() -> None:
    from rlinf.scheduler import Worker
    from rlinf.scheduler.hardware import AcceleratorType, AcceleratorUtil

    assert cpu.install()
    assert AcceleratorUtil.get_torch_platform(AcceleratorType.NO_ACCEL) is cpu.CPU_PLATFORM
    assert AcceleratorUtil.get_device_type(AcceleratorType.NO_ACCEL) == "cpu"
    assert AcceleratorUtil.get_torch_platform(AcceleratorType.NV_GPU) is torch.cuda  # others are left alone
    assert Worker.torch_device_type == "cpu"


def test_platform_answers_what_rlinf_asks() -> None:
    platform = cpu.CPU_PLATFORM
    assert platform.is_available()
    assert platform.current_device() == "cpu"
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    platform.ipc_collect()
    assert platform.memory_allocated() == platform.memory_reserved() == platform.max_memory_allocated() == 0
    with platform.stream(platform.Stream()):
        platform.current_stream().synchronize()
    state = platform.get_rng_state()
    first = torch.rand(1)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(1), first)
    with pytest.raises(AttributeError):
        _ = platform.no_such_function
