# The cells of a notebook that trains on two GPUs, in two forks of its process.

# %% Data and settings. If a GPU was used in this process before, restart the kernel.
import alphastomics as asx

reference = asx.datasets.synthetic_tissue()  # or anndata.read_h5ad("cells.h5ad")
devices = {"accelerator": "gpu", "devices": 2}
size = {"d_model": 128, "n_layers": 4}
length = {"max_time": 3600}

# %% Training. If the kernel died, run both cells again to resume from the last checkpoint.
asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id")
model = asx.model.AlphaSTomics(reference, **size)
model.train(strategy="ddp_notebook", checkpoint="notebook.ckpt", resume="last", **devices, **length)

# %% The trained model is available in the process of the notebook.
placed = model.sample()
model.save("notebook_model", overwrite=True)
