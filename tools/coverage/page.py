"""The page of the coverage report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import diffusers

from .measure import TOLERANCE, Row

_HEAD = r"""# Which pipelines are batched

Made by `make coverage-report`; do not edit. Every class below was built with tiny random weights, and four different
requests (prompts, seeds, steps, guidance, pictures) were run alone on the bare pipeline and together through the
engine, in float32 on a CPU. **batched**: all denoiser calls could share forwards. **in part**: some could. **solo**:
none; the reason is given, and the outputs are right all the same. *difference*: largest difference of an output
together from alone, relative to the larger of 1 and its largest value; where a pipeline rounds its output to bytes
itself (marked \*), one level, 3.9e-3, is as good as none. *rows*: mean rows of a forward.
"""


def write_page(path: Path, rows: list[Row]) -> None:
    """Write the table as Markdown."""
    verdicts = Counter(row.verdict for row in rows)
    right = sum(row.is_right for row in rows)
    batched = sum(row.verdict == "batched" and row.is_right for row in rows)
    lines = [
        _HEAD,
        f"diffusers {diffusers.__version__}: **{len(rows)} classes, {batched} batched** "
        f"({', '.join(f'{n} {verdict}' for verdict, n in verdicts.most_common())}); "
        f"{right} of {len(rows)} equal running alone within {TOLERANCE:.0e}.",
        "",
        "| class | kind | verdict | difference | rows | reason |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        reason = row.reason.replace("|", "\\|")
        mark = r" \*" if row.in_bytes else ""
        cells = (row.pipeline, row.kind, row.verdict, f"{row.difference:.1e}{mark}", f"{row.rows:.1f}", reason)
        lines.append(f"| {' | '.join(cells)} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
