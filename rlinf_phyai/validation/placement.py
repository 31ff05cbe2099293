# SPDX-License-Identifier: Apache-2.0
"""RLinf's placement syntax: ``resources[:processes]`` parts joined by commas, such as ``0-3``, ``all`` or ``0:0-1``.

Resources are the accelerators of the cluster (or of a node group), or whole nodes where there is no accelerator.
Without ``:processes`` each resource gets one process. ``0-3:0-1`` gives every process two resources, ``0:0-1`` lets two
processes share one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

PLACEMENT = "cluster.component_placement"
"""The config's section: ``component[,component...]`` -> placement."""
NODE_GROUP = "node"
CLUSTER_GROUP = "cluster"


@dataclass(frozen=True)
class Component:
    """Processes of one component. Both fields are None where the placement says ``all`` and the cluster is not known.

    Attributes:
        world_size: number of processes.
        resources: per process, the ranks of the resources it may use.
    """

    world_size: int | None
    resources: tuple[tuple[int, ...], ...] | None

    def shared(self) -> dict[int, list[int]]:
        """Resource -> processes, for resources that several processes use."""
        users: dict[int, list[int]] = {}
        for process, ranks in enumerate(self.resources or ()):
            for rank in ranks:
                users.setdefault(rank, []).append(process)
        return {rank: processes for rank, processes in users.items() if len(processes) > 1}


class PlacementSyntaxError(ValueError):
    """A placement string that RLinf would not accept."""


def component(text: str, available: int | None) -> Component | str:
    """The processes that a placement string asks for, or the text of what is wrong with it.

    Args:
        text: for example ``0-3``, ``all``, ``0-1:0-3,2:4``.
        available: number of resources, None where it is not known (``all`` stays open, ranks have no upper bound).
    """
    try:
        parts = list(_parts(text, available))
    except PlacementSyntaxError as error:
        return str(error)
    if not parts:
        return "it names no resource"
    if any(part is None for part in parts):
        return Component(None, None)
    resources: list[tuple[int, ...]] = []
    for part in parts:
        assert part is not None
        resources.extend(_share(*part))
    return Component(len(resources), tuple(resources))


def _parts(text: str, available: int | None) -> Iterator[tuple[list[int], int] | None]:
    """Per part: its resources and the number of its processes; None for ``all`` on an unknown cluster."""
    next_process, last_resource = 0, -1
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        left, colon, right = part.partition(":")
        if ":" in right:
            raise PlacementSyntaxError(f"{part!r} has more than one colon")
        if left.strip().lower() == "all" and available is None:
            yield None
            continue
        resources = _ranks(left.strip(), available)
        if resources[0] <= last_resource:
            raise PlacementSyntaxError(
                f"{part!r} names resource {resources[0]} after {last_resource}; resources must ascend"
            )
        last_resource = resources[-1]
        if colon:
            if right.strip().lower() == "all":
                raise PlacementSyntaxError(f"{part!r}: processes cannot be 'all'")
            processes = _ranks(right.strip(), None)
            if next_process and processes[0] != next_process:
                raise PlacementSyntaxError(f"{part!r}: processes must go on at {next_process}")
            next_process = processes[-1] + 1
            count = len(processes)
        else:
            count = len(resources)
            next_process += count
        if count % len(resources) and len(resources) % count:
            raise PlacementSyntaxError(f"{part!r}: {count} processes cannot share {len(resources)} resources evenly")
        yield resources, count


def _ranks(text: str, available: int | None) -> list[int]:
    """The ranks of ``a``, ``a-b`` or ``all``; the bounds are checked where they are known."""
    if text.lower() == "all" and available is not None:
        if available == 0:
            raise PlacementSyntaxError("'all' of no resource")
        return list(range(available))
    first, dash, last = text.partition("-")
    try:
        start, end = int(first), int(last if dash else first)
    except ValueError:
        raise PlacementSyntaxError(f"{text!r} is no rank, no range like 0-3 and not 'all'") from None
    if end < start:
        raise PlacementSyntaxError(f"{text!r} ends before it starts")
    if available is not None and end >= available:
        raise PlacementSyntaxError(f"{text!r} names resource {end}, but there are {available} (0-{available - 1})")
    return list(range(start, end + 1))


def _share(resources: list[int], processes: int) -> Iterator[tuple[int, ...]]:
    """Resources of each process: several per process, or several processes per resource."""
    if len(resources) >= processes:
        each = len(resources) // processes
        for index in range(processes):
            yield tuple(resources[index * each : (index + 1) * each])
    else:
        for resource in resources:
            for _ in range(processes // len(resources)):
                yield (resource,)


def names_of(entry: str) -> list[str]:
    """The components that a key of the section places: ``actor,env`` are two."""
    return [name.strip() for name in entry.split(",")]


def placed_twice(entries: Iterable[str]) -> dict[str, list[str]]:
    """Component -> the keys that place it, for components that RLinf would find placed more than once."""
    places: dict[str, list[str]] = {}
    for entry in entries:
        for name in names_of(entry):
            places.setdefault(name, []).append(entry)
    return {name: keys for name, keys in places.items() if len(keys) > 1}


def replacing(section: str = "{actor: 0, rollout: 1, env: 1}") -> str:
    """The overrides, quoted for a shell, that replace the whole section: Hydra alone would merge the new one into the old."""
    return shlex.join([f"~{PLACEMENT}", f"+{PLACEMENT}={section}"])


def resource_count(labels: Any, cluster: Any, gpus: int | None) -> int | None:
    """Resources that a component of the given node group(s) can name; None where the config does not tell.

    Args:
        labels: ``node_group`` of the placement entry: None, a label, or several (a list or a comma-separated text).
        cluster: the ``cluster`` section.
        gpus: accelerators of the whole cluster.
    """
    nodes = cluster.get("num_nodes") if isinstance(cluster, DictConfig) else None
    if not isinstance(nodes, int):
        return None
    if labels is None:
        names = [CLUSTER_GROUP]
    elif isinstance(labels, ListConfig):
        names = [str(label) for label in labels]
    else:
        names = [label.strip() for label in str(labels).split(",")]
    counts = [_group_resources(name, cluster, nodes, gpus) for name in names]
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _group_resources(label: str, cluster: DictConfig, nodes: int, gpus: int | None) -> int | None:
    if label == NODE_GROUP:
        return nodes
    if label == CLUSTER_GROUP:
        return nodes if gpus == 0 else gpus
    for group in cluster.get("node_groups") or ():
        if not isinstance(group, DictConfig) or str(group.get("label")) != label:
            continue
        if group.get("hardware") is not None:
            return None  # its own kind of hardware, counted elsewhere
        members = len(
            {rank for piece in str(group.get("node_ranks")).split(",") for rank in _ranks(piece.strip(), None)}
        )
        if gpus == 0 or group.get("ignore_hardware"):
            return members
        # Nodes may differ, so only a group that is the whole cluster has a known count.
        return gpus if members == nodes else None
    return None
