"""What tests of files share: files with slices, the content of a folder, a trap for unpickling, the line of an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from pathlib import Path

    import pytest
    from anndata import AnnData


def write_slices(tissue: AnnData, folder: Path, *, lacking: Container[str] = (), n_genes: int = 4) -> Path:
    """A file for each slice, in those of ``lacking`` without the first genes."""
    folder.mkdir(exist_ok=True)
    for name, rows in tissue.obs.groupby("slice_id", observed=True).indices.items():
        cells = tissue[rows]
        (cells[:, n_genes:] if name in lacking else cells).copy().write_h5ad(folder / f"{name}.h5ad")
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their relative paths."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last line on stderr, with the error."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert "Exception ignored" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("alphastomics: ")]
    assert text.endswith(line + "\n")
    return line


def stop_after(n: int) -> Callable[..., Iterator[Any]]:
    """A ``map`` that is interrupted after some tasks."""

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        for i, task in enumerate(tasks):
            if i == n:
                raise KeyboardInterrupt
            yield function(task)

    return run


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")
