"""What the commands of :mod:`alphastomics.main` are made of."""
