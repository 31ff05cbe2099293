# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: which episode ended how, success rates with their uncertainty, two policies side by side."""
