"""Evaluates models on corrupted test images; what is measured is kept, and not measured again."""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils import comm
from torch import nn

from ..analysis.corruption import (
    CLEAN,
    Condition,
    Robustness,
    main_metrics,
    robustness,
    values_by_metric,
)
from ..cli import config_for_each, names_of_networks, output_folder
from ..config import flatten
from ..data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    ImageCorruption,
    image_names,
    library_version,
    load_library,
)
from ..data.images import images_changed
from ..data.slices import register_spread
from ..errors import UserError
from ..report.corruption import save_corruption
from ..report.tables import finite, write_text
from ..task import find_task
from .data_check import check_data, check_datasets
from .setup import evaluation_config, trained_model

Results = dict[str, dict[str, float]]
"""Of an evaluation, by task and metric."""

# Keys that change no result, or are compared otherwise.
_LEFT_OUT = ("OUTPUT_DIR", "DATALOADER.NUM_WORKERS", "MODEL.WEIGHTS")


@dataclass(frozen=True)
class Benchmark:
    """What is to be measured of each model.

    Attributes:
        conditions: `CLEAN` and the corruptions in their severities.
        images: how many, spread evenly over the test data; None for all.
        opts: overrides of the configs, keys and values in turn.
        folder: of what is measured.
    """

    conditions: tuple[Condition, ...]
    images: int | None
    opts: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Subject:
    """A model on its test data.

    Attributes:
        dataset: its name.
        cfg: whose DATASETS.TEST is this data set, or the part of it that is evaluated.
        names: of `image_names`.
        images: how many are evaluated.
        data: a digest of the images' names and annotations.
        folder: of the measurements of just this checkpoint, config and data.
    """

    dataset: str
    cfg: CfgNode
    names: Mapping[str | int, str]
    images: int
    data: str
    folder: Path


def corruption_benchmark(args: argparse.Namespace) -> dict[str, dict[str, Robustness]]:
    """Measure models under corruptions; write `results.json`, `results.md` and `corruptions.png`.

    A measurement is one model under one corruption in one severity, on the first data set of
    DATASETS.TEST. Each is written below `measured/` of the output folder when it is made, and a
    later call with the same checkpoint, config, overrides and images takes it from there. The
    config's TEST.AUG has no effect.

    Args:
        args: `config_file`, a list or None; `weights`, a list; `output`, a folder; `corruptions`
            and `severities`, texts with commas, or None for all; `images`, or None for all;
            `opts`, the overrides.

    Returns:
        By model and metric, see `main_metrics`; the same in all processes.

    Raises:
        UserError: something that was given is wrong or missing, or nothing is measured.
    """
    configs = config_for_each(args.config_file, args.weights)
    models = dict(zip(names_of_networks(configs, args.weights), zip(configs, args.weights)))
    benchmark = Benchmark(
        (CLEAN, *chosen_conditions(args.corruptions, args.severities)),
        args.images,
        tuple(args.opts),
        output_folder(args.output),
    )
    load_library()
    # All of them before the first is measured, which may take hours.
    subjects = {name: prepare(*model, benchmark) for name, model in models.items()}
    first, *others = subjects
    for name in others:
        if subjects[name].data != subjects[first].data:
            raise UserError(
                f"{first!r} is evaluated on {subjects[first].dataset!r} and {name!r} on "
                f"{subjects[name].dataset!r}, whose images or annotations are not the same: "
                "compare them on one data set, by DATASETS.TEST"
            )
    results = _measure_all(models, benchmark)
    measured = {name: values_by_metric(by_condition) for name, by_condition in results.items()}
    summed_up = {
        name: {metric: robustness(values) for metric, values in metrics.items()}
        for name, metrics in measured.items()
    }
    if comm.is_main_process():
        subject = subjects[first]
        save_corruption(benchmark.folder, subject.dataset, subject.images, measured, summed_up)
    return summed_up


def chosen_conditions(corruptions: str | None, severities: str | None) -> list[Condition]:
    """The corruptions, each in all of the severities, in the benchmark's order.

    Args:
        corruptions, severities: names or numbers with commas between; None for all.

    Raises:
        UserError: one is not known, or there is none.
    """
    chosen = []
    for kind, known, text in (
        ("corruptions", CORRUPTIONS, corruptions),
        ("severities", tuple(map(str, SEVERITIES)), severities),
    ):
        given = known if text is None else [part.strip() for part in text.split(",") if part]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UserError(
                f"--{kind} {text}: there is no {unknown[0]!r}; known: {', '.join(known)}"
            )
        if not given:
            raise UserError(f"--{kind} is empty: there is nothing to do; known: {', '.join(known)}")
        chosen.append([name for name in known if name in given])
    return [(corruption, int(severity)) for corruption in chosen[0] for severity in chosen[1]]


