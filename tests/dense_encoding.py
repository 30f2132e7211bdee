"""The transform of expression to network units, dense and in float64."""

import numpy as np


def encode(schema, values, measured=True):
    values, measured = np.asarray(values, dtype=float), np.broadcast_to(measured, schema.n_genes)
    if schema.transform == "log1p":
        size = values[:, measured].sum(1, keepdims=True)
        target = schema.library_size * np.array(schema.gene_share)[measured].sum()
        values = np.log1p(values * target / np.where(size > 0, size, 1))
    standard = (values - schema.gene_mean) / np.array(schema.gene_scale)
    return np.where(measured, np.clip(standard, -10, 10), 0)
