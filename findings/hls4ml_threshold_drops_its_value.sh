#!/usr/bin/env bash
# hls4ml 1.3.0: PyTorch's Threshold puts 0 in the place of small numbers, whatever its value is.
#
# Expected: nn.Threshold(0.5, -1), as of signs or of an offset of codes, gives -1 there, or an error says that only
# value 0 is supported, as one says that negative thresholds are not.
# Happens: the threshold is read and the value is not. Nothing is said.
# Seen, for -2, 0.25, 0.5, 0.75 and 3: PyTorch -1 -1 -1 0.75 3, hls4ml 0 0 0 0.75 3; value 0: both 0 0 0 0.75 3.
# Needs g++.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hls4ml==1.3.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import hls4ml
import torch
from torch import nn

torch.set_num_threads(1)


def outputs(model, x, **options):
    """What PyTorch and hls4ml's C simulation give."""
    config = hls4ml.utils.config_from_pytorch_model(
        model.eval(),
        tuple(x.shape[1:]),
        granularity="name",
        backend="Vitis",
        default_precision="fixed<32,12>",
        **options,
    )
    made = hls4ml.converters.convert_from_pytorch_model(model, output_dir="project", backend="Vitis", hls_config=config)
    made.compile()
    return model(x).detach().flatten(), torch.from_numpy(made.predict(x.numpy())).flatten()


for value in (0, -1):
    right, found = outputs(nn.Sequential(nn.Threshold(0.5, value)), torch.tensor([[-2, 0.25, 0.5, 0.75, 3]]))
    print(f"RESULT value {value}: PyTorch", *right.tolist(), "hls4ml", *found.tolist())
    assert right.tolist() == [value] * 3 + [0.75, 3]
    assert found.tolist() == [0, 0, 0, 0.75, 3]
END
sed -n 's/^RESULT //p' log
