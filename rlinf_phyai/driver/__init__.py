# SPDX-License-Identifier: Apache-2.0
"""What runs in the process that starts a run: its cluster, workers and log folder, its loop, its watch, its end."""
