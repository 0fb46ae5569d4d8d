#!/usr/bin/env bash
# hls4ml 1.3.0: with channels_last_conversion="off" the weights of PyTorch's Linear are read in the wrong order.
#
# "If 'off', no conversion is performed", says its text; 'full' and 'internal' move the channels of images.
# Expected: a Linear network of vectors, which have no channels to move, gives the same numbers with each.
# Happens: the transposition of the weights belongs to the conversion. With "off" the matrix of PyTorch, outputs by
# inputs, is read as one of inputs by outputs, row after row. Nothing is said, as its number of weights is right.
# Seen, for weights 1 2 3 / 4 5 6 and input 1 10 100: PyTorch 321 654; full and internal 321 654; off 531 642.
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


layer = nn.Linear(3, 2, bias=False)
with torch.no_grad():
    layer.weight.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
for conversion, wanted in (("full", [321, 654]), ("internal", [321, 654]), ("off", [531, 642])):
    right, found = outputs(
        nn.Sequential(layer), torch.tensor([[1.0, 10, 100]]), channels_last_conversion=conversion
    )
    print(f"RESULT {conversion}: PyTorch", *right.tolist(), "hls4ml", *found.tolist())
    assert right.tolist() == [321, 654]
    assert found.tolist() == wanted
END
sed -n 's/^RESULT //p' log
