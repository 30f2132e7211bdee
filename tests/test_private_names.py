"""Private names of other packages are used in one module each."""

from __future__ import annotations

import ast
from pathlib import Path

import alphastomics

SOURCE = Path(alphastomics.__file__).parent
# Where names without a public replacement are used, with the reason for each in its module.
KNOWN = {
    "nn/_torch_compat.py": {
        "torch._subclasses.fake_tensor",
        "torch.utils._python_dispatch",
        "torch.utils._pytree",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_local_scalar_dense",
        "_cdata",
        "_is_amx_tile_supported",
        "_get_default_store",
    },
    "train/_lightning_compat.py": {
        "lightning.fabric.utilities.distributed._set_num_threads_if_needed",
        "lightning.pytorch.strategies.launchers._MultiProcessingLauncher",
        "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher",
        "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
        "scvi.model._utils",
        "_parallel_devices",
        "_call_children_scripts",
        "_launcher",
    },
}
NAMED_TUPLES = {"_asdict", "_replace", "_fields", "_field_defaults", "_make"}
SUBCLASS_API = {"_check_if_trained", "_get_init_params", "_get_setup_method_args"}  # scvi-tools documents these
ALLOWED = NAMED_TUPLES | SUBCLASS_API | {"_exit"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Private names that a module defines: functions, classes, variables, arguments and attributes of its objects."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def foreign_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names of other packages that a module uses."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | ALLOWED:
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("alphastomics"):
            if any(map(is_private, node.module.split("."))):
                names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)}
    return names


def test_private_names_of_other_packages_are_used_in_one_module_each():
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    compat = {SOURCE / name for name in KNOWN}
    own = {path.stem for path in trees} | set().union(
        *(defined_names(tree) for path, tree in trees.items() if path not in compat)
    )
    found = {path.relative_to(SOURCE).as_posix(): foreign_names(tree, own) for path, tree in trees.items()}
    assert {name: names for name, names in found.items() if names} == KNOWN
