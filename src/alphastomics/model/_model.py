"""The model class."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import rich.pretty  # noqa: F401  scvi-tools uses rich.pretty without importing it
from scvi import settings
from scvi.data import AnnDataManager

from alphastomics.data import fit_schema
from alphastomics.data.parquet._source import BUFFER, ParquetSource
from alphastomics.diffusion import MODES, CosineSchedule, DiffusionConfig, Process
from alphastomics.model._embedding import EmbeddingMixin
from alphastomics.model._fields import dataset_registry, read_schema, schema_fields
from alphastomics.model._persistence import PersistenceMixin
from alphastomics.model._sampling import SamplingMixin
from alphastomics.model._training import TrainingMixin
from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.sampling import FittedStatistics
from alphastomics.train.defaults import advised_attention, advised_experts, default_dropout
from alphastomics.train.distributed.devices import seeded_generators
from alphastomics.train.memory.fit import fits_in_memory

if TYPE_CHECKING:
    from os import PathLike

    from anndata import AnnData

    from alphastomics.diffusion import Mode

logger = logging.getLogger(__name__)


class AlphaSTomics(TrainingMixin, SamplingMixin, EmbeddingMixin, PersistenceMixin):
    """Diffusion transformer over expression and position of the cells of a tissue.

    Parameters
    ----------
    adata
        Reference registered with :meth:`setup_anndata`.
    registry
        Registry of an earlier setup, for a model without data.
    mode
        What the model learns to sample: ``"expr_to_pos"``, ``"pos_to_expr"``, ``"joint"``, or ``"any"`` of them.
    d_model, n_layers, n_heads
        Width, number of blocks, attention heads.
    gate_type
        Gate of softmax attention: ``"headwise"``, ``"elementwise"`` or ``"none"``.
    use_qk_norm
        Whether queries and keys are normalized.
    attention
        ``"full"``; ``"linear"``: the baseline whose cost grows with the cells alone, without gate and norms;
        ``"geometric"``: full attention that falls with distance; ``"neighbor"``: the nearest cells one by one, and all cells
        as ``"linear"``; ``"axial"``: along the rows and columns of a grid.
    pair_features
        ``"factorized"``: features of pairs of cells, which geometric attention and attention over neighbors read.
    rank
        Rank of these, up to 32; ``"auto"``: what is affordable for the cells that are seen at once.
    pair_attention
        Attention in the layers on the pair features: ``"axial"``, ``"cross"`` or ``"triangle"``, whose time is cubic in the
        cells; None for none.
    pair_residual, pair_dropout
        How these layers add their updates: ``"mix"``, ``"tangent"`` or ``"distribute"``; and the fraction of the entries of
        an update that is dropped in training.
    sparse_pairs, n_neighbors
        With ``attention="neighbor"``: the nearest cells are so many in space (``"coordinate"``), along the order of the cells
        (``"sequence"``, see ``sequence_key`` of :meth:`setup_anndata`), or half of them each (``"hybrid"``). Where cells are
        being placed, these are the nearest among the noisy positions.
    use_moe
        Whether a mixture of experts takes the place of the feed-forward networks.
    num_experts, moe_top_k
        Number of experts, and how many of them see a cell; see :func:`~alphastomics.train.advised_experts`.
    expert_width
        ``"split"``: the experts share the width of the feed-forward network; ``"full"``: each has all of it.
    residual, n_streams
        ``"plain"`` residual connections, or ``"hyper"``: so many residual streams, mixed by doubly stochastic matrices.
    layer_sharing, sharing_block
        ``"none"``; which blocks share their weights: ``"universal"``, all; ``"alternating"``, every other; ``"block"``, so many
        in a row.
    bottleneck
        Ratio by which the feed-forward networks are narrower than the rest; None for full width.
    dropout
        Share of the branch outputs dropped in training; None: by the size and kind of the reference.
    schedule
        ``"cosine"`` or ``"cosine_nd"``, see :class:`~alphastomics.diffusion.CosineSchedule`.
    position_nu, expression_nu
        Exponent of time of either modality.
    prediction_type
        ``"x0"``, ``"epsilon"`` or ``"v"``, see :class:`~alphastomics.diffusion.Process`.
    enable_masking
        Whether training masks some entries and asks for them, see :class:`~alphastomics.diffusion.MaskingConfig`.
    context
        ``"slice"``: contexts of :meth:`train` are whole slices by default, as far as the memory allows. ``"auto"``: the same,
        and ``attention`` and ``pair_features`` are chosen for the size of the largest slice, see
        :func:`~alphastomics.train.advised_attention`.
    random_state
        Seed of the initial weights and of all draws of training; ``scvi.settings.seed``, or 0, when None.

    Raises
    ------
    ValueError
        If an argument is unknown or excludes another one.

    Examples
    --------
    >>> asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    >>> model = asx.model.AlphaSTomics(reference, mode="expr_to_pos")
    >>> model.train(max_time=300)
    >>> placed = model.sample(query, mode="expr_to_pos")
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        registry: dict[str, Any] | None = None,
        mode: Mode = "any",
        d_model: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        gate_type: Literal["headwise", "elementwise", "none"] = "headwise",
        use_qk_norm: bool = True,
        attention: Literal["full", "linear", "geometric", "neighbor", "axial"] = "full",
        pair_features: Literal["factorized"] | None = None,
        rank: int | Literal["auto"] = "auto",
        pair_attention: Literal["triangle", "axial", "cross"] | None = None,
        pair_residual: Literal["mix", "tangent", "distribute"] = "mix",
        pair_dropout: float = 0.0,
        sparse_pairs: Literal["coordinate", "sequence", "hybrid"] = "coordinate",
        n_neighbors: int = 32,
        use_moe: bool = False,
        num_experts: int = 4,
        moe_top_k: int = 2,
        expert_width: Literal["split", "full"] = "split",
        residual: Literal["plain", "hyper"] = "plain",
        n_streams: int = 4,
        layer_sharing: Literal["none", "universal", "alternating", "block"] = "none",
        sharing_block: int = 4,
        bottleneck: int | None = None,
        dropout: float | None = None,
        schedule: Literal["cosine", "cosine_nd"] = "cosine_nd",
        position_nu: float = 2.0,
        expression_nu: float = 1.0,
        prediction_type: Literal["x0", "epsilon", "v"] = "v",
        enable_masking: bool = False,
        context: Literal["slice", "auto"] | None = None,
        random_state: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(map(repr, MODES))}")
        if context not in (None, "slice", "auto"):
            raise ValueError(f"context={context!r} is unknown; choose None, 'slice' or 'auto'")
        super().__init__(adata, registry)
        self.schema = read_schema(self.registry_)
        self.diffusion = DiffusionConfig(
            position=Process(schedule=CosineSchedule(name=schedule, nu=position_nu), prediction_type=prediction_type),
            expression=Process(
                schedule=CosineSchedule(name=schedule, nu=expression_nu), prediction_type=prediction_type
            ),
        )
        if dropout is None:
            dropout = default_dropout(self.schema, self.summary_stats.n_cells)
        config = DenoiserConfig(
            n_genes=self.schema.n_genes,
            n_dims=self.schema.n_dims,
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            gate_type=gate_type,
            use_qk_norm=use_qk_norm,
            dropout=dropout,
            attention=attention,
            pair_features=pair_features,
            rank=rank,
            pair_attention=pair_attention,
            pair_residual=pair_residual,
            pair_dropout=pair_dropout,
            sparse_pairs=sparse_pairs,
            n_neighbors=n_neighbors,
            use_moe=use_moe,
            num_experts=num_experts,
            moe_top_k=moe_top_k,
            expert_width=expert_width,
            residual=residual,
            n_streams=n_streams,
            layer_sharing=layer_sharing,
            sharing_block=sharing_block,
            bottleneck=bottleneck,
            sequence=self.schema.sequence_key is not None,
            mask_tokens=enable_masking,
        )
        if context == "auto":  # a saved model keeps the choice
            config = self._advised(config, mode)
            attention, pair_features, context = config.attention, config.pair_features, "slice"
        if use_moe:
            self._advise_experts(num_experts, moe_top_k)
        random_state = (settings.seed or 0) if random_state is None else random_state
        with seeded_generators(random_state):
            self.module = self._module_cls(config)
        if self.schema.transform == "log1p":  # the scale of other values is arbitrary
            self.module.weigh_genes(self.schema.gene_scale)
        self._dataset = self._validation = None
        self.fitted_ = FittedStatistics()
        self.trainings_ = ()
        self.init_params_ = self._get_init_params(locals())
        self._model_summary_string = (
            f"AlphaSTomics model (mode={mode!r}): {self.schema.n_genes} genes, {self.schema.n_dims}D, "
            f"{len(self.schema.slices)} reference slices, d_model={d_model}, n_layers={n_layers}, n_heads={n_heads}, "
            f"{_describe_parameters(self.module)}"
        )

    def _advised(self, config: DenoiserConfig, mode: Mode) -> DenoiserConfig:
        """The network with the attention advised for the largest slice and the memory of this machine."""
        for name, usual in (("attention", "full"), ("pair_features", None)):
            if getattr(config, name) != usual:
                raise ValueError(
                    f"context='auto' chooses {name}; leave {name}={getattr(config, name)!r} out, or pass context='slice'"
                )
        n_cells = self.summary_stats.largest_slice
        arguments = {"mode": mode, "diffusion": self.diffusion, "shared_frame": self.schema.frame == "shared"}
        advice = advised_attention(n_cells, lambda kind: fits_in_memory(replace(config, **kind), n_cells, **arguments))
        logger.info("Slices of up to %s cells: %s.", f"{n_cells:,}", ", ".join(f"{k}={v!r}" for k, v in advice.items()))
        return replace(config, **advice)

    def _advise_experts(self, num_experts: int, moe_top_k: int) -> None:
        """Log the advice for the number of cells, if it differs."""
        n_cells = self.summary_stats.n_cells
        advice = advised_experts(n_cells)
        if advice != {"num_experts": num_experts, "moe_top_k": moe_top_k}:
            logger.info(
                "num_experts=%d and moe_top_k=%d; for %d cells the advice is %d and %d.",
                num_experts, moe_top_k, n_cells, advice["num_experts"], advice["moe_top_k"],
            )  # fmt: skip

    @classmethod
    def setup_anndata(
        cls,
        adata: AnnData,
        *,
        layer: str | None = None,
        position_key: str = "spatial",
        slice_key: str | None = None,
        cell_type_key: str | None = None,
        frame: Literal["slice", "shared"] = "slice",
        sequence_key: str | None = None,
        transform: Literal["auto", "log1p", "none"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Register a reference: cells with expression and positions.

        All data are checked here, before training; ``adata`` is only marked as registered.

        Parameters
        ----------
        adata
            The reference, in memory; sparse or dense, counts or not.
        layer
            Where expression is: a key of ``layers``, or ``X`` when None.
        position_key
            Where positions are in ``obsm``, shape (n_cells, 2) or (n_cells, 3), any units.
        slice_key
            Where the slice of a cell is in ``obs``. None takes ``obs["slice_id"]`` if it is there, else all cells are
            one slice; the log says which.
        cell_type_key
            Where labels are in ``obs``, if anywhere. Training does not use them.
        frame
            ``"slice"``: every slice has its own frame, free up to rotation, reflection and shift. ``"shared"``: all
            slices are registered to one frame.
        sequence_key
            Where an order of the cells is in ``obs``, if anywhere: a number for each, such as that of a section or a residue.
            Attention over neighbors and features of pairs read it; only differences count.
        transform
            ``"log1p"`` (counts: library size to the median, logarithm), ``"none"``, or ``"auto"``: ``"log1p"`` if and
            only if all values are non-negative integers.
        **kwargs
            Used by scvi-tools (``source_registry``).

        Raises
        ------
        KeyError
            If a named key is missing.
        ValueError
            If values, positions or slices cannot be used; the message says which and what to do.
        """
        setup_method_args = cls._get_setup_method_args(**locals())
        source_registry = kwargs.get("source_registry")
        if source_registry is not None:
            schema = read_schema(source_registry)
        else:
            schema = fit_schema(
                adata,
                layer=layer,
                position_key=position_key,
                slice_key=slice_key,
                cell_type_key=cell_type_key,
                frame=frame,
                sequence_key=sequence_key,
                transform=transform,
            )
        if adata.is_view:
            adata._init_as_actual(adata.copy())
        manager = AnnDataManager(fields=schema_fields(schema), setup_method_args=setup_method_args)
        manager.register_fields(adata, **kwargs)
        cls.register_manager(manager)

    @classmethod
    def from_parquet(cls, data_dir: str | PathLike[str], *, buffer_size: int = BUFFER, **kwargs: Any) -> Self:
        """Make a model of a dataset on disk, which :meth:`train` reads in parts.

        :meth:`train` validates on the validation set of the dataset, if there is one.

        Parameters
        ----------
        data_dir
            Folder that ``alphastomics preprocess`` wrote.
        buffer_size
            Number of cells among which contexts are shuffled; expression is read from disk as it is needed.
        **kwargs
            Arguments of :class:`AlphaSTomics`.

        Raises
        ------
        FileNotFoundError, ValueError
            If the dataset does not exist or is damaged.
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
