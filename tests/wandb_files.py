# SPDX-License-Identifier: Apache-2.0
"""Reads what WandB writes without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def wandb_history(log_dir: Path) -> dict[str, list[Any]]:
    """Every metric of the one offline WandB run below a log folder."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = log_dir.rglob("run-*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    history: dict[str, list[Any]] = {}
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            history.setdefault(name, []).append(json.loads(item.value_json))
    return history
