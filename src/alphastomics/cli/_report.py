"""A result as one HTML file without references to other files: figure, scores, and how it was made."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING, Any

import pandas as pd

from alphastomics._io._atomic import write_text
from alphastomics.cli._output import number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; color: #222; }}
img {{ max-width: 100%; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child {{ text-align: left; font-weight: normal; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_report(
    path: Path,
    title: str,
    *,
    text: str,
    figure: Path,
    scores: pd.DataFrame,
    record: Mapping[str, Any],
    files: Mapping[str, str],
) -> None:
    """Write a report.

    Parameters
    ----------
    path
        The file, replaced atomically.
    title, text
        Heading, and a paragraph on what was done.
    figure
        A PNG file, which the report contains.
    scores
        A row of scores for each method.
    record
        Provenance of the result, see :func:`alphastomics.tl.provenance`.
    files
        Content of the files beside the report, by name.
    """
    image = b64encode(figure.read_bytes()).decode()
    parts = [
        f"<p>{escape(text)}</p>",
        f'<img alt="Positions of the cells" src="data:image/png;base64,{image}">',
        "<h2>Scores</h2>",
        _table(scores.T),
        *_held_out(record.get("training", {}).get("held_out", {})),
        "<h2>Files</h2>",
        _table(pd.DataFrame({"content": files})),
        "<h2>Versions</h2>",
        _table(pd.DataFrame({"version": record["versions"]})),
    ]
    write_text(path, PAGE.format(title=escape(title), body="\n".join(parts)))


def _held_out(scores: Mapping[str, float]) -> list[str]:
    if not scores:
        return []
    return [
        "<h2>Held-out cells of the reference</h2>",
        _table(pd.DataFrame({"value": scores})),
    ]


def _table(table: pd.DataFrame) -> str:
    return table.rename_axis(columns=None, index=None).to_html(float_format=number, border=0)
