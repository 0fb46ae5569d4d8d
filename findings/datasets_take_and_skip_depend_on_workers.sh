#!/usr/bin/env bash
# datasets 5.2.0: take(n) and skip(n) of a stream depend on the number of workers, so they can overlap.
#
# Expected: take(n) is the first n samples, skip(n) are the others: the documented way to split a stream into validation
# and training sets.
# Happens: in a DataLoader with workers, n is shared out among them, and each takes, or skips, the first of its own
# shards. With one number of workers the two sets are disjoint. With two numbers, and a training set mostly has more
# workers, or in a loop without a DataLoader, training samples are in the validation set. Nothing is said.
# Seen, for 8 shards of 100 samples and n = 200: take of 0 workers and skip of 4 share 100 of the 200 samples; take of
# 2 and skip of 8 workers share 150; with equal numbers 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python datasets==5.2.0 torch==2.15.0 numpy==2.4.6
export HF_HOME="$PWD" HF_HUB_OFFLINE=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from datasets import Dataset
from torch.utils.data import DataLoader

TAKEN = 200
stream = Dataset.from_dict({"number": list(range(800))}).to_iterable_dataset(num_shards=8)


def samples(part, workers):
    found = [each["number"].item() for each in DataLoader(part.with_format("torch"), None, num_workers=workers)]
    assert len(found) == len(set(found))
    return set(found)


for first, second in ((0, 0), (4, 4), (0, 4), (2, 8), (4, 8)):
    validation, training = samples(stream.take(TAKEN), first), samples(stream.skip(TAKEN), second)
    both = len(validation & training)
    print(f"workers {first} and {second}: {len(validation)} and {len(training)} samples, {both} in both")
    assert len(validation) == TAKEN
    assert len(training) == 800 - TAKEN
    assert (both > 0) == (first != second)
END
