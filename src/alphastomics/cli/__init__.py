"""The commands of :mod:`alphastomics.main`."""
