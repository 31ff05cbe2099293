# SPDX-License-Identifier: Apache-2.0
"""Train on an embodied task; the same as ``python -m rlinf_phyai.train``."""

from rlinf_phyai.train import main

if __name__ == "__main__":
    main()
