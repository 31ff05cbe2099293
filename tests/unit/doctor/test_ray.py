# SPDX-License-Identifier: Apache-2.0
"""The doctor's Ray: a real one, with a real worker."""

from pathlib import Path

import pytest

from rlinf_phyai.doctor import cluster
from rlinf_phyai.doctor.finding import Broken


def test_ray_and_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real Ray and a real worker; then a plugin that fails there, which RLinf only logs."""
    assert "a worker registers the plugin and has transformers" in cluster.ray_and_worker()

    monkeypatch.setenv("RLINF_EXT_MODULE", "rlinf_phyai_no_such_module")
    with pytest.raises(Broken, match=r"does not register inside a worker: .*rlinf_phyai_no_such_module"):
        cluster.ray_and_worker()
