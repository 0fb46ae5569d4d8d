"""Packages that qconv uses but does not always need: which extra installs them, and what is said if one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

# The modules of each extra in pyproject.toml.
MODULES = {
    "train": (
        *("pytorch_lightning", "lightning_fabric", "torchmetrics", "torchvision", "hydra", "omegaconf", "sklearn"),
        *("scipy", "matplotlib", "numpy", "PIL", "rich", "jinja2", "yaml"),
    ),
    "sweep": ("hydra_plugins", "optuna", "submitit"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "onnx": ("onnx", "onnxruntime"),
    "openvino": ("openvino", "onnx"),
    "executorch": ("executorch",),
    "qonnx": ("qonnx", "onnx", "onnxruntime"),
    "litert": ("ai_edge_litert", "flatbuffers", "onnx"),
    "micro": ("tflite_micro",),
    "hub": ("huggingface_hub",),
    "shards": ("webdataset",),
    "timm": ("timm",),
    "heic": ("pillow_heif",),
}


def remedy(module: str) -> str:
    """The command that installs a module of `MODULES`."""
    extra = next(extra for extra, modules in MODULES.items() if module in modules)
    return f'pip install "qconv[{extra}]"'


def missing(what: str, module: str) -> str:
    """The message: `what` needs a module, which this command installs."""
    return f"{what} needs {module}: {remedy(module)}"


@contextmanager
def needed(what: str) -> Iterator[None]:
    """Around imports: if a package is missing, say that `what` needs it, and what installs it.

    Raises:
        ImportError: the package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not any(package in modules for modules in MODULES.values()):  # such as one of the user's own
            raise
        raise ImportError(missing(what, package), name=error.name) from error