def prepare(config_file: str, weights: str, benchmark: Benchmark) -> Subject:
    """Read a model's config and look at its data, see `setup`.

    Raises:
        UserError: the config asks for something that is not there.
    """
    cfg = evaluation_config(config_file, weights, benchmark.opts)
    name = cfg.DATASETS.TEST[0]
    records = DatasetCatalog.get(name)
    names = image_names(records)
    if benchmark.images is not None and benchmark.images < len(records):
        cfg.DATASETS.TEST = (register_spread(name, benchmark.images),)
        check_datasets(cfg, training=False)
        records = DatasetCatalog.get(cfg.DATASETS.TEST[0])
    check_data(cfg, training=False)
    if multiprocessing.get_start_method() != "fork":
        cfg.DATALOADER.NUM_WORKERS = 0  # others would not know that images are changed
    data = _digest(*({**r, "file_name": names[_key(r)]} for r in records))
    state = os.stat(weights) if os.path.isfile(weights) else None
    file = (os.path.realpath(weights), state.st_size, state.st_mtime_ns) if state else weights
    fingerprint = _digest(file, _config_text(cfg), data, library_version())
    folder = benchmark.folder / "measured" / fingerprint[:16]
    return Subject(name, cfg, names, len(records), data, folder)


def evaluate(cfg: CfgNode, model: nn.Module, change: ImageCorruption | None) -> Results:
    """Evaluate on the config's one data set, all of its images being changed; by all processes.

    Args:
        change: None for the images as they are.

    Returns:
        The results on the main process, else {}.
    """
    trainer = find_task(cfg).trainer
    changed = images_changed(change) if change else contextlib.nullcontext()
    # Evaluators write their predictions to a folder, and print.
    with (
        changed,
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        evaluator = trainer.build_evaluator(cfg, cfg.DATASETS.TEST[0], folder)
        return dict(trainer.test(cfg, model, [evaluator]))


def _measure_all(
    models: Mapping[str, tuple[str, str]], benchmark: Benchmark
) -> dict[str, dict[Condition, Results]]:
    """By model and condition, on all processes; what was not measured yet is."""
    progress = _Progress(len(models) * len(benchmark.conditions))
    results = {}
    for name, (config_file, weights) in models.items():
        # Again, since data sets such as own_val are registered for the config that was read last.
        subject = prepare(config_file, weights, benchmark)
        # The main process says what is there, while nobody writes.
        found = comm.all_gather(_read_measured(subject, benchmark.conditions))[0]
        progress.skip(len(found), name)
        missing = [condition for condition in benchmark.conditions if condition not in found]
        for condition, measured in _measure(subject, missing):
            found[condition] = measured
            if not main_metrics(found[CLEAN]):  # known before the hours of all corruptions
                raise UserError(
                    f"the evaluation of {subject.dataset!r} gives none of the metrics that are "
                    "compared: AP, PQ, mIoU, top-1 error"
                )
            progress.done(name, condition, measured)
        results[name] = {condition: found[condition] for condition in benchmark.conditions}
    return results


def _measure(subject: Subject, missing: Sequence[Condition]) -> Iterator[tuple[Condition, Results]]:
    """One condition after the other, each written when it is there."""
    if not missing:
        return
    model = trained_model(subject.cfg)
    for condition in missing:
        change = None if condition == CLEAN else ImageCorruption(*condition, subject.names)
        measured = comm.all_gather(evaluate(subject.cfg, model, change))[0]
        if comm.is_main_process():
            _write_measured(subject, condition, measured)
        yield condition, finite(measured)


def _measured_file(subject: Subject, condition: Condition) -> Path:
    corruption, severity = condition
    return subject.folder / f"{corruption}_{severity}.json"


def _read_measured(subject: Subject, conditions: Sequence[Condition]) -> dict[Condition, Results]:
    found = {}
    for condition in conditions:
        with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or damaged
            found[condition] = json.loads(_measured_file(subject, condition).read_text())["results"]
    return found


def _write_measured(subject: Subject, condition: Condition, measured: Results) -> None:
    output_folder(subject.folder)
    record = {
        "weights": subject.cfg.MODEL.WEIGHTS,
        "data set": subject.dataset,
        "images": subject.images,
        "corruption": condition[0],
        "severity": condition[1],
        "results": finite(measured),
    }
    write_text(_measured_file(subject, condition), json.dumps(record, indent=2) + "\n")


class _Progress:
    """Says on the main process how many measurements there are, and how long the rest takes."""

    def __init__(self, total: int):
        self._total = total
        self._there = 0
        self._made = 0
        self._start = time.monotonic()

    def skip(self, number: int, name: str) -> None:
        """Of a model, before the first measurement is made of it."""
        self._there += number
        if not self._made:
            self._start = time.monotonic()
        if number:
            self._print(f"{name}: {number} were measured before")

    def done(self, name: str, condition: Condition, results: Results) -> None:
        self._there += 1
        self._made += 1
        each = (time.monotonic() - self._start) / self._made
        remaining = timedelta(seconds=round(each * (self._total - self._there)))
        what = "clean" if condition == CLEAN else f"{condition[0]}, severity {condition[1]}"
        values = ", ".join(f"{metric} {v:.1f}" for metric, v in main_metrics(results).items())
        self._print(f"{name}: {what}: {values} (remaining {remaining})")

    def _print(self, text: str) -> None:
        if comm.is_main_process():
            print(f"[{self._there}/{self._total}] {text}", flush=True)


def _key(record: Mapping) -> str | int:
    return str(record["file_name"]) if "file_name" in record else record["image_id"]


def _config_text(cfg: CfgNode) -> str:
    """All that may change a result."""
    return repr({key: value for key, value in flatten(cfg).items() if key not in _LEFT_OUT})


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()
