"""The page of a run: one HTML file that needs nothing else."""

import base64
import io
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from ...ground.environment import machine, versions
from ...ground.files import write_file
from ...runs.curves import best_row
from ...runs.diagnostics_figure import FIGURES
from ...runs.run_files import PACKED
from ...summary.costs_table import format_bits, format_int
from ...summary.terminal import short
from ..resume import call, override
from .classes import class_rows, confusion, interval, worst_pairs
from .figures import panels, trend
from .gather import FLOAT, Report
from .screen import percent

SETTINGS = {
    "network": "model",
    "scheme": "scheme",
    "data": "data",
    "loss": "loss",
    "optimizer": "optimizer",
    "schedule": "scheduler",
}
"""The words for the parts of a config that are calls."""
MATRIX = 25  # classes at most of a matrix that is shown whole
ROWS = 20  # classes, or pairs of classes, that are shown at once of more
SMALL = 64  # pixels a side of an image whose pixels are shown as squares
CONSPICUOUS = {
    "weights_saturated": (0.5, "of its weights get no gradient"),
    "inputs_saturated": (0.9, "of its inputs pass no gradient on"),
    "inputs_dead": (0.25, "of its input channels have one value throughout"),
}
"""Shares above which the page points out a figure of a layer, and the words for it."""


def write_page(report: Report, path: Path) -> None:
    """Write the page of a run into a file, which is replaced as a whole or not at all."""
    write_file(path, render(report))


def render(report: Report) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "short": short, "number": format_int, "share": whole_percent}
    environment.filters |= {"pace": pace, "bits": format_bits, "address": picture_address, "is_small": is_small}
    style = Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8"))  # our own
    return environment.get_template("page.html.j2").render(style=style, **content(report))


def content(report: Report) -> dict[str, Any]:
    """Return the values for the template."""
    return {
        "report": report,
        "resume": shlex.join(["qconv", "train", f"resume={override(report.folder)}"]),
        "result": report.result,
        "title": title(report.config),
        "facts": facts(report),
        "panels": panels(report.history, _best_epoch(report), report.result),
        "tested": tested(report),
        "diagnostics": diagnostics(report.diagnostics),
        "latency": latency(report),
        "code": code(report),
        "machine": machine(),
        "version": versions().get("qconv", ""),
        "epochs": int(report.config.get("trainer", {}).get("max_epochs", 0)),
    }


def title(config: dict[str, Any]) -> dict[str, str]:
    """Name network, scheme and data in a word each."""
    names = {key: str(config[key].get("_target_", "")).rpartition(".")[2] for key in ("model", "scheme", "data")}
    return {**names, "data": names["data"].removesuffix("DataModule")}


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the settings of the run, each with its name."""
    config, result = report.config, report.result or {}
    known = [(word, call(settings(config[key]))) for word, key in SETTINGS.items() if isinstance(config.get(key), dict)]
    plain = [
        ("first and last layer", str(config.get("first_last", ""))),
        ("layers left float", ", ".join(map(str, config.get("skip", ())))),
        ("epochs", f"{len(report.history)} of {config.get('trainer', {}).get('max_epochs', '?')}"),
        ("lean gradients", str(result.get("lean", ""))),
        ("precision", str(result.get("precision", ""))),
        ("seed", str(config.get("seed", ""))),
        ("machine", _machine(result.get("machine"))),
        ("versions", ", ".join(f"{name} {version}" for name, version in (result.get("versions") or {}).items())),
        ("commit", str(result.get("commit") or "")),
        ("folder", report.folder),
    ]
    return [(word, value) for word, value in [*known, *plain] if value]


def settings(node: Any) -> Any:
    """Return a config node without Hydra's own keys."""
    if not isinstance(node, dict):
        return node
    if node.get("_target_") == "hydra.utils.get_class":
        return {"_target_": node["path"]}
    return {key: settings(value) for key, value in node.items() if key not in ("_convert_", "_partial_", "_recursive_")}


def _machine(machine: dict[str, Any] | None) -> str:
    if not machine:
        return ""
    words = machine.get("gpu"), machine.get("cpu"), f"{machine.get('threads')} threads of {machine.get('cores')} cores"
    return ", ".join(word for word in words if word)


def _best_epoch(report: Report) -> int | None:
    if report.result is not None:
        return report.result["best_epoch"]
    best = best_row(report.history)
    return None if best is None else int(best["epoch"])


