# SPDX-License-Identifier: Apache-2.0
"""Puts the groups ``hybrid_engines`` and ``kernel_policy`` on the search path of every Hydra program."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlinf_phyai.paths import config_dir


class RlinfPhyaiSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="rlinf-phyai", path=f"file://{config_dir()}")
