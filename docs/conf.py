"""Sphinx configuration. The tag ``online`` (``-t online``) adds links to the documentation of other projects."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from typing import TYPE_CHECKING

from alphastomics.config._sections import KEYS

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

    from alphastomics.config._setting import Setting

info = metadata("alphastomics")
project = "AlphaSTomics"
author = info["Maintainer"] or info["Author"]
copyright = f"2026, {author}"
version = release = info["Version"]
repository_url = dict(entry.split(", ") for entry in info.get_all("Project-URL"))["Source"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_autodoc_typehints",
    "sphinx_copybutton",
    "sphinxcontrib.bibtex",
    "sphinxcontrib.katex",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "tutorials/README.md"]

autosummary_generate = True
autodoc_member_order = "bysource"
default_role = "literal"
napoleon_google_docstring = False
napoleon_use_rtype = False  # a `Returns` section is prose, not a type
napoleon_use_param = True
typehints_defaults = "braces"
typehints_document_rtype_none = False  # it would be inserted between the heading and the first line of `Examples`
always_use_bars_union = True
bibtex_bibfiles = ["references.bib"]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make test-all` executes the tutorials
nb_merge_streams = True

# `DenoiserConfig` inherits fields whose annotations are names of another module.
suppress_warnings = ["sphinx_autodoc_typehints.forward_reference"]
nitpicky = True
# Names of other projects resolve only if their inventories are available; names of this project must always resolve.
_others = [
    "anndata", "collections", "cyclopts", "datasets", "datetime", "distributed", "lightning", "matplotlib", "numpy", "os", "pandas", "pathlib",
    "pyarrow", "scanpy", "scipy", "scvi", "shapely", "spatialdata", "squidpy", "torch", "types", "typing",
]  # fmt: skip
# Attributes of a class keep the names under which an annotation imports PyTorch's tensor and NumPy's arrays.
nitpick_ignore_regex = [
    (
        "py:class",
        r"alphastomics\.data\.(_batch\.(RawContext|DrawFunction)|_draws\.Draws)|Draws",
    ),  # internal to the loader
    (
        "py:class",
        r"alphastomics\.config\.(_sampling\.InferenceConfig|_data\.(Keys|Frame)Config)",
    ),  # bases of documented classes
    (
        "py:class",
        r"alphastomics\.train\.(curriculum\.LengthCurriculum|draws\.DrawContexts|objective\.Objective|optimization\.Optimization)",
    ),  # internal to the training plan
    (
        "py:class",
        r"alphastomics\.nn\.parallel\.sequence\.SequenceParallel",
    ),  # internal to the network
    ("py:class", r"alphastomics\.sampling\._sampler\.FittedStatistics"),  # internal to sampling
    ("py:.*", rf"({'|'.join(_others)})(\..*)?"),
    ("py:data", "Ellipsis"),
    ("py:class", r"Mode|Similarity|Tensor|NDArray|np\.\w+"),
]

# Settings that are documented with the object that they configure.
ALIASES = {
    "alphastomics.config.Augmentation": "alphastomics.data.Augmentation",
    "alphastomics.config.MaskingConfig": "alphastomics.diffusion.MaskingConfig",
    "alphastomics.config.PlanConfig": "alphastomics.train.PlanConfig",
    "alphastomics.config.Stage1Options": "alphastomics.data.preprocess.Stage1Options",
    "alphastomics.config.Stage2Options": "alphastomics.data.preprocess.Stage2Options",
}

intersphinx_mapping = {}
if tags.has("online"):  # noqa: F821  Sphinx defines it
    intersphinx_mapping = {
        "anndata": ("https://anndata.readthedocs.io/en/stable/", None),
        "matplotlib": ("https://matplotlib.org/stable/", None),
        "numpy": ("https://numpy.org/doc/stable/", None),
        "pandas": ("https://pandas.pydata.org/docs/", None),
        "python": ("https://docs.python.org/3/", None),
        "scanpy": ("https://scanpy.readthedocs.io/en/stable/", None),
        "scvi-tools": ("https://docs.scvi-tools.org/en/stable/", None),
        "shapely": ("https://shapely.readthedocs.io/en/stable/", None),
        "spatialdata": ("https://spatialdata.scverse.org/en/stable/", None),
        "squidpy": ("https://squidpy.readthedocs.io/en/stable/", None),
        "torch": ("https://docs.pytorch.org/docs/stable/", None),
    }

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "repository_url": repository_url,
    "use_repository_button": True,
    "path_to_docs": "docs/",
    "navigation_with_keys": False,
}


def resolve_public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Element) -> Element | None:
    """Link a type found in a private module (``data._schema.TissueSchema``) to the page of its public name."""
    public = re.sub(r"\._\w+", "", node.get("reftarget", ""))
    public = ALIASES.get(public, public)
    if node.get("refdomain") != "py" or public == node["reftarget"]:
        return None
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, node["reftype"], public, node, content)


def skip_field(app: Sphinx, what: str, name: str, member: object, skip: bool, options: object) -> bool | None:
    """Omit fields of named tuples, which the section `Attributes` describes, and settings on the page of a module."""
    is_setting = what == "module" and getattr(member, "__module__", "").startswith("alphastomics.config")
    return True if is_setting or type(member).__name__ == "_tuplegetter" else None


def insert_settings(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace lines such as ``[settings: model]`` by the table of the settings in that section of a configuration file."""
    if docname == "configuration":
        source[0] = re.sub(
            r"^\[settings: ([\w.]+)\]$", lambda found: settings_table(found[1]), source[0], flags=re.MULTILINE
        )


def settings_table(section: str) -> str:
    """Keys of a section with their defaults, flags and sentences, as a table in Markdown."""
    rows = ["| key | default | flag | description |", "| --- | --- | --- | --- |"]
    for key, entry in KEYS.items():
        path, _, name = key.rpartition(".")
        if path == section:
            flag = "" if entry.details.file_only else f"`{entry.flag}`"
            text = re.sub("``([^`]+)``", r"`\1`", entry.text).replace("|", r"\|")
            rows.append(f"| `{name}` | {default_of(entry)} | {flag} | {text} |")
    return "\n".join(rows)


def default_of(entry: Setting) -> str:
    """A default as in a file."""
    if entry.details.from_data:
        return "from the data"
    if entry.default is None:
        return ""
    return f"`{str(entry.default).lower() if isinstance(entry.default, bool) else entry.default}`"


def setup(app: Sphinx) -> None:
    """Register the extensions of this site."""
    app.connect("source-read", insert_settings)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("missing-reference", resolve_public_name)
