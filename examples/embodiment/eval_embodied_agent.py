# SPDX-License-Identifier: Apache-2.0
"""Evaluate a policy; the same as ``python -m rlinf_phyai.eval``."""

from rlinf_phyai.eval import main

if __name__ == "__main__":
    main()
