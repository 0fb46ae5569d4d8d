"""``python -m docs_build.recipes``: write the page of the recipes from the comments at the top of their files."""

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recipes.md"
DATA = {
    "cifar10": (
        "CIFAR-10",
        "`data.root=` is the folder of the published files (`data.download=true` fetches them). "
        "For other images of that size: "
        "`data=image_folder data.root=pictures`.",
    ),
    "imagenet": ("ImageNet", "`data.root=` is the folder with `train/<class>/*` and `val/<class>/*`."),
}
LEAD = """# Recipes

Run a published training, or one of ours, with one argument. A recipe sets network, method, optimizer and epochs.

| to do | write |
|---|---|
| run a recipe | `qconv train experiment=NAME data.root=FOLDER` |
| change it | add settings, such as `trainer.max_epochs=100` |
| see all its settings | add `--cfg job` |
| fine-tune a pretrained network on your photos | `experiment=finetune`: see [folders of photos](tutorials/folders.md) |
| start from a network (recipes with *init_from*) | `init_from=runs/float/checkpoints/best.ckpt` |
| start from random weights instead | `init_from=null` |
| name the teacher's weights (recipes with *loss.weights*) | `loss.weights=resnet34.pth` |

*Torchvision's ResNet-18* and *ResNet-34* are state dicts. Write the first with
`torch.save(torchvision.models.resnet18(weights="IMAGENET1K_V1").state_dict(), "resnet18.pth")`.

The last column has an accuracy:

| | |
|---|---|
| *Target* | published, on the original files of the data set |
| (V) | read in the repository of the authors, or of the named people |
| (M) | only in the paper |
| (S) | from another implementation |
| *Goal* | our own aim |
| *Reached* | measured with this recipe |

`experiments/cifar10_recipes` and `experiments/fast_binary` have the results of the recipes that were run here.

`python -m docs_build.recipes` generates this page from the comments in `configs/experiment`.
"""


def head(path: Path) -> str:
    """The comment at the top of a recipe, without the line of its command."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in list(lines)[2:])


def rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Name, what it trains and starts from, and its number, for each recipe in a folder."""
    for path in sorted(folder.glob("*.yaml")):
        text = re.sub(r"arXiv:(\d+\.\d+)", r"[\1](https://arxiv.org/abs/\1)", head(path))
        what, number = re.split(r"(?=\b(?:Target|Goal|Reached): )", text, maxsplit=1)
        written = path.read_text(encoding="utf-8")
        start = re.search(r"^# (.+); null starts .*\ninit_from: ", written, re.MULTILINE)
        begins = f" *init_from*: {start[1]}." if start else ""
        teacher = re.search(r"^  # the teacher: (.+) with loss.weights=", written, re.MULTILINE)
        learns = f" *loss.weights*: {teacher[1]}." if teacher else ""
        yield f"{folder.name}/{path.stem}", f"{what.strip()}{begins}{learns}", number.strip()


def page() -> str:
    """The whole page."""
    parts = [LEAD]
    for name, (title, about) in DATA.items():
        parts.append(f"\n## {title}\n\n{about}\n\n| experiment | what | accuracy |\n|---|---|---|\n")
        for recipe, *cells in rows(ROOT / "configs" / "experiment" / name):
            parts.append(f"| `{recipe}` | {' | '.join(cells)} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
