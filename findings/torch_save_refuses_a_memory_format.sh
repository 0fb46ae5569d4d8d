#!/usr/bin/env bash
# torch 2.15.0: `torch.save` can't save `torch.channels_last`, though it saves dtypes and layouts.
#
# Modules and options often keep the memory format that they want.
# Expected: torch.save of such a module or checkpoint works, as with torch.float32 or torch.strided in its place.
# Happens: TypeError: cannot pickle 'module' object. It names neither the attribute nor the format. pickle and
# copy.deepcopy take the same module. The cause: torch.save writes protocol 2 of pickle, and finds the name of a memory
# format only from protocol 4 on.
# Seen: float32 saved, strided saved, channels_last TypeError; by pickle saved; by torch.save in protocol 4 saved.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import io
import pickle

import torch
from torch import nn


def outcome(save):
    try:
        save()
    except TypeError as error:
        return f"TypeError: {error}"
    return "saved"


class Fast(nn.Conv2d):
    memory_format_wanted = None


layer = Fast(3, 8, 3)
layer.memory_format_wanted = torch.channels_last
seen = {str(each): outcome(lambda: torch.save(each, io.BytesIO())) for each in (torch.float32, torch.strided)}
seen["a layer that keeps torch.channels_last"] = outcome(lambda: torch.save(layer, io.BytesIO()))
seen["the same by pickle"] = outcome(lambda: pickle.dumps(layer))
seen["by torch.save in protocol 4"] = outcome(lambda: torch.save(layer, io.BytesIO(), pickle_protocol=4))
for what, how in seen.items():
    print(f"{what}: {how}")
refused = "TypeError: cannot pickle 'module' object"
assert list(seen.values()) == ["saved", "saved", refused, "saved", "saved"], seen
END
