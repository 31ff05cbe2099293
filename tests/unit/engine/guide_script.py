# SPDX-License-Identifier: Apache-2.0
"""The calls of the single-GPU guide's complete program, in its order, with our import lines.

The test sets CHECKPOINT_DIR and DEVICE; nothing else is adapted to the machine that runs it.
"""

import os
from pathlib import Path

import torch

from rlinf_phyai.engine import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from rlinf_phyai.models.pi05 import PI05Args, PI05Config, PI05Request, load_config

CHECKPOINT_DIR = Path(os.environ["CHECKPOINT_DIR"])
DEVICE = os.environ.get("DEVICE", "cuda")
BATCH_SIZE = 1

cfg = load_config(CHECKPOINT_DIR, PI05Config)
device = torch.device(DEVICE)
dtype = torch.bfloat16

engine = Engine(
    EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(checkpoint_dir=CHECKPOINT_DIR, max_batch_size=BATCH_SIZE),
        config=EngineConfig(
            device=DeviceConfig(target=DEVICE, params_dtype=dtype),
            runtime=RuntimeConfig(use_cuda_graph=True),
        ),
    )
)
try:
    size = cfg.vision.image_size
    input_ids = torch.zeros(BATCH_SIZE, cfg.tokenizer_max_length, dtype=torch.int64, device=device)
    input_ids[:, 0] = 2
    request = PI05Request(
        pixel_values=torch.rand(BATCH_SIZE, 3, 3, size, size, dtype=dtype, device=device),
        input_ids=input_ids,
        lang_lens=torch.ones(BATCH_SIZE, dtype=torch.int64, device=device),
    )
    actions = engine.step(request)
    print(f"action chunk shape={tuple(actions.shape)}, dtype={actions.dtype}")
finally:
    engine.close()
