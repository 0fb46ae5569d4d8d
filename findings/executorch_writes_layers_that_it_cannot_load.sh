#!/usr/bin/env bash
# ExecuTorch 1.5.1: a network with LocalResponseNorm is exported without a word, and its file can't be loaded.
#
# The guess: what to_edge_transform_and_lower and to_executorch take, the runtime of the same package runs; functions
# outside of the core operators are refused with their names (SpecViolationError), such as AdaptiveMaxPool2d.
# What happens: avg_pool3d, which LocalResponseNorm is made of, max_pool3d and sort are core operators, so they are
# written; but the runtime has no kernels for them. load_method says "error: 0x:14", and no name.
# The names are those in the plan that are not in operator_registry.operator_names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
uv venv --quiet --python 3.11 venv
uv pip install --quiet --python venv/bin/python executorch==1.5.1 torch==2.15.0
venv/bin/python -W ignore - 2>/dev/null <<'PYTHON'
from importlib.metadata import version

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import nn

X = torch.rand(1, 4, 8, 8)


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1)[0]


class Pooled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool3d(x, 2)


def run(model: nn.Module) -> tuple[list[str], str]:
    """The operators that the runtime lacks, and what becomes of the file."""
    runtime = Runtime.get()
    try:
        lowered = to_edge_transform_and_lower(torch.export.export(model.eval(), (X,)))
    except Exception as error:
        return [], f"is refused: {type(error).__name__}"
    made = lowered.to_executorch()
    called = {f"{each.name}.{each.overload}" for plan in made.executorch_program.execution_plan for each in plan.operators}
    try:
        runtime.load_program(made.buffer).load_method("forward").execute([X])
        said = "runs"
    except RuntimeError as error:
        said = f"is written; loading: {error}"
    return sorted(called - set(runtime.operator_registry.operator_names)), said


print("executorch", version("executorch"), "torch", version("torch"))
for model, name in [
    (nn.LocalResponseNorm(3), "aten::avg_pool3d.out"),
    (Pooled(), "aten::max_pool3d_with_indices.out"),
    (Sorted(), "aten::sort.values"),
]:
    lacking, said = run(model)
    print(f"{type(model).__name__} {said}; the runtime lacks {lacking}")
    assert lacking == [name] and "Failed to load method" in said and "pool" not in said and "sort" not in said
for model, wanted in (nn.AdaptiveMaxPool2d(1), "is refused: SpecViolationError"), (nn.AvgPool2d(2), "runs"):
    lacking, said = run(model)
    print(f"{type(model).__name__} {said}")
    assert (lacking, said) == ([], wanted)
PYTHON
