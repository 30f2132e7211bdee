"""YAML of configuration files: ``yaml.SafeLoader`` with the scalars of YAML 1.2, unique keys and no references.

YAML 1.1, which pyyaml follows, reads ``1e-4`` as text, ``1:30`` as 90, ``010`` as 8 and ``no`` as false.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from alphastomics._io._errors import describe_error, format_value, one_line, permission_error

if TYPE_CHECKING:
    from pathlib import Path

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"[-+]?[0-9]+$"),
    "float": re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
}


def load(path: Path) -> Any:
    """Read a file; the message of a ValueError names the file and the line."""
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{path}{line}: {one_line(str(error.problem or error.context))}") from error
    except PermissionError as error:
        raise permission_error(path, error) from error
    except Exception as error:  # a crafted file can raise anything
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else describe_error(error)
        raise ValueError(f"{path} is not YAML: {reason}") from error


def dump(values: dict[str, Any]) -> str:
    """The text of plain nested values, in their order."""
    import yaml

    text: str = yaml.dump(values, Dumper=_dumper(), sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text


@cache
def _loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # nested references expand to billions of values
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "references (*name) are not supported", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                is_text = isinstance(key, yaml.ScalarNode)
                if not is_text or key.value in seen:
                    problem = f"the key {format_value(key.value)} occurs twice" if is_text else "keys must be text"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    for kind, pattern in _SCALARS.items():
        Loader.add_implicit_resolver(_TAG + kind, pattern, None)
    Loader.add_constructor(_TAG + "int", lambda _, node: int(node.value))
    Loader.add_constructor(_TAG + "float", lambda _, node: float(node.value))
    return Loader


@cache
def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> Any:
            # In other styles some characters would end a line and change the value.
            return self.represent_scalar(_TAG + "str", data, style=None if data.isprintable() else '"')

    Dumper.add_representer(str, Dumper.represent_str)
    for kind, pattern in _SCALARS.items():  # with YAML 1.1: quotes text that either version reads as a number
        Dumper.add_implicit_resolver(_TAG + kind, pattern, None)
    return Dumper
