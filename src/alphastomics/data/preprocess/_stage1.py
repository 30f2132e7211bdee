"""Stage 1: each slice is written to a separate file, cells along a Hilbert curve, genes in the common order.

A slice of an earlier run with the same source and parameters is kept. Values are stored untransformed; library size and
moments, which depend on all slices, are computed by stage 2.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from alphastomics._io._atomic import write_json
from alphastomics.data._checks import MIN_CELLS
from alphastomics.data._matrix import column_sums, row_sums
from alphastomics.data._order import hilbert_order
from alphastomics.data._values import Evidence
from alphastomics.data.parquet._columns import N_AXES, Cells
from alphastomics.data.preprocess._h5ad import RawTissue
from alphastomics.data.preprocess._records import SliceTask, read_record, truncate
from alphastomics.data.preprocess._slice import BATCH, SUFFIX, writing_slice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.config import Stage1Options
    from alphastomics.data.preprocess._h5ad import RawSlice

logger = logging.getLogger(__name__)

MAX_VALUES = 2**25  # values of a slice in memory; a larger slice is read in several passes
DIGITS = re.compile("([0-9]+)")


def find_tissues(input_dir: Path) -> list[Path]:
    """The ``.h5ad`` files of a folder, without hidden ones, sorted by name; raises FileNotFoundError if there are none."""
    found = sorted(path for path in input_dir.glob("*.h5ad") if not path.name.startswith("."))
    if not found:
        raise FileNotFoundError(f"{input_dir} has no .h5ad file; correct input_dir=…")
    return found


def plan_slices(input_dir: Path, output_dir: Path, options: Stage1Options) -> list[SliceTask]:
    """Collect genes, slices and the files to write; only names and positions are read."""
    raw, genes = [], dict.fromkeys(options.genes or ())
    n_axes: dict[int, Path] = {}
    unknown = set(genes)
    for path in find_tissues(input_dir):
        with RawTissue.open(path, options) as tissue:
            raw += tissue.slices(options)
            n_axes.setdefault(tissue.n_axes, path)
            unknown -= set(tissue.genes)
            if options.genes is None:
                genes.update(dict.fromkeys(tissue.genes))
            elif not set(tissue.genes) & set(genes):
                raise ValueError(f"{path} has no gene of the list of genes; use the same gene identifiers")
    _check_axes(n_axes, options)
    if unknown:
        listed = ", ".join(repr(gene) for gene in genes if gene in unknown)
        raise ValueError(
            f"no file in {input_dir} has these genes of the list: {truncate(listed)}; correct the list of genes"
        )
    raw.sort(key=lambda each: natural_order(each.name))
    _check_slices(raw)
    if options.z_spacing:
        heights = ", ".join(f"{each.name} at {i * options.z_spacing:g}" for i, each in enumerate(raw))
        logger.info("Sections are sorted by the numbers in their names; their z coordinates: %s.", heights)
    resolved = replace(options, genes=tuple(genes))
    return [
        SliceTask(number=i, raw=each, target=output_dir / f"{i:05d}", options=resolved) for i, each in enumerate(raw)
    ]


def _check_slices(raw: Sequence[RawSlice]) -> None:
    for one, other in zip(raw, raw[1:], strict=False):
        if one.name == other.name:
            raise ValueError(
                f"slice {one.name!r} is in {one.path.name} and in {other.path.name}; rename one, or pass slice_key=…"
            )
    for each in raw:
        if len(each.rows) < MIN_CELLS:
            raise ValueError(
                f"{each.path}: slice {each.name!r} has {len(each.rows)} cells, fewer than {MIN_CELLS}; remove it"
            )


def natural_order(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    """Key that sorts names by the numbers in them: ``section_2`` before ``section_10``."""
    parts = DIGITS.split(name)  # text, digits, text, …
    numbers = [part.lstrip("0") for part in parts[1::2]]
    key: list[str | tuple[int, str]] = list(parts)
    key[1::2] = [(len(number), number) for number in numbers]
    return tuple(key), name


def _check_axes(n_axes: dict[int, Path], options: Stage1Options) -> None:
    if len(n_axes) > 1:
        (one, path), (other, differing), *_ = n_axes.items()
        raise ValueError(
            f'obsm["{options.position_key}"] has {one} coordinates in {path} and {other} in {differing}; use the same number in all files'
        )
    if set(n_axes) == {3} and not options.position_is_3d:
        logger.warning(
            'obsm["%s"] has three coordinates, and the third is ignored; pass --position-is-3d to use it.',
            options.position_key,
        )


def write_slice(task: SliceTask) -> dict[str, Any]:
    """Write a slice and its record, unless both exist; return the record."""
    path, parameters = task.target.with_suffix(".json"), task.parameters
    if path.is_file() and task.target.with_suffix(SUFFIX).is_file():
        record = read_record(path)
        if record["parameters"] == parameters:
            return record
    path.unlink(missing_ok=True)  # this file marks a finished slice
    with RawTissue.open(task.raw.path, task.options) as tissue:
        record = {"slice": task.raw.name, "animal": task.raw.animal, "parameters": parameters} | _write(task, tissue)
    write_json(path, record, unique=True)
    return record


def _write(task: SliceTask, tissue: RawTissue) -> dict[str, Any]:
    assert task.options.genes is not None  # set by plan_slices
    rows, n_genes = task.raw.rows, len(task.options.genes)
    column = pd.Index(task.options.genes).get_indexer(pd.Index(tissue.genes))
    measured = np.zeros(n_genes, dtype=bool)
    measured[column[column >= 0]] = True
    order = rows[hilbert_order(tissue.position[rows])]
    totals, n_values, cell_types = np.zeros(n_genes), 0, set[str]()
    evidence = Evidence(len(rows) * int(measured.sum()))
    with writing_slice(task.target.with_suffix(SUFFIX), n_genes) as file:
        for chosen in tissue.passes(order, max_values=MAX_VALUES, multiple=BATCH):
            x, row = _read(task, tissue, chosen, column)
            evidence.add(x.data)
            n_values += x.nnz
            for start in range(0, len(chosen), BATCH):
                cells = _cells(task, tissue, chosen[start : start + BATCH], x[row[start : start + BATCH]])
                totals += column_sums(cells.expression)
                cell_types.update(label for label in cells.labels if label is not None)
                file.write(cells)
    return {
        "n_cells": len(rows),
        "n_values": n_values,
        "evidence": asdict(evidence),
        "totals": totals.tolist(),
        "labels": sorted(cell_types),
        "unmeasured": [gene for gene, is_measured in zip(task.options.genes, measured, strict=True) if not is_measured],
        "checksums": file.checksums,
    }


def _read(
    task: SliceTask, tissue: RawTissue, rows: NDArray[np.int64], column: NDArray[np.integer]
) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
    """Expression of cells in the order of the file, and the number of the row of each of ``rows`` in it."""
    assert task.options.genes is not None
    ascending, n_genes = np.sort(rows), len(task.options.genes)
    # Chunks are written into the arrays of the result to save a second copy.
    data = np.empty(tissue.n_values(rows), dtype=np.float32)
    columns, lengths, end = np.empty(len(data), dtype=np.int32), [], 0
    for here, block in tissue.expression(ascending):
        part = _aligned(block, column, n_genes)
        _check(part, task, tissue, here)
        data[end : end + part.nnz], columns[end : end + part.nnz] = part.data, part.indices
        lengths.append(np.diff(part.indptr))
        end += part.nnz
    ends = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    x = sp.csr_matrix((data[:end], columns[:end], ends), shape=(len(rows), n_genes), copy=False)
    return x, np.searchsorted(ascending, rows)


def _cells(task: SliceTask, tissue: RawTissue, rows: NDArray[np.int64], x: sp.csr_matrix) -> Cells:
    position = np.full((len(rows), N_AXES), task.number * task.options.z_spacing)
    position[:, : tissue.position.shape[1]] = tissue.position[rows]
    labels = tissue.labels(task.options.cell_type_key, rows)
    return Cells(tissue.names(rows), task.raw.name, labels, row_sums(x), position, x)


def _aligned(block: sp.csr_matrix, column: NDArray[np.integer], n_genes: int) -> sp.csr_matrix:
    """Reorder the genes of a block to the common order; other genes are removed."""
    if len(column) == n_genes and np.array_equal(column, np.arange(n_genes)):
        return block
    known = column[block.indices] >= 0
    ends = np.concatenate([[0], np.cumsum(known)])[block.indptr]
    parts = (block.data[known], column[block.indices[known]].astype(np.int32), ends)
    result = sp.csr_matrix(parts, shape=(block.shape[0], n_genes), copy=False)
    result.sort_indices()
    return result


def _check(block: sp.csr_matrix, task: SliceTask, tissue: RawTissue, rows: NDArray[np.int64]) -> None:
    """Raise an error for values that are not finite, or for negative counts."""
    bad = ~np.isfinite(block.data)
    what, remedy = "NaN or infinite", "remove these cells or genes, or replace the values"
    if task.options.log_normalize and not bad.any():
        bad = block.data < 0
        what, remedy = "negative", "pass the layer of raw counts, or --skip-log-normalize"
    if bad.any():
        first = int(np.argmax(bad))
        cell = tissue.names(rows)[int(np.searchsorted(block.indptr, first, side="right")) - 1]
        assert task.options.genes is not None
        gene = task.options.genes[block.indices[first]]
        raise ValueError(f"{task.raw.path}: expression is {what}, first for gene {gene!r} in cell {cell!r}; {remedy}")
