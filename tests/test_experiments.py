"""Every recipe composes, and trains two steps on pictures made here."""

import re
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from pytorch_lightning import Trainer

from qconv.training import make_trainer
from qconv.training.assemble import build

CONFIGS = Path(__file__).parent.parent / "configs"
EXPERIMENTS = sorted(
    str(path.relative_to(CONFIGS / "experiment").with_suffix("")) for path in (CONFIGS / "experiment").rglob("*.yaml")
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(3):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in range(4):
                Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


def composed(name: str, pictures: Path | None = None) -> DictConfig:
    overrides = [f"experiment={name}", "run_dir=x"]
    if pictures is not None and not name.startswith("digits"):
        overrides += ["data=image_folder", f"data.root={pictures}", f"+data.cache={pictures / 'cache'}"]
        overrides += ["data.batch_size=4", "data.val_size=0.25", "compile=false"]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_steps(name: str, pictures: Path) -> None:
    data, classifier, _ = build(composed(name, pictures))
    trainer: Trainer = make_trainer(accelerator="cpu", fast_dev_run=2, enable_progress_bar=False)
    trainer.fit(classifier, datamodule=data)
    assert trainer.global_step == 2
    assert all(parameter.isfinite().all() for parameter in classifier.parameters())


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if "/" in name])
def test_it_says_what_it_is(name: str) -> None:
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[1].startswith(f"# uv run train.py experiment={name} data.root=/data")
    head = "".join(line for line in lines if line.startswith("#"))
    assert "arXiv:" in head
    # A published number with its evidence tag; or, where the authors have none, what to reach.
    assert re.search(r"Target: .*\([VSM]", head) or "Goal: " in head
    config = composed(name)
    assert OmegaConf.is_missing(config.data, "root")
