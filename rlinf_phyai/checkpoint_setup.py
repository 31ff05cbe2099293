# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself, made known to openpi: actor and rollout both build openpi's transforms.

A checkpoint may bring its tokenizer along (``big_vision/paligemma_tokenizer.model``), and one whose ``config.json`` has
the key ``rlinf_phyai`` states prompt length and action horizon. Any other checkpoint changes nothing here.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_phyai.models.pi05.stated_sizes import read_stated_sizes
from rlinf_phyai.models.pi05.tiny import TOKENIZER_FILE

# openpi finds its tokenizer through the environment: one thread at a time may change that.
_LOCK = threading.RLock()


def with_stated_sizes(cfg: DictConfig) -> DictConfig:
    """The model section (``actor.model``) with the prompt length and action horizon that its checkpoint states.

    Returns:
        ``cfg`` itself when the checkpoint states nothing, else a resolved copy.
    """
    sizes = read_stated_sizes(cfg.model_path)
    if sizes is None:
        return cfg
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    with open_dict(cfg):
        cfg.openpi.max_token_len = sizes.tokenizer_max_length
        cfg.openpi.action_horizon = sizes.action_horizon
    return cfg


@contextlib.contextmanager
def own_tokenizer(checkpoint_dir: str | Path) -> Iterator[None]:
    """While open, openpi uses the tokenizer in ``checkpoint_dir`` if there is one, else its own as always."""
    checkpoint_dir = Path(checkpoint_dir)
    if not (checkpoint_dir / TOKENIZER_FILE).is_file():
        yield
        return
    with _LOCK:
        original = os.environ.get("OPENPI_DATA_HOME")
        os.environ["OPENPI_DATA_HOME"] = str(checkpoint_dir.resolve())
        try:
            yield
        finally:
            if original is None:
                del os.environ["OPENPI_DATA_HOME"]
            else:
                os.environ["OPENPI_DATA_HOME"] = original
