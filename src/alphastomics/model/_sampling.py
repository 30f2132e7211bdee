"""Mixin of the model class: sampling."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics import _keys
from alphastomics._provenance import result_record
from alphastomics.config import SamplingConfig
from alphastomics.config._setting import split_arguments
from alphastomics.data import AnnDataSource
from alphastomics.model._base import ModelBase
from alphastomics.sampling._cells import cell_order
from alphastomics.sampling._confidence import check_min_confidence, fit_confidence_cells
from alphastomics.sampling._draws import check_mode
from alphastomics.sampling._expression_draws import read_slices, sample_expression
from alphastomics.sampling._joint import sample_tissue
from alphastomics.sampling._position_draws import add_positions, sample_positions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import Reduction, SampledMode, SamplerName
    from alphastomics.sampling._placed import Placed


class SamplingMixin(ModelBase):
    """Samples positions, expression, or both."""

    def sample(
        self,
        adata: AnnData | None = None,
        mode: SampledMode = SamplingConfig.mode,
        n_steps: int = SamplingConfig.n_steps,
        n_samples: int = SamplingConfig.n_samples,
        reduce: Reduction | None = SamplingConfig.reduce,
        inpaint: bool = SamplingConfig.inpaint,
        n_cells: int | None = SamplingConfig.n_cells,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        batch_size: int | None = SamplingConfig.batch_size,
        random_state: int = SamplingConfig.random_state,
        sampler: SamplerName = SamplingConfig.sampler,
        eta: float = SamplingConfig.eta,
        refine: bool | None = SamplingConfig.refine,
        independent: bool = SamplingConfig.independent,
        min_confidence: float = SamplingConfig.min_confidence,
        key_added: str = SamplingConfig.key_added,
    ) -> AnnData:
        """Sample one modality given the other, or both.

        Parameters
        ----------
        adata
            Query; the reference when None. It is not modified. Not for ``mode="joint"``, which has no query.
        mode
            What is sampled. ``"expr_to_pos"``: positions given expression. ``"pos_to_expr"``: expression given positions.
            ``"joint"``: new slices. Each is drawn from the stored cells of a random reference slice: their positions are
            moved by about one spacing, and expression is sampled from their noised expression. Values of the sampled modality
            in the query are read only with ``inpaint``.
        n_steps
            Number of calls of the denoiser per draw of expression. 1 gives the conditional mean, which is not a sample; all
            draws are then the same. Not for ``mode="expr_to_pos"``, which has no reverse process.
        n_samples
            Number of draws of each slice. For ``mode="expr_to_pos"`` 1 gives the placement: the conditional mean with the
            distances between neighbors of a tissue. It is not random. The expected squared error of the mean alone is smallest.
        reduce
            How several draws are reduced. None: all draws are returned. ``"medoid"``: the draw nearest to all others, for
            positions in each slice. ``"mean"``: the conditional mean; for positions with overlapping cells, for expression on
            the scale of the transform and averaged over ``n_samples`` views of the slice. Both add an uncertainty of
            positions; ``"mean"`` adds a standard deviation of expression. These are NaN for a single draw. Not for
            ``mode="joint"``, because draws have different cells.
        inpaint
            Whether to read values of the sampled modality in the query: observed values are kept exactly, NaN is sampled. A
            position is observed if none of its coordinates is NaN. Expression is observed value by value, and genes that the
            query lacks are sampled. Not for ``mode="joint"``.
        n_cells
            Number of cells of a new slice; required for ``mode="joint"``, invalid for other modes.
        indices
            Rows of the query to use; all when None. Not for ``mode="joint"``.
        batch_size
            Largest number of cells that attend to each other, by default 8,192 when positions are sampled and 32,768 otherwise. Larger
            slices are split into overlapping contexts, which are aligned and merged, for expression at every step.
        random_state
            Seed of all draws.
        sampler, eta
            Reverse step of expression, see :mod:`alphastomics.diffusion.samplers`; ``"dpm++2m"`` needs the fewest steps.
            ``eta`` applies to ``sampler="ddim"``. Not for ``mode="expr_to_pos"``.
        refine
            For positions: whether to move cells towards cells that are similar in the neighborhood embedding. More neighbors
            are then correct, and fewer cells lie between two possible positions. None: for counts, log-normalized and binary values
            only. Draws are always refined.
        independent
            For positions: whether each cell is placed by itself, at the position of the reference cell around which the reference
            resembles it most (the mode of its posterior), instead of all cells as one tissue. For dissociated cells, of which
            there may be more or fewer than a tissue has, and whose kinds may occur throughout it. Several cells may have the
            same position. A shift of each gene from the reference, as between techniques, is removed before. Draws do not
            change, and ``reduce="mean"`` returns these positions.
        min_confidence
            For positions: smallest confidence of a cell, between 0 and 1. The positions of other cells are NaN, except known
            ones; 0.05 leaves out about 5 % of the cells of a query that does not differ from the reference.
        key_added
            For positions: key of ``obsm`` and ``uns`` for the results, and prefix of the columns of ``obs``.

        Returns
        -------
        A new AnnData
            Positions are in units of the reference. Several draws (``n_samples > 1`` without ``reduce``) are concatenated; the
            number of the draw is in ``obs["draw"]`` and at the end of the names of cells. ``uns[key_added]`` for positions, else
            ``uns["alphastomics"]``, has the provenance, see :func:`~alphastomics.tl.provenance`.
        ``mode="expr_to_pos"``
            A copy of the query with positions in ``obsm[key_added]``, of shape (n_cells, n_dims). Their frame is that of the first
            reference slice; with ``frame="shared"`` the shared frame; with ``inpaint`` that of the observed cells, in slices that have
            some. Cells of one slice (``obs[slice_key]``) are placed together; without that column all cells are one slice. Draws are aligned to their medoid unless the frame is
            shared or given by observed cells. Each draw uses a random share of the genes with random offsets, and positions of
            similar reference cells. With ``reduce``, ``obs[key_added + "_uncertainty"]``, in units of the positions: root mean
            square distance of the true from the returned position, estimated by the median distance of aligned draws. It is
            0 for observed positions. ``obs[key_added + "_confidence"]``, between 0 and 1, is small for cells that match nothing in
            the reference: the share of reference cells, held out of the comparison, that match it no better. It is 1 for observed
            positions, and NaN if the reference has fewer than 50 cells. With ``inpaint``, ``obs[key_added + "_placed"]`` is False
            for observed positions. If cells of a slice have the same expression, which of them lies where is drawn with
            ``random_state``, and ``obs[key_added + "_tied"]`` is True for them.
        ``mode="pos_to_expr"``
            ``obs``, ``obsm`` and ``uns`` of the query, ``var`` of the reference (only gene names for a model without
            data), and expression in ``X``, of shape (n_cells, n_genes), in units of the reference; also in ``layers`` if the
            reference has it there. CSR with ``transform="log1p"``, dense with ``"none"``. With ``reduce="mean"``,
            ``layers["sd"]``: standard deviation of the draws in units of ``X``, estimated from all cells of a slice together;
            NaN with ``n_samples=1``, 0 for observed values, and 0 everywhere with ``n_steps=1``, which has no noise. With
            ``"log1p"``, ``obs["library_size"]``: total counts of a cell, estimated from its observed genes with ``inpaint``,
            else the median of the reference. With ``frame="slice"``, a slice that overlaps with the first reference slice is
            assumed to be registered to it, and any other slice is centered on it; if at least 20 cells are completely
            observed, the slice is rotated if they then fit clearly better.
        ``mode="joint"``
            ``n_cells`` cells for each draw, named ``cell_0`` and so on; ``X``, ``var`` and ``obs["library_size"]`` as above, at
            the median library size of the reference; positions in ``obsm[position_key]``, of shape (n_cells, n_dims), in the
            frame of the first reference slice or in the shared frame; ``obs[slice_key]``, or ``obs["slice_id"]`` if the
            reference has no slices: ``"sample_0"`` for the first draw, and so on. ``obs[sequence_key]``, if the network reads an
            order of the cells: that of the reference cells, from 0.

        Raises
        ------
        RuntimeError
            If the model is not trained.
        KeyError
            If the query lacks a modality that is read: for ``mode="expr_to_pos"`` expression, in ``X`` or the layer of the
            reference; for ``mode="pos_to_expr"`` ``obsm[position_key]``, and ``obs[slice_key]`` if the reference has it; with
            ``inpaint`` both.
        ValueError
            If the model was not trained for ``mode``; if an argument is out of range or has no effect with the others; if the
            query has no cells, invalid values, or fewer than half of the genes; if a cell has no position for
            ``mode="pos_to_expr"``, or no slice where positions are read; if ``min_confidence`` is set and there is no
            confidence; if there is no query and the model was loaded without data.

        Notes
        -----
        If the uncertainty is calibrated, the distance of the true position is with a probability of 80 % less than 1.27 times
        the uncertainty in two dimensions and 1.24 times in three, and the difference between true expression
        and ``X`` with ``reduce="mean"`` less than 1.28 times ``layers["sd"]``. For counts, which are skewed, the probability is
        higher. See ``docs/theory.md``.

        Examples
        --------
        >>> placed = model.sample(query)  # placed.obsm["spatial_reconstructed"]
        >>> several = model.sample(query, n_samples=8, reduce="medoid")  # with an uncertainty of each cell
        >>> expression = model.sample(located, mode="pos_to_expr", n_samples=4, reduce="mean")  # X and layers["sd"]
        >>> new_slice = model.sample(mode="joint", n_cells=2000)
        """
        parameters = {name: value for name, value in locals().items() if name not in ("self", "indices")}
        trained = self._make_sampler()
        config = SamplingConfig(**split_arguments(parameters, SamplingConfig)[0][0])
        check_mode(mode, self.mode)
        if mode == "joint":
            for name, value in {"adata": adata, "indices": indices}.items():
                if value is not None:
                    raise ValueError(f"mode='joint' samples new cells and reads no query; leave {name} out")
            result = sample_tissue(self._with_expression(trained), self._reference_genes(), config)
        else:
            query = self._read_query(adata, indices)
            if indices is not None:
                parameters["indices"] = f"{query.n_obs} rows"
            if mode == "pos_to_expr":
                slices = read_slices(trained, query, inpaint=config.inpaint)  # an invalid query must not cost a fit
                result = sample_expression(
                    self._with_expression(trained), query, slices, self._reference_genes(), config
                )
            else:
                placed = sample_positions(trained, query, config)
                reduced, slice_key = config.reduce is not None, self.schema.slice_key
                result = add_positions(query, placed, key_added, reduced=reduced, slice_key=slice_key)
        key = key_added if mode == "expr_to_pos" else _keys.PROVENANCE
        result.uns[key] = result_record(self, "sample", parameters)
        return result

    def _place(self, query: AnnData, config: SamplingConfig) -> Placed:
        """The placement of :meth:`sample`, with the uncertainty from several samples, without a copy of the query."""
        trained = self._make_sampler()
        check_mode(config.mode, self.mode)
        return sample_positions(trained, self._read_query(query), config, separate=True)

    def _check_query(self, query: AnnData, config: SamplingConfig) -> None:
        """Raise the errors of :meth:`sample` for positions of a query, before the model is trained."""
        check_mode(config.mode, self.mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # sample() warns
            source = AnnDataSource(self._read_query(query), self.schema, positions=config.inpaint)
        cell_order(self.module, source, np.arange(source.n_cells))
        if config.min_confidence:
            check_min_confidence(config.min_confidence, fit_confidence_cells(self._training_source()))

    def _reference_genes(self) -> pd.DataFrame:
        """``var`` of the reference, or only its gene names for a model without data."""
        genes = list(self.schema.genes)
        return pd.DataFrame(index=pd.Index(genes)) if self.adata is None else self.adata.var.loc[genes].copy()
