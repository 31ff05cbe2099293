# SPDX-License-Identifier: Apache-2.0
"""The doctor's table and its JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_phyai import __version__
from rlinf_phyai.doctor.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def passed(findings: Sequence[Finding]) -> bool:
    """Whether a run can start."""
    return all(finding.status != "error" for finding in findings)


def print_table(findings: Sequence[Finding]) -> None:
    """Every finding, the fix below what needs one, and a line with the counts."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("part", "status", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        text = escape(finding.detail)
        if finding.status != "ok" and finding.fix:
            text += f"\n[bold]fix:[/] {escape(finding.fix)}"
        style = _STYLES[finding.status]
        table.add_row(escape(finding.part), f"[{style}]{finding.status}[/]", text)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLES}
    console.print(
        f"{counts['ok']} ok, {_count(counts['warning'], 'warning')}, {_count(counts['error'], 'error')}",
        highlight=False,
    )


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def write_json(findings: Sequence[Finding], memory: dict[str, Any], path: Path) -> None:
    """``{version, passed, findings: [{part, status, detail, fix}], memory: {gpus: {rank: {part: GiB}}, host_gib}}``."""
    content = {
        "version": __version__,
        "passed": passed(findings),
        "findings": [vars(finding) for finding in findings],
        "memory": memory,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