def tested(report: Report) -> dict[str, Any] | None:
    """Return the test by classes; None without a test."""
    found = report.predictions
    if found is None or not len(found.labels):
        return None
    count = max(len(report.classes), 1 + int(found.labels.max()), 1 + int(found.predicted.max()))
    names = [*report.classes, *(str(index) for index in range(len(report.classes), count))]
    matrix = confusion(found.labels, found.predicted, count)
    rows = class_rows(matrix, names)
    right = int(matrix.diagonal().sum())
    low, high = interval(right / len(found.labels), len(found.labels))
    mistakes = list(zip(found.pixels, found.mistakes.tolist(), found.certain.tolist(), strict=True))
    largest = max(rows, key=lambda row: row.pictures)
    return {
        "pictures": len(found.labels),
        "right": right,
        "chance": 1 / count,
        "largest": largest.name,
        "of_largest": largest.pictures / len(found.labels),
        "low": low,
        "high": high,
        "names": names,
        "matrix": cells(matrix) if count <= MATRIX else None,
        "pairs": worst_pairs(matrix, names, ROWS),
        "classes": rows,
        "shown": rows if count <= MATRIX else rows[:ROWS],
        "mistakes": mistakes if found.pixels.shape[1] in (1, 3) else (),
    }


def cells(matrix: Tensor) -> list[list[dict[str, Any]]]:
    """Return the matrix with the strength of each cell's colour, 0 to 1: right ones by share, wrong ones by count."""
    sums = matrix.sum(1).clamp(min=1).tolist()
    most = max(1, int(matrix.clone().fill_diagonal_(0).max()))
    return [
        [
            {"count": number, "is_right": i == j, "strength": number / (sums[i] if i == j else most)}
            for j, number in enumerate(row)
        ]
        for i, row in enumerate(matrix.tolist())
    ]


def is_small(pixels: Tensor) -> bool:
    """Whether the pixels of an image are shown as squares."""
    return max(pixels.shape[1:]) <= SMALL


def picture_address(pixels: Tensor) -> str:
    """Return a uint8 image (C, H, W) as a `data:` address: exact if it is small."""
    array = pixels.permute(1, 2, 0).squeeze(2).numpy()
    picture, file = Image.fromarray(array), io.BytesIO()
    kind = "PNG" if is_small(pixels) else "JPEG"
    picture.save(file, kind, **({"optimize": True} if kind == "PNG" else {"quality": 88}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def diagnostics(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last figures of each layer with their trend, and the conspicuous ones."""
    if not rows:
        return None
    shown = {key: words for key, words in FIGURES.items() if any(key in row for row in rows)}
    by_layer: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_layer.setdefault(row["layer"], []).append(row)
    table, notes = [], []
    for name, history in by_layer.items():
        line: list[dict[str, Any] | None] = []
        for key in shown:
            values = [row[key] for row in history if key in row]
            limit, words = CONSPICUOUS.get(key, (1.0, ""))
            is_high = bool(values) and values[-1] > limit
            line.append({"value": values[-1], "trend": trend(values), "is_high": is_high} if values else None)
            if is_high and words:
                notes.append((name, f"{whole_percent(values[-1])} {words}"))
        table.append((name, line))
    return {"columns": list(shown.values()), "rows": table, "notes": notes}


def latency(report: Report) -> dict[str, Any]:
    """Return the times by form and batch size, and the forms."""
    sizes = list(report.timings)
    forms = list(report.timings[sizes[0]]) if sizes else []
    rows = [(form, [report.timings[size][form] for size in sizes]) for form in forms]
    return {"sizes": sizes, "rows": rows, "has_float": bool(forms) and forms[0] == FLOAT}


def code(report: Report) -> list[tuple[str, str]]:
    """Return code to use the network: on the command line, in Python."""
    path = Path(report.folder) / PACKED
    if not path.is_file():
        return []
    quoted = repr(str(path))
    if report.is_packed:
        build = f"model = qconv.load_packed({quoted})"
    else:
        build = f"model = qconv.load_packed({quoted}, model=build_your_float_network())"
    python = (
        f"import qconv\n\n{build}  # a torch.nn.Module, on the CPU\n"
        "frozen = qconv.freeze(model)  # its fast form for the CPU\n"
    )
    blocks = [("Load the network in Python", python)]
    if report.is_packed:
        predictor = (
            f"from qconv.zoo.predict import Predictor\n\npredict = Predictor({quoted})\n"
            'print(predict("picture.png"))  # the most probable classes\n'
        )
        folder = shlex.quote(report.folder)
        shell = (
            f"qconv predict {folder} picture.png\nqconv verify {folder}\nqconv export {folder} --to onnx\n"
            f"qconv bench model {folder}\n"
        )
        blocks = [("Name the classes of images", predictor), *blocks, ("On the command line", shell)]
    return blocks


def pace(speed: float) -> str:
    """Say how fast something is that is `speed` times as fast as another."""
    return f"{speed:.1f} times as fast" if speed >= 1 else f"{1 / speed:.1f} times slower"


def whole_percent(share: float) -> str:
    """Format 0.1234 as 12 %, and a share above 0 but below half a percent as <1 %."""
    return "<1 %" if 0 < share < 0.005 else f"{max(0.0, 100 * share):.0f} %"  # an error may be rounded to below 0
