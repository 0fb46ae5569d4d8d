"""The card of a trained network: what it is, what it was trained on and how, and what it reached."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Card(BaseModel):
    """The description of a trained network; the figures are those that its run wrote into `result.json`.

    Attributes:
        name: the name in the zoo.
        title: the network, its method and its bits in words.
        model: the call that makes the float network.
        scheme: the scheme of its quantized layers.
        bits: bits of weights and inputs of the quantized layers.
        data: the images, and how they were split.
        budget: epochs, batch and optimizer in words.
        command: the command that trained it; `data.root` is yours.
        epochs: number of epochs.
        seed: the seed.
        seconds: wall time of training and test, on a machine that did other work, too.
        test_accuracy: share of the test images that the checkpoint with the best validation accuracy gets right.
        val_accuracy_best: validation accuracy of the checkpoint that was tested.
        val_accuracy_final: validation accuracy after the last epoch.
        float_bytes: bytes of the float network's state dict.
        packed_bytes: bytes of the packed file.
        sha256: checksum of the packed file.
        commit: the commit that trained it.
        versions: of Python, torch and the others.
        machine: processor, cores, threads.
        notes: what a user should know besides.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    model: str
    scheme: str
    bits: str
    data: str
    budget: str
    command: str
    epochs: int
    seed: int
    seconds: float
    test_accuracy: float
    val_accuracy_best: float
    val_accuracy_final: float
    float_bytes: int
    packed_bytes: int
    sha256: str
    commit: str
    versions: dict[str, str]
    machine: dict[str, Any]
    notes: str = ""

    def markdown(self) -> str:
        """The card as a page, as model hubs show it."""
        rows = [
            ("network", f"`{self.model}`"),
            ("scheme", f"`{self.scheme}`, bits of weights/inputs {self.bits}"),
            ("images", self.data),
            ("budget", self.budget),
            ("test accuracy", f"{100 * self.test_accuracy:.2f} % (checkpoint with the best validation accuracy)"),
            ("validation accuracy", f"{100 * self.val_accuracy_best:.2f} % best, {100 * self.val_accuracy_final:.2f} % "
             "after the last epoch"),
            ("size", f"{self.packed_bytes:,} bytes; float {self.float_bytes:,}"),
            ("time", f"{_time(self.seconds)} on {self.machine.get('cpu')}, seed {self.seed}"),
            ("commit", f"`{self.commit}`, torch {self.versions.get('torch')}"),
            ("SHA-256", f"`{self.sha256}`"),
        ]  # fmt: skip
        table = "\n".join(f"| {head} | {text} |" for head, text in rows)
        notes = f"\n{self.notes}\n" if self.notes else ""
        return (
            f"# {self.name}\n\n{self.title}\n{notes}\n| | |\n|---|---|\n{table}\n\n"
            f"Trained by\n\n```bash\n{self.command}\n```\n\n"
            f'Use it:\n\n```python\nimport qconv\n\nmodel = qconv.load("{self.name}")\n```\n\n'
            f"```bash\nqconv predict {self.name} picture.jpg\n```\n"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
