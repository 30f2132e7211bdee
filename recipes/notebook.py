# The cells of a notebook with two GPUs, which are trained on by two forks of its process.

# %% What is trained on, and how. Nothing may have used a GPU before: restart the kernel where something has.
import alphastomics as asx

reference = asx.datasets.synthetic_tissue()  # or anndata.read_h5ad("cells.h5ad")
devices = {"accelerator": "gpu", "devices": 2}
size = {"d_model": 128, "n_layers": 4}
length = {"max_time": 3600}

# %% Training. Where the kernel died, run both cells again: it goes on from the last checkpoint.
asx.model.AlphaSTomics.setup_anndata(reference, slice_key="slice_id")
model = asx.model.AlphaSTomics(reference, **size)
model.train(strategy="ddp_notebook", checkpoint="notebook.ckpt", resume="last", **devices, **length)

# %% The model is here, in the process of the notebook.
placed = model.sample(n_steps=10)
model.save("notebook_model", overwrite=True)
