# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster a run uses.

RLinf joins whatever Ray it finds on the machine. On a cluster of several nodes that is meant: the user started it. But
Ray also finds the private cluster of another run on the same machine, and the second run would die with the first. So
a run on one node starts a Ray of its own, unless ``RAY_ADDRESS`` says otherwise.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlinf_phyai.errors import PhyaiError

ADDRESS = "RAY_ADDRESS"
_OWN = "local"  # Ray's word for: start one
_CONNECT_TIMEOUT_S = 10.0


@contextmanager
def ray_cluster(num_nodes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Inside this block RLinf finds the right Ray cluster.

    Args:
        num_nodes: of the run; with 1 and no ``RAY_ADDRESS`` in the environment, a private cluster is started.
        say: prints a line.

    Raises:
        PhyaiError: nothing answers at ``RAY_ADDRESS``, or that cluster cannot be joined.
    """
    address = os.environ.get(ADDRESS, "")
    if address:
        require_answer(address)
    elif num_nodes == 1:
        if others := running_clusters():
            say(
                f"Ray runs on this machine already ({', '.join(sorted(others))}); this run starts one of its own. To join "
                f"that cluster instead, set {ADDRESS}=auto."
            )
        os.environ[ADDRESS] = _OWN
    try:
        yield
    except (ConnectionError, RuntimeError) as error:
        if address and "ersion mismatch" in str(error):
            raise PhyaiError(f"{ADDRESS} is {address}, whose Ray does not fit this environment: {error}") from error
        raise
    finally:
        if not address:
            os.environ.pop(ADDRESS, None)


def running_clusters() -> set[str]:
    """Addresses of the Ray clusters that have a process on this machine."""
    try:
        from ray._private.services import find_gcs_addresses
    except ImportError:  # not a public name; it serves a remark only
        return set()
    return set(find_gcs_addresses())


def require_answer(address: str) -> None:
    """Ray waits for a minute and then says little.

    Raises:
        PhyaiError: ``address`` is a host and port where nothing listens.
    """
    host, separator, port = address.rpartition(":")
    if not separator or "/" in address or not port.isdigit():
        return  # auto, local, or a URL: Ray's business
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PhyaiError(
            f"{ADDRESS} is {address}, where no Ray cluster answers ({error}); start it there (`ray start --head`), or unset "
            f"{ADDRESS}: a run on one node then starts a Ray of its own"
        ) from error
