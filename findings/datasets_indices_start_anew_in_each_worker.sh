#!/usr/bin/env bash
# datasets 5.2.0: map and filter of a stream with with_indices=True count from 0 in each worker of a DataLoader.
#
# Expected: the index of a sample is its place in the data set, as without workers, and as it is in a data set that is
# no stream; it chooses a sample's soft label, or each tenth sample for validation.
# Happens: each worker counts the samples of its own shards. So an index comes once for each worker, those of the second
# half never, and the same sample has another index with another number of workers. Nothing is said.
# Seen, for 100 samples in 4 shards: with 0 workers indices 0 to 99, all right; with 2 workers 0 to 49 twice, 25 right;
# with 4 workers 0 to 24 four times, 25 right. filter(index < 10) keeps 10 samples, 20, and 40.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python datasets==5.2.0 torch==2.15.0 numpy==2.4.6
export HF_HOME="$PWD" HF_HUB_OFFLINE=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from datasets import Dataset
from torch.utils.data import DataLoader

stream = Dataset.from_dict({"number": list(range(100))}).to_iterable_dataset(num_shards=4)
numbered = stream.map(lambda sample, index: {"index": index}, with_indices=True)
first = stream.filter(lambda sample, index: index < 10, with_indices=True)

for workers, wanted in ((0, (99, 100, 10)), (2, (49, 25, 20)), (4, (24, 25, 40))):
    samples = list(DataLoader(numbered.with_format("torch"), None, num_workers=workers))
    largest = max(each["index"].item() for each in samples)
    right = sum((each["index"] == each["number"]).item() for each in samples)
    kept = len(list(DataLoader(first.with_format("torch"), None, num_workers=workers)))
    print(f"{workers} workers: largest index {largest}, right {right} of {len(samples)}; kept of index < 10: {kept}")
    assert len(samples) == 100
    assert (largest, right, kept) == wanted
END
