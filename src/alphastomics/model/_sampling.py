"""The part of the model class that samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from alphastomics import _keys
from alphastomics._provenance import result_record
from alphastomics.model._base import ModelBase
from alphastomics.sampling._draws import DrawConfig, check_arguments, check_mode
from alphastomics.sampling._expression import sample_expression
from alphastomics.sampling._joint import sample_tissue
from alphastomics.sampling._position import check_query, sample_positions
from alphastomics.sampling._sampler import SamplerConfig, max_context
from alphastomics.train.defaults import default_placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.diffusion import Mode


class SamplingMixin(ModelBase):
    """Samples positions, expression, or both."""

    def default_placement(self) -> dict[str, Any]:
        """Arguments of :meth:`sample` with which :func:`~alphastomics.tl.reconstruct` takes the conditional mean."""
        return default_placement(self.schema, self.summary_stats.n_cells)

    def sample(
        self,
        adata: AnnData | None = None,
        mode: Mode = "expr_to_pos",
        n_steps: int = 30,
        n_samples: int = 1,
        reduce: Literal["medoid", "mean"] | None = None,
        inpaint: bool = False,
        n_cells: int | None = None,
        indices: Sequence[int] | NDArray[np.int64] | None = None,
        batch_size: int | None = None,
        random_state: int = 0,
        sampler: Literal["ddpm", "ddim", "dpm++2m"] | None = None,
        eta: float = 0.0,
        n_views: int = 1,
        refine: bool = False,
    ) -> AnnData:
        """Sample one modality given the other, or both.

        Parameters
        ----------
        adata
            Query; the reference when None. It is not modified. Not for ``mode="joint"``, which reads none.
        mode
            What is sampled. ``"expr_to_pos"``: positions from expression. ``"pos_to_expr"``: expression at positions.
            ``"joint"``: new slices, each in the outline of a reference slice drawn at random. The query's own values of
            what is sampled are never read unless ``inpaint``.
        n_steps
            Number of calls of the denoiser per draw. 1 gives the conditional mean, which is not a sample; all draws of
            expression are then the same.
        n_samples
            Number of draws of each slice.
        reduce
            How several draws are reduced. None: all of them are returned. ``"medoid"``: the draw nearest to all others, for
            positions slice by slice. ``"mean"``: their mean; for positions after alignment, each draw from a random half of
            the genes; for expression the conditional mean on the scale of the stored transform, without the noise of the
            draws and averaged over ``n_samples`` views of the slice. With both, positions have an uncertainty, for which
            ``"medoid"`` makes as many draws again; ``"mean"`` of expression has a standard deviation. They are NaN for a
            single draw. Not for ``mode="joint"``, where two draws have different cells.
        inpaint
            Read the query's own values of what is sampled: known ones are kept exactly, NaN is sampled. A position is
            known if all its coordinates are; expression is known value by value, and genes that the query lacks are
            sampled. Not for ``mode="joint"``.
        n_cells
            Number of cells of a new slice; required for ``mode="joint"``, and only for it.
        indices
            Rows of the query to use; all when None. Not for ``mode="joint"``.
        batch_size
            Largest number of cells that attend to each other; larger slices are split into overlapping contexts that
            are fused at every step.
        random_state
            Seed of all draws.
        sampler, eta
            Reverse step, see :mod:`alphastomics.diffusion.samplers`. None takes ``"dpm++2m"``, which needs the fewest
            steps, and with known positions ``"ddpm"``, whose fresh noise lets the other cells move away from positions that
            disagree with them. ``eta`` is for ``sampler="ddim"``.
        n_views
            For positions: number of random views (subsets of genes and of cells) over which the conditional mean, with
            which sampling starts, is averaged. Not for ``reduce="mean"`` of several draws.
        refine
            For positions: move the cells of the conditional mean towards those that resemble them in the neighborhood
            embedding. More neighbors are correct, and fewer cells lie between two possible positions.

        Returns
        -------
        A new AnnData
            Positions are in units of the reference. Several draws (``n_samples > 1`` without ``reduce``) come one after the
            other, numbered in ``obs["draw"]`` and at the end of the names of the cells. ``uns["alphastomics"]``: its
            provenance, see :func:`~alphastomics.tl.provenance`.
        ``mode="expr_to_pos"``
            The query's ``X``, ``obs`` and ``var``, not its layers; and, of shape (n_cells, n_dims), ``obsm[position_key]``:
            in the frame of the first reference slice; in the shared frame for ``frame="shared"``; in the frame of its known
            cells for a slice of which ``inpaint`` knows some. Cells of one slice (``obs[slice_key]``) are placed together;
            without that column all cells are one set. Draws in a free frame are aligned to their medoid. With ``reduce``,
            ``obs["position_uncertainty"]``: root mean square distance, in units of the positions, of aligned draws that each
            see a random half of the genes from the position that is returned; of their mean that is their standard deviation
            over all dimensions together. 0 for known positions.
        ``mode="pos_to_expr"``
            The query's ``obs`` and ``obsm[position_key]``, the ``var`` of the reference (its gene names alone for a model
            without data) and, of shape (n_cells, n_genes), ``X`` in units of the reference, also in ``layers`` if the reference
            has its expression there; CSR under ``transform="log1p"``, dense under ``"none"``. With ``reduce="mean"``,
            ``layers["sd"]``: standard deviation of the draws in the units of ``X``, estimated from all cells of a slice
            together; NaN with ``n_samples=1``, 0 for known values, and 0 everywhere with
            ``n_steps=1``, which draws no noise. Under ``"log1p"`` ``obs["library_size"]``: the total
            counts of a cell, estimated from its known genes with ``inpaint``, else the median of the reference. Under
            ``frame="slice"`` a slice that overlaps with the first reference slice is taken as registered to it, and any
            other is centered on it; at least 20 completely known cells rotate the slice if they clearly fit better
            then.
        ``mode="joint"``
            ``n_cells`` cells for each draw, named ``cell_0`` and so on; ``X``, ``var`` and ``obs["library_size"]`` as above, at
            the median library size of the reference; ``obsm[position_key]``, (n_cells, n_dims), in the frame of the first
            reference slice, or in the shared one; ``obs[slice_key]``, or ``obs["slice_id"]`` if the reference has none:
            ``"sample_0"`` for the first draw, and so on.

        Raises
        ------
        RuntimeError
            If the model is not trained.
        KeyError
            If the query lacks what is read: for ``mode="expr_to_pos"`` expression, in ``X`` or the layer of the reference; for
            ``mode="pos_to_expr"`` ``obsm[position_key]``, and ``obs[slice_key]`` if the reference has it; with ``inpaint``
            both.
        ValueError
            If the model was not trained for ``mode``; if an argument is out of range or has no effect with the others; if the
            query has no cells, invalid values, or fewer than half of the genes; if a cell has no position for
            ``mode="pos_to_expr"``, or no slice where positions are read; if there is no query and the model was loaded
            without data.

        Notes
        -----
        If the uncertainty is calibrated, the true position lies with a probability of 80 % within 1.27 times
        ``obs["position_uncertainty"]`` in two dimensions and within 1.24 times in three, and the true expression within 1.28
        times ``layers["sd"]`` of ``X`` with ``reduce="mean"``; for counts, which are skewed, the probability is higher. See
        ``docs/theory.md``.
        """
        parameters = {name: value for name, value in locals().items() if name not in ("self", "indices")}
        trained = self._make_sampler()
        check_mode(mode, self.mode)
        config = SamplerConfig(
            n_steps=n_steps,
            sampler=sampler,
            eta=eta,
            max_context=max_context(batch_size),
            n_views=n_views,
            refine=refine,
        )
        draws = DrawConfig(n_samples=n_samples, reduce=reduce, random_state=random_state)
        check_arguments(
            mode,
            config,
            draws,
            inpaint=inpaint,
            n_cells=n_cells,
            queried=adata is not None,
            selected=indices is not None,
        )
        if mode == "joint":
            assert n_cells is not None  # checked above
            result = sample_tissue(trained, self._reference_genes(), n_cells, config, draws)
        else:
            query = self._read_query(adata, indices)
            if indices is not None:
                parameters["indices"] = f"{query.n_obs} rows"
            if mode == "pos_to_expr":
                genes = self._reference_genes()
                result = sample_expression(trained, query, genes, config, draws, inpaint=inpaint)
            else:
                result = sample_positions(trained, query, config, draws, inpaint=inpaint)
        result.uns[_keys.PROVENANCE] = result_record(self, "sample", parameters)
        return result

    def _check_query(self, query: AnnData, *, n_samples: int, n_steps: int, inpaint: bool, **sampler: Any) -> None:
        """Raise the errors of :meth:`sample` with ``mode="expr_to_pos"``, before the model is trained for the query."""
        config = SamplerConfig(n_steps=n_steps, **sampler)
        check_query(self.schema, self.mode, query, config, DrawConfig(n_samples=n_samples), inpaint=inpaint)

    def _reference_genes(self) -> pd.DataFrame:
        """``var`` of the reference, or its gene names without data."""
        genes = list(self.schema.genes)
        return pd.DataFrame(index=pd.Index(genes)) if self.adata is None else self.adata.var.loc[genes].copy()
