"""The schema, version 2, of the metadata of a packed file.

Version 1 had neither `modules` nor `trial`. It can still be read, but a network with the same tensors and other
functions is then not recognized.

A packed file is a safetensors file whose metadata has one string: ``qconv``, a `Header` as JSON. Tensors have the names
of the model's state dict. A quantized ``NAME.weight`` is replaced by

- ``NAME.weight.codes``: the numbers of the levels, by `bits.pack`, in the order of the filters (output channels first),
- ``NAME.weight.levels``, where the codes are not evenly spaced: the code of each number,
- ``NAME.weight.scale`` and, where the method has them, ``NAME.weight.offset`` and ``NAME.weight.negative_scale``:
  ``weight = code · scale + offset``, with `negative_scale` for negative codes, as in `qconv.quantizers.Codes`.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from ..ground.checks import check_pixel_range

FORMAT, OLDEST, VERSION = "qconv-packed", 1, 2

Size = Annotated[int, Field(ge=0, le=2**40)]
LARGEST_CODE = 2**40
Code = Annotated[int, Field(ge=-LARGEST_CODE, le=LARGEST_CODE)]
Text = Annotated[str, Field(max_length=10_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Weight(_Strict):
    """The storage of a layer's weight.

    Attributes:
        shape: the shape of the filters.
        bits: information per element, as stated by the quantizer.
        radix: the number of levels, see `bits.pack`.
        first: the code of number 0.
        step: the difference between adjacent codes; 0 if the codes are a separate tensor.
        dtype: the dtype of the quantized weight.
    """

    shape: list[Size] = Field(min_length=1, max_length=5)
    bits: float = Field(gt=0, le=32)
    radix: int = Field(ge=2, le=2**16)
    first: Code = 0
    step: int = Field(default=1, ge=0, le=LARGEST_CODE)
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "float32"


class Layer(_Strict):
    """A quantized layer.

    Attributes:
        type: the class of `qconv.layers`.
        arguments: the arguments of its float twin's constructor, except defaults.
        scheme: the name of the scheme, for tables and messages.
        input: the call that makes the input's quantizer, see `calls`.
        weight: None if the weight is float.
        padding_value: the padding of the quantized input.
        scale_map: whether the output is multiplied by XNOR-Net's K.
    """

    type: str
    arguments: dict[str, Any]
    scheme: Text
    input: dict[str, Any]
    weight: Weight | None = None
    padding_value: Literal[-1, 0, 1] = 0
    scale_map: bool = False


class Pictures(_Strict):
    """The input of the network: pixels from 0 to 255, ``(pixel − mean) / std`` in each channel.

    Attributes:
        size: channels, height and width.
        resize: the shorter side to which an image is resized before it is cropped at the centre; None resizes it to
            just cover the size.
        mean: the mean of each channel.
        std: the standard deviation of each channel.
        pixel_range: the values of grey images of more than 8 bits that become pixels of 0 and 255; None takes those
            that their format states.
    """

    size: list[Annotated[int, Field(ge=1, le=2**20)]] = Field(min_length=3, max_length=3)
    resize: Annotated[int, Field(ge=1, le=2**20)] | None = None
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]
    pixel_range: list[float] | None = None

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> "Pictures":
        if not len(self.mean) == len(self.std) == self.size[0]:
            raise ValueError(f"mean and std must have a number for each of {self.size[0]} channels")
        check_pixel_range(self.pixel_range)
        return self


class Trial(_Strict):
    """The test vector: the outputs of the model for two inputs.

    Attributes:
        shape: the shape of an input of normally distributed numbers.
        inputs: the indices of the two among 16, drawn from torch's generator on the CPU with seed 0.
        outputs: up to 32 numbers of each output, float32, little-endian, in base64.
        tolerance: the allowed difference, as a share of the largest number: the effect of rounding when it was written.
    """

    shape: list[Annotated[int, Field(ge=1, le=2**20)]] = Field(max_length=5)
    inputs: list[Annotated[int, Field(ge=0, le=15)]] = Field(min_length=2, max_length=2)
    outputs: Annotated[str, Field(min_length=1, max_length=400, pattern="^[A-Za-z0-9+/]*={0,2}$")]
    tolerance: Annotated[float, Field(gt=0, le=1)]


class Header(_Strict):
    """The metadata.

    Attributes:
        sha256: checksum of this header with an empty one, and of every tensor: name, dtype, shape and bytes.
        network: the call that makes the float network, see `calls`; None if the reader must supply it.
        layers: the quantized layers by their names in the network.
        activations: the replacements by `qconv.convert` of activations before signs, by their names.
        shared: names of tensors that are the same as another one.
        pictures: the input of the network.
        classes: the names of its outputs.
        modules: of files of before, which had hashes of the modules; it only counts for their checksum.
        trial: its outputs for two inputs; None if the shape of its inputs was unknown.
    """

    format: Literal["qconv-packed"] = FORMAT
    version: Annotated[int, Field(ge=OLDEST, le=VERSION)] = VERSION
    sha256: str = ""
    network: dict[str, Any] | None = None
    layers: dict[str, Layer] = {}
    activations: dict[str, Literal["hardtanh", "prelu", "leaky", "identity"]] = {}
    shared: dict[str, str] = {}
    pictures: Pictures | None = None
    classes: list[Text] | None = None
    modules: Annotated[str, Field(max_length=2**22, pattern="^[A-Za-z0-9+/]*$")] = ""
    trial: Trial | None = None


def to_json(described: Header) -> str:
    """The header as stored in the file, without defaults."""
    plain = described.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"format": FORMAT, "version": VERSION, **plain}, separators=(",", ":"), allow_nan=False)


def checksum(described: Header, tensors: Mapping[str, Tensor]) -> str:
    """The required value of `Header.sha256`."""
    digest = hashlib.sha256(to_json(described.model_copy(update={"sha256": ""})).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


def first_line(error: ValidationError) -> str:
    """The first error: the field, its value and the rule."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} (={first['input']!r:.200}): {first['msg']}"
