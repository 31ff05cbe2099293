# SPDX-License-Identifier: Apache-2.0
"""``python -m rlinf_phyai.doctor.ray_probe``: starts a Ray of its own, asks one worker, prints its report as JSON.

The worker loads the plugin as RLinf's workers do, through RLinf's own function, which only logs a failure.
"""

import json
from typing import Any


def worker_report() -> dict[str, Any]:
    """What one worker process says about itself."""
    import ray
    from rlinf.scheduler.cluster.utils import load_user_extension_module

    from rlinf_phyai import plugin
    from rlinf_phyai.doctor.finding import Check
    from rlinf_phyai.doctor.software import transformers_overlay

    load_user_extension_module()
    report = plugin.report(None)
    overlay = Check("overlay", transformers_overlay)()
    return {
        "ray": ray.__version__,
        "registered": report.registered,
        "failure": report.failure,
        "overlay": {
            "found": overlay.detail if overlay.status == "ok" else "",
            "problem": "" if overlay.status == "ok" else overlay.detail,
        },
    }


def main() -> None:
    """Print the report; a Ray that does not start ends with its own exception."""
    from rlinf_phyai import environment, plugin

    environment.set_defaults()
    plugin.activate()
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        print(json.dumps(ray.get(ray.remote(worker_report).remote(), timeout=120)), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
