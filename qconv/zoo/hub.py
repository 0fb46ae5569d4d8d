"""Packed models on the Hugging Face Hub, by its own mixin: ``pip install "qconv[hub]"``."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..ground.extras import needed
from ..packed import load_packed
from ..packed.load import read_header
from ..runs.run_files import PACKED
from . import NETWORKS, card, located

with needed("qconv.zoo.hub"):
    from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download

TEMPLATE = """\
---
{{ card_data }}
---

{{ page }}
"""
PAGE = """\
# {title}

A quantized network in qconv's packed form: {bytes:,} bytes.

| layer | type | scheme |
|---|---|---|
{layers}

```python
from qconv.zoo.hub import HubModel

model = HubModel.from_pretrained("OWNER/NAME")
```
"""


class HubModel(
    nn.Module,
    ModelHubMixin,
    library_name="qconv",
    pipeline_tag="image-classification",
    tags=["qconv", "quantization"],
    model_card_template=TEMPLATE,
):
    """A packed model with ``save_pretrained``, ``push_to_hub`` and ``from_pretrained``; its forward is the model's.

    What is saved is the file itself, byte for byte, so that what was verified is what is shared:

        >>> from qconv.zoo.hub import HubModel  # doctest: +SKIP
        >>> HubModel("outputs/2026-01-31/12-00-00").push_to_hub("me/resnet20-lsq")  # doctest: +SKIP
        >>> model = HubModel.from_pretrained("me/resnet20-lsq")  # doctest: +SKIP

    Args:
        what: a packed file that names its network, the folder of a run, or a name of the zoo.

    Attributes:
        model: the network, in evaluation mode on the CPU.
        classes: the names of its outputs, or None.

    Raises:
        ValueError: there is no such network or run.
        PackedFileError: the file is missing or damaged, or does not name its network.
    """

    def __init__(self, what: str | os.PathLike[str]) -> None:
        super().__init__()
        path = located(what)
        self.model = load_packed(path)
        self.classes = read_header(path).classes
        self._file = path.read_bytes()
        self._page = page(path)
        self._hub_mixin_config = None  # the mixin's record of the arguments: the path here is of no use elsewhere

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def _save_pretrained(self, save_directory: Path) -> None:
        (save_directory / PACKED).write_bytes(self._file)
        header = read_header(save_directory / PACKED)
        config = {
            "network": header.network,
            "pictures": None if header.pictures is None else header.pictures.model_dump(),
            "classes": header.classes,
        }
        (save_directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the page of the model: of a network of the zoo its card, else the table of its layers."""
        info = self._hub_mixin_info
        return ModelCard.from_template(
            info.model_card_data, template_str=info.model_card_template, **{"page": self._page, **kwargs}
        )

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **where: Any) -> "HubModel":
        if Path(model_id).is_dir():
            return cls(Path(model_id) / PACKED)
        return cls(Path(hf_hub_download(model_id, PACKED, **where)))


def page(path: Path) -> str:
    """The page of a packed file: of a network of the zoo its card, else the table of its layers."""
    if path.parent == NETWORKS:
        return card(path.stem).markdown()
    header = read_header(path)
    title = "A network" if header.network is None else str(header.network.get("_target_", "")).rpartition(".")[2]
    rows = "\n".join(f"| {name} | {layer.type} | `{layer.scheme}` |" for name, layer in header.layers.items())
    return PAGE.format(title=title, bytes=path.stat().st_size, layers=rows)
