"""The model class: arguments, registration of a reference, and models of datasets on disk."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import rich.pretty  # noqa: F401  scvi-tools uses rich.pretty without importing it
from scvi import settings
from scvi.data import AnnDataManager

from alphastomics._checks import check_seed
from alphastomics._messages import hide_others
from alphastomics.config import DiffusionSettings, ModelConfig, NetworkConfig, SetupConfig, SourceConfig
from alphastomics.config._setting import check_names, settings_of, split_arguments
from alphastomics.data import fit_schema
from alphastomics.data._checks import check_key, check_type
from alphastomics.data.parquet._source import ParquetSource
from alphastomics.diffusion import Process
from alphastomics.model._adaptation import AdaptationMixin
from alphastomics.model._embedding import EmbeddingMixin
from alphastomics.model._fields import dataset_registry, read_schema, schema_fields
from alphastomics.model._persistence import PersistenceMixin
from alphastomics.model._sampling import SamplingMixin
from alphastomics.model._training import TrainingMixin
from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.sampling import FittedStatistics
from alphastomics.train.defaults import advised_attention, advised_experts, default_dropout
from alphastomics.train.distributed.devices import seeded_generators
from alphastomics.train.memory.layout import fits_in_memory

if TYPE_CHECKING:
    from os import PathLike

    from anndata import AnnData

    from alphastomics.config import AttentionKind, Frame, Mode, PairFeatureKind, Transform

logger = logging.getLogger(__name__)


class AlphaSTomics(TrainingMixin, AdaptationMixin, SamplingMixin, EmbeddingMixin, PersistenceMixin):
    """Diffusion transformer over expression and position of the cells of a tissue.

    Parameters
    ----------
    adata
        Reference registered with :meth:`setup_anndata`.
    registry
        Registry of an earlier setup, for a model without data.
    mode
        What the model is trained to sample: ``"expr_to_pos"``, ``"pos_to_expr"``, ``"joint"``, or all of them with
        ``"any"``; see :meth:`sample`.
    d_model, n_layers, n_heads
        Width, number of blocks, and number of attention heads.
    attention
        ``"full"``: all cells of a context; ``"linear"``: a baseline whose cost is linear in the number of cells;
        ``"geometric"``: full attention that decays with distance; ``"neighbor"``: the nearest cells; ``"axial"``: the rows
        and columns of a grid.
    pair_features
        ``"factorized"``: low-rank features of pairs of cells, for geometric and neighbor attention; None: no pair features.
    use_moe, num_experts
        Whether a mixture of experts replaces the feed-forward networks, and the number of experts; see
        :func:`~alphastomics.train.advised_experts`.
    dropout
        Probability of setting an output of a branch of a block to 0 in training; None: derived from the number and kind of the reference
        cells.
    enable_masking
        Whether training masks some entries and predicts them, see :class:`~alphastomics.config.MaskingConfig`.
    use_cell_types
        Whether cell types, ``cell_type_key`` of :meth:`setup_anndata`, are an input when cells are placed. In training a random
        share of them is hidden, so that cells of a query may have none.
    context
        ``"slice"``: contexts of :meth:`train` are whole slices by default, if memory allows. ``"auto"``: the same, and
        ``attention`` and ``pair_features`` are chosen for the size of the largest slice, see
        :func:`~alphastomics.train.advised_attention`. None: contexts have 512 cells by default.
    random_state
        Seed of the initial weights and of all random numbers of training; None: ``scvi.settings.seed``, or 0 without it.
    **kwargs
        Further fields of :class:`~alphastomics.config.NetworkConfig` and :class:`~alphastomics.config.DiffusionSettings`.

    Raises
    ------
    TypeError
        If the name of an argument is unknown.
    ValueError
        If a value is not permitted, or arguments cannot be combined.

    Examples
    --------
    >>> asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    >>> model = asx.model.AlphaSTomics(reference, mode="expr_to_pos")
    >>> model.train(max_time=300)
    >>> placed = model.sample(query)  # placed.obsm["spatial_reconstructed"]
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        registry: dict[str, Any] | None = None,
        mode: Mode = ModelConfig.mode,
        d_model: int = NetworkConfig.d_model,
        n_layers: int = NetworkConfig.n_layers,
        n_heads: int = NetworkConfig.n_heads,
        attention: AttentionKind = NetworkConfig.attention,
        pair_features: PairFeatureKind | None = NetworkConfig.pair_features,
        use_moe: bool = NetworkConfig.use_moe,
        num_experts: int = NetworkConfig.num_experts,
        dropout: float | None = NetworkConfig.dropout,
        enable_masking: bool = ModelConfig.enable_masking,
        use_cell_types: bool = ModelConfig.use_cell_types,
        context: Literal["slice", "auto"] | None = ModelConfig.context,
        random_state: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_names(kwargs, NetworkConfig, DiffusionSettings)
        (network, diffusion), _ = split_arguments(locals() | kwargs, NetworkConfig, DiffusionSettings)
        ModelConfig(mode=mode, enable_masking=enable_masking, use_cell_types=use_cell_types, context=context)
        if adata is not None:
            check_type(adata)
        super().__init__(adata, registry)
        self.schema = read_schema(self.registry_)
        process = DiffusionSettings(**diffusion)
        self.diffusion = Process.of(process)
        if dropout is None:
            network["dropout"] = default_dropout(self.schema, self.summary_stats.n_cells)
        config = DenoiserConfig(
            n_genes=self.schema.n_genes,
            n_dims=self.schema.n_dims,
            sequence=self.schema.sequence_key is not None,
            mask_tokens=enable_masking,
            n_cell_types=self._n_cell_types() if use_cell_types else 0,
            **network,
        )
        if context == "auto":  # resolved here, so that a loaded model has the same network
            config = self._advised(config, mode)
            context = "slice"
        if use_moe:
            self._advise_experts(num_experts, config.moe_top_k)
        random_state = (settings.seed or 0) if random_state is None else random_state
        with seeded_generators(check_seed(random_state)):
            self.module = self._module_cls(config)
        # The scale of other values is arbitrary.
        if self.schema.transform == "log1p" or self.schema.value_kind == "log-normalized":
            self.module.weigh_genes(self.schema.gene_scale)
        self._dataset = self._validation = None
        self.fitted_ = FittedStatistics()
        self.trainings_ = ()
        arguments = {
            "mode": mode, "enable_masking": enable_masking, "use_cell_types": use_cell_types, "context": context,
            "random_state": random_state,
        }  # fmt: skip
        arguments |= {name: getattr(config, name) for name in settings_of(NetworkConfig)} | vars(process)
        self.init_params_ = {"kwargs": {}, "non_kwargs": arguments}
        self._model_summary_string = (
            f"AlphaSTomics model (mode={mode!r}): {self.schema.n_genes} genes, {self.schema.n_dims}D, "
            f"{len(self.schema.slices)} reference slices, d_model={d_model}, n_layers={n_layers}, n_heads={n_heads}, "
            f"{_describe_parameters(self.module)}"
        )

    def _advised(self, config: DenoiserConfig, mode: Mode) -> DenoiserConfig:
        """The network with the attention recommended for the largest slice and the memory of this machine."""
        for name, usual in (("attention", "full"), ("pair_features", None)):
            if getattr(config, name) != usual:
                raise ValueError(
                    f"context='auto' chooses {name}; omit {name}={getattr(config, name)!r}, or pass context='slice'"
                )
        n_cells = self.summary_stats.largest_slice
        arguments = {"mode": mode, "diffusion": self.diffusion, "shared_frame": self.schema.frame == "shared"}
        advice = advised_attention(n_cells, lambda kind: fits_in_memory(replace(config, **kind), n_cells, **arguments))
        logger.info("Slices of up to %s cells: %s.", f"{n_cells:,}", ", ".join(f"{k}={v!r}" for k, v in advice.items()))
        return replace(config, **advice)

    def _n_cell_types(self) -> int:
        """Number of cell types of the reference; raises ``ValueError`` if it has none."""
        if not self.schema.cell_types:
            raise ValueError(
                "use_cell_types=True requires cell types; name their column in obs with setup_anndata(…, cell_type_key=…)"
            )
        return len(self.schema.cell_types)

    def _advise_experts(self, num_experts: int, moe_top_k: int) -> None:
        """Log the recommended experts for the number of cells if they differ from the arguments."""
        n_cells = self.summary_stats.n_cells
        advice = advised_experts(n_cells)
        if advice != {"num_experts": num_experts, "moe_top_k": moe_top_k}:
            logger.info(
                "num_experts=%d and moe_top_k=%d; recommended for %d cells: %d and %d.",
                num_experts, moe_top_k, n_cells, advice["num_experts"], advice["moe_top_k"],
            )  # fmt: skip

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        *,
        layer: str | None = None,
        position_key: str = SetupConfig.position_key,
        slice_key: str | None = None,
        cell_type_key: str | None = None,
        frame: Frame = SetupConfig.frame,
        sequence_key: str | None = None,
        transform: Transform = SetupConfig.transform,
        **kwargs: Any,
    ) -> None:
        """Register a reference: cells with expression and positions.

        The data are checked. Expression, positions and annotations of ``adata`` are not changed; it is marked as registered in
        ``uns``.

        Parameters
        ----------
        adata
            The reference, in memory, with sparse or dense expression.
        layer
            Key of expression in ``layers``; ``X`` when None.
        position_key
            Key of positions in ``obsm``, of shape (n_cells, 2) or (n_cells, 3), in any units.
            If one of three columns is constant (with ``frame="slice"``, within each slice), cells are placed in 2D, and this
            column of the results has the value of the first slice or, in slices with known positions, that of these.
        slice_key
            Column of ``obs`` with the slice of each cell. None: ``obs["slice_id"]`` if it exists, else all cells are one
            slice; the choice is logged.
        cell_type_key
            Column of ``obs`` with cell types, if there is one. They are an input of models with ``use_cell_types=True`` only.
        frame
            ``"slice"``: each slice has its own frame, arbitrary up to rotation, reflection and translation. ``"shared"``: all
            slices are registered to one frame.
        sequence_key
            Column of ``obs`` with an index that orders the cells, if there is one, such as the number of a section or a
            residue. Neighbor attention and pair features use differences of this index.
        transform
            ``"log1p"``, for counts: scaling of the library size to the median, then log1p; ``"none"``; or ``"auto"``:
            ``"log1p"`` if and only if the values are counts: non-negative integers, not all of them 0 and 1, some of them from 1 to 9.
            The kind of the values is logged, and that of a query is compared with it.
        **kwargs
            Used by scvi-tools (``source_registry``).

        Raises
        ------
        KeyError
            If ``adata`` lacks one of the keys.
        TypeError
            If ``adata`` is no AnnData, or an argument is unknown.
        ValueError
            If values, positions or slices are invalid; the message names them.

        Examples
        --------
        >>> asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id", cell_type_key="cell_type")
        """
        setup_method_args = cls._get_setup_method_args(**locals())
        check_names({name: value for name, value in kwargs.items() if name != "source_registry"}, SetupConfig)
        source_registry = kwargs.get("source_registry")
        if source_registry is not None:
            check_type(adata)
            schema = read_schema(source_registry)
            if schema.layer is not None:
                check_key("layers", adata.layers, schema.layer, "layer")
        else:
            schema = fit_schema(adata, **split_arguments(locals(), SetupConfig)[0][0])
        if adata.is_view:
            adata.obs_names = adata.obs_names  # any assignment replaces the view by a copy, which can be registered
        manager = AnnDataManager(fields=schema_fields(schema), setup_method_args=setup_method_args)
        with hide_others():
            manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

    @classmethod
    def from_parquet(
        cls, data_dir: str | PathLike[str], *, buffer_size: int = SourceConfig.buffer_size, **kwargs: Any
    ) -> Self:
        """Make a model for a dataset on disk, which :meth:`train` reads in parts.

        :meth:`train` validates on the validation set of the dataset, if there is one.

        Parameters
        ----------
        data_dir
            Folder written by ``alphastomics preprocess``.
        buffer_size
            Number of cells among which contexts are shuffled; expression is read from disk when it is needed.
        **kwargs
            Arguments of :class:`AlphaSTomics`.

        Returns
        -------
        An untrained model without an AnnData.

        Raises
        ------
        FileNotFoundError, ValueError
            If the dataset does not exist or is damaged.

        Examples
        --------
        >>> model = asx.model.AlphaSTomics.from_parquet("dataset", mode="expr_to_pos")
        >>> model.train(max_time=3600)
        """
        source = ParquetSource(data_dir, buffer_size=buffer_size)
        model = cls(registry=dataset_registry(cls.__name__, source), **kwargs)
        model._dataset = source
        if source.info.n_cells("validation"):
            model._validation = ParquetSource(data_dir, ("validation",), buffer_size=buffer_size)
        return model


def _describe_parameters(module: Denoiser) -> str:
    total, active = count_parameters(module)
    return f"{total:,} parameters" + (f", {active:,} active" if active < total else "")
