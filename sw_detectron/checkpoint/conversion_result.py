"""What a conversion is asked for and what it results in."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate
from torch import Tensor, nn

from ..layers import SwitchWhiten2d
from ..modeling.placement import numbered_convs, place
from .run_record import RunRecord, changed_record


@dataclass(frozen=True)
class Images:
    """Where statistics are taken: the first `number` images below `directory`."""

    directory: str
    number: int


@dataclass(frozen=True)
class PlacedLayer:
    """A layer of the placement: its number, its convolution's name in the ResNet, its norms."""

    number: int
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint and how it came about.

    Attributes:
        model: the tensors, by Detectron2's names.
        is_detector: they are those of a whole detector; else of a backbone, perhaps with its
            classifier, whose names are matched with the endings of a detector's.
        source: one of `sources.SOURCES`.
        config: what a config has to say for this checkpoint, by key.
        placed: the layers of the placement.
        unused: names of tensors in the source that are not in `model`.
        left_out: what the source has beside tensors, such as an optimizer's state.
        notes: what a user should know, in one line each.
        run: of a whole detector's source, what it says of its run.
    """

    model: dict[str, Tensor]
    is_detector: bool
    source: str
    config: dict[str, object]
    placed: list[PlacedLayer]
    unused: list[str]
    left_out: list[str]
    notes: list[str]
    run: RunRecord | None = None

    @property
    def carried(self) -> dict[str, object]:
        """For the checkpoint to carry: `config`, with the layers by number too, see `facts`; and
        the run's record, as if it had been trained so."""
        facts = self.config | {"MODEL.SW.LAYERS": [row.number for row in self.placed]}
        run = {"run": asdict(changed_record(self.run, self.config))} if self.run else {}
        return {"config": facts} | run

    def report(self) -> str:
        """What was done, as a table and a line for each thing to know."""
        kind = "detector" if self.is_detector else "backbone"
        table = "no layer was placed"
        if self.placed:
            rows = [(row.number, row.name, row.before, "->", row.after) for row in self.placed]
            headers = ["number", "module", "before", "", "after"]
            table = tabulate(rows, headers=headers, tablefmt="simple")
        lines = [f"source: {self.source}, a {kind}", "", table, ""]
        lines += [f"not used: {name}" for name in self.unused]
        lines += [f"left out: {name}" for name in self.left_out]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines).rstrip("\n")


def placed_layers(
    network: nn.Module, placement: str | Sequence[int], replaced: Mapping[str, nn.Module | None]
) -> list[PlacedLayer]:
    """The layers of a network's placement, with the norms that they had, by convolution, if those
    were replaced."""
    rows = []
    for conv in place(numbered_convs(network), placement):
        norm = network.get_submodule(conv.norm_name)
        before = _describe(replaced.get(conv.name, norm))
        rows.append(PlacedLayer(conv.number, conv.name, before, _describe(norm)))
    return rows


def _describe(norm: nn.Module | None) -> str:
    if norm is None:
        return "none"
    if not isinstance(norm, SwitchWhiten2d):
        return type(norm).__name__
    groups = f"{norm.num_features // norm.num_pergroup} x {norm.num_pergroup}"
    return f"SW {{{', '.join(norm.statistics)}}} {groups}"
