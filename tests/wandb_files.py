# SPDX-License-Identifier: Apache-2.0
"""Reads what WandB writes without a network."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_LIMIT_S = 60.0


def wandb_history(log_dir: Path, limit_s: float = _LIMIT_S) -> dict[str, list[Any]]:
    """Every metric of the one offline WandB run below a log folder.

    Offline, ``finish()`` returns before WandB's own process has written the file: the run is whole when its exit record is there.

    Raises:
        TimeoutError: the run has no exit record after ``limit_s`` seconds.
    """
    end = time.monotonic() + limit_s
    (file,) = log_dir.rglob("run-*.wandb")
    while True:
        records, ending = _records(file)
        if any(record.HasField("exit") for record in records):
            break
        if time.monotonic() > end:
            raise TimeoutError(f"{file} has no exit record after {limit_s:g} s, but {len(records)} others; {ending}")
        time.sleep(0.05)
    history: dict[str, list[Any]] = {}
    for record in records:
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            history.setdefault(name, []).append(json.loads(item.value_json))
    return history


def _records(file: Path) -> tuple[list[Any], str]:
    """The records that are whole, and how the file ends."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    records: list[Any] = []
    try:
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            records.append(record)
    except AssertionError as error:  # half a record: the rest may be on its way
        return records, str(error)
    finally:
        store.close()
    return records, "the last one is whole"
