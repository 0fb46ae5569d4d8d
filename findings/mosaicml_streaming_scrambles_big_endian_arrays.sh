#!/usr/bin/env bash
# mosaicml-streaming 0.10.0: arrays of big-endian numbers come back from shards with their bytes swapped.
#
# Readers of TIFF, PGM, FITS and netCDF files give such arrays, of '>u2' or '>f4'.
# Expected: the numbers that were written, as np.save and np.load keep them, or an error, as a wrong type gets one.
# Happens: the column "ndarray" stores the type's name without its order, and the bytes as they lie in memory. Readers
# take them for little-endian ones. Nothing is said. The column "ndarray:uint16" refuses them.
# Seen: 0, 1, 2 and 1000 of 16 bits come back as 0, 256, 512 and 59395; 1.5 of 32 bits as 6.9e-41.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python mosaicml-streaming==0.10.0 torch==2.15.0 torchvision==0.29.2 \
  numpy==2.4.6 transformers==4.57.6 'huggingface-hub<1'
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
from streaming import MDSWriter, StreamingDataset

written = {
    "codes": np.array([0, 1, 2, 1000], ">u2"),
    "floats": np.array([1.5], ">f4"),
    "little": np.array([0, 1, 2, 1000], "<u2"),
}
columns = {"codes": "ndarray", "floats": "ndarray", "little": "ndarray"}
with MDSWriter(out="shards", columns=columns) as writer:
    writer.write(written)
read = StreamingDataset(local="shards", batch_size=1)[0]
for name, column in columns.items():
    print(column, *written[name].tolist(), written[name].dtype.str, "->", *read[name].tolist(), read[name].dtype.str)
    kept = read[name].tolist() == written[name].tolist()
    swapped = read[name].tobytes() == written[name].tobytes() and not kept
    assert kept if name == "little" else swapped
np.save("codes.npy", written["codes"])
assert np.load("codes.npy").tolist() == written["codes"].tolist()
END
