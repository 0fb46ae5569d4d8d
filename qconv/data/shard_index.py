"""An index of tar files of images: their samples and how many there are."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..ground.extras import needed
from ..ground.files import write_file
from ..ground.progress import shown
from .image_folder import cache_folder, cores


class Shard(NamedTuple):
    """A tar file, its number of images, the largest label in it, and `state` when they were counted."""

    url: str
    samples: int
    largest: int
    state: str


class ShardError(ValueError):
    """A tar file that is missing, cut off, or not what the index says."""


def read_shard(url: str) -> Iterator[dict[str, Any]]:
    """The samples of a tar file that have an image; each maps suffixes to bytes."""
    from webdataset.gopen import gopen
    from webdataset.tariterators import group_by_keys, tar_file_expander

    try:
        with contextlib.closing(gopen(url)) as stream:
            for sample in group_by_keys(tar_file_expander([{"url": url, "stream": stream}])):
                if picture(sample) is not None:
                    yield sample
    except Exception as error:  # the package passes on any error of tarfile, the disk or curl
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or (str(error.args[0]) if error.args else type(error).__name__)
        raise ShardError(f"shard {url} cannot be read: {reason}") from error


def picture(sample: dict[str, Any]) -> bytes | None:
    """Return the encoded image of a sample."""
    return next((sample[suffix] for suffix in ("jpg", "jpeg", "png", "webp", "ppm") if suffix in sample), None)


def label(sample: dict[str, Any]) -> int:
    """Return the number of the class."""
    text = sample.get("cls", b"").decode(errors="replace").strip()
    if not re.fullmatch("[0-9]+", text):
        raise ShardError(f"shard {sample['__url__']}: {sample['__key__']}.cls (={text!r}) must be a class's number")
    return int(text)


def expand(urls: str | Iterable[str]) -> list[str]:
    """Expand braces in addresses; `~` is the home folder."""
    with needed("data=webdataset"):
        from webdataset.shardlists import expand_urls
    expanded = [url for part in ([urls] if isinstance(urls, str) else urls) for url in expand_urls(part)]
    if not all(expanded):
        raise ValueError(f"train, val and test (={urls!r}) must be addresses of shards, none of them empty")
    return [str(Path(url).expanduser()) if url.startswith("~") else url for url in expanded]


def read_index(urls: Sequence[str], path: str | None) -> dict[str, Shard]:
    """Return the index of the shards: from the index file, or counted and then written to it."""
    urls = list(dict.fromkeys(urls))
    key = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:16]
    file = Path(path).expanduser() if path is not None else cache_folder() / f"shards-{key}.json"
    known: dict[str, Shard] = {}
    if file.is_dir():
        raise ShardError(f"index {file}: must be a file, not a folder")
    if file.is_file():
        try:
            entries = json.loads(file.read_text()).items()
            known = {url: Shard(url, int(n), int(largest), str(then)) for url, (n, largest, then) in entries}
        except (ValueError, TypeError, AttributeError) as error:
            raise ShardError(f"index {file}: not written by qconv, or damaged: remove it") from error
    missing = [url for url in urls if url not in known or known[url].state != state(url)]
    if missing:
        known.update(count(missing))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({url: shard[1:] for url, shard in known.items()}))
    return {url: known[url] for url in urls}


def state(url: str) -> str:
    """Size and time of a local file; nothing for a remote one."""
    if not Path(url).is_file():
        return ""
    stat = Path(url).stat()
    return f"{stat.st_size} bytes at {stat.st_mtime_ns}"


def count(urls: Sequence[str]) -> dict[str, Shard]:
    """Read every shard once."""

    def one(url: str) -> Shard:
        then = state(url)  # before reading: later changes are then counted next time
        labels = [label(sample) for sample in read_shard(url)]
        if not labels:
            raise ShardError(f"shard {url}: no images (<key>.jpg beside <key>.cls)")
        return Shard(url, len(labels), max(labels), then)

    with ThreadPoolExecutor(cores()) as pool:
        counted = shown(pool.map(one, urls), f"counting the images of {len(urls)} shards", len(urls))
        return {shard.url: shard for shard in counted}
