"""Which cells are for training, validation and testing."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data.preprocess._options import Stage2Options


def split_slices(
    names: Sequence[str], sizes: Sequence[int], animals: Sequence[str | None], options: Stage2Options
) -> list[NDArray[np.uint8]]:
    """Number of the split (0 training, 1 validation, 2 test) of every cell of every slice.

    Parameters
    ----------
    names, sizes, animals
        Of the slices, sorted by name.
    options
        What stays together, the shares and the seed.

    Raises
    ------
    ValueError
        If animals are to stay together and are not named.
    """
    if options.split == "cell":
        return _split_cells(names, sizes, options)
    if options.split == "slice":
        units = list(names)
    else:
        check_animals(names, animals, options)
        units = [str(animal) for animal in animals]
    kinds = sorted(set(units))
    order = np.random.default_rng(options.seed).permutation(len(kinds))
    code = dict(zip((kinds[i] for i in order), _cut(len(kinds), options).tolist(), strict=True))
    return [np.full(size, code[unit], dtype=np.uint8) for unit, size in zip(units, sizes, strict=True)]


def check_animals(names: Sequence[str], animals: Sequence[str | None], options: Stage2Options) -> None:
    """Refuse to keep animals together that are not named.

    Raises
    ------
    ValueError
        If one is not; the message names its slice.
    """
    unknown = [name for name, animal in zip(names, animals, strict=True) if animal is None]
    if options.split == "animal" and unknown:
        raise ValueError(
            f"split='animal' needs the animal of every slice, and that of {unknown[0]!r} is not known; pass animal_key=…"
        )


def _cut(n: int, options: Stage2Options) -> NDArray[np.uint8]:
    """Splits of n units in random order: the shares, rounded, but none that was asked for stays empty if that can be."""
    ends = np.round(np.cumsum([options.train_ratio, options.val_ratio]) * n).astype(int)
    has_validation = int(options.val_ratio > 0)
    has_test = int(options.train_ratio + options.val_ratio < 1 - 1e-9)
    train = max(1, min(ends[0], n - has_validation - has_test))
    known = max(train, min(max(ends[1], train + has_validation), n - has_test))
    return np.repeat(np.arange(3, dtype=np.uint8), [train, known - train, n - known])


def _split_cells(names: Sequence[str], sizes: Sequence[int], options: Stage2Options) -> list[NDArray[np.uint8]]:
    """Shares of every slice, whose roundings make up for each other."""
    total, codes = np.concatenate([[0], np.cumsum(sizes)]), []
    shares = np.array([options.train_ratio, options.train_ratio + options.val_ratio, 1.0])
    ends = np.round(np.outer(total, shares)).astype(np.int64)
    ends[:, 2] = total
    for name, size, before, after in zip(names, sizes, ends[:-1], ends[1:], strict=True):
        # What a slice adds to the ends of training, validation and test.
        train = int(after[0] - before[0])
        validation = int(after[1] - before[1]) - train
        code = np.repeat(np.arange(3, dtype=np.uint8), [train, validation, size - train - validation])
        rng = np.random.default_rng([options.seed, zlib.crc32(name.encode())])
        codes.append(rng.permutation(code))
    return codes
