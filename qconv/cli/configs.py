"""The configs of `qconv train`: the folder of YAML files, and the configs made from the schemes' signatures."""

import ast
from collections.abc import Iterator
from typing import Any

from ..runs.run_files import PACKAGE, config_folder

folder = config_folder


def store_schemes() -> None:
    """Give Hydra a config ``scheme/<name>`` for every scheme of `qconv.methods`: its arguments with their defaults."""
    from hydra.core.config_store import ConfigStore

    for name, defaults in scheme_defaults():
        node = {"_target_": f"qconv.schemes.{name}", **defaults}
        ConfigStore.instance().store(name=name, node=node, group="scheme", provider="qconv.methods")


def scheme_defaults() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemes and the defaults of their arguments, read from the source: importing it would import torch."""
    for file in sorted(PACKAGE.glob("methods/*.py")):
        for function in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(function, ast.FunctionDef) or "named" not in map(ast.unparse, function.decorator_list):
                continue
            names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
            values = (*function.args.defaults, *function.args.kw_defaults)
            try:
                defaults = [ast.literal_eval(value) for value in values if value is not None]
            except ValueError as error:
                raise ValueError(f"{file}: the defaults of {function.name}() must be plain values") from error
            yield function.name, dict(zip(names, defaults, strict=True))
