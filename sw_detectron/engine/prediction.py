"""The main function of `tools/predict.py`."""

import argparse
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.utils.logger import setup_logger
from tqdm import tqdm

from ..checkpoint import Checkpointer
from ..checkpoint.reading import fetched
from ..data.media import (
    ImageFile,
    UnreadableMedia,
    VideoFile,
    find_media,
    open_media,
    output_paths,
    write_picture,
    write_video,
)
from ..data.slices import register_slice
from ..errors import UserError
from ..files import written_whole
from ..task import all_tasks, find_task
from .carried import carried_metadata
from .setup import load_config

RESULTS = "predictions.json"

logger = logging.getLogger(__name__)


def predict(args: argparse.Namespace) -> None:
    """Run a model on images and videos; write pictures of its results, and one file of them.

    The file `predictions.json` is a list of results in COCO's format: `image_id`, `category_id`
    as in the data set, `bbox` (x, y, width, height) in pixels, `score`, and for models with masks
    `segmentation` as RLE. The image ids of images and frames are 1, 2, … in the order of reading;
    each result also has the `file_name` that it is of, and in videos the `frame`, from 0. Semantic
    segmentation has a result without box and score for each class in an image, its `category_id`
    being the class's number; a classifier has one without box for each of its best classes, with
    the `category_name`.

    A file that cannot be read is named and left out. However the run ends, the file of results
    has those of all images and frames until then.

    Args:
        args: `config_file`, "" for the one that the weights carry; `weights`, or None for those of
            the config; `inputs`, files and folders, followed by KEY VALUE overrides of the config;
            `output`, a folder; `confidence`, the lowest score of a result, or None for the task's;
            `batch`, the number of pictures that the model is given at once.

    Raises:
        UserError: something that was given is wrong or missing; or, when all the rest is done,
            there were files that could not be read.
    """
    inputs, overrides = _split_overrides(args.inputs)
    if not inputs:
        raise UserError("no INPUT: name images, videos, or folders of them")
    setup_logger(name="fvcore")  # it says which weights do not fit
    setup_logger(name="sw_detectron")
    unreadable: list[UnreadableMedia] = []
    media = []
    for path in find_media(inputs):
        with _listed(unreadable):
            media.append(open_media(path))
    if not media:
        raise UserError(_summary(unreadable))
    weights = ["MODEL.WEIGHTS", args.weights] if args.weights else []
    cfg = load_config(args.config_file, [*weights, *overrides])
    folder = Path(args.output)
    _prepare(folder)
    paths = output_paths(media, folder)
    metadata = _metadata(cfg, carried=not args.config_file and "DATASETS.TEST" not in overrides)
    predictor = Predictor(cfg, metadata, args.confidence)
    predictor.load(cfg.MODEL.WEIGHTS)

    found: list[list[list[dict]]] = [[] for _ in media]  # of each item, of each of its frames
    progress = tqdm(total=sum(item.num_frames for item in media), unit=" frames")

    def pictures(index: int, frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for some in _batches(frames, args.batch):
            predictor.check(some[0], media[index].path)
            for results, picture in predictor(some):
                found[index].append(results)
                progress.update()
                yield picture

    try:
        for some in _together(media, args.batch):
            item = media[some[0]]
            if isinstance(item, VideoFile):
                with _listed(unreadable):
                    write_video(pictures(some[0], item), paths[some[0]], item.fps)
                continue
            frames = {}
            for index in some:
                with _listed(unreadable):
                    (frame,) = media[index]
                    predictor.check(frame, media[index].path)
                    frames[index] = frame
            predictions = predictor([*frames.values()]) if frames else []
            for index, (results, picture) in zip(frames, predictions):
                write_picture(picture, paths[index])
                found[index].append(results)
                progress.update()
    finally:
        progress.close()
        if progress.n:
            results = _with_origins(media, found)
            with written_whole(folder / RESULTS) as unfinished:
                unfinished.write_text(json.dumps(results))
            print(f"{str(folder / RESULTS)!r}: {len(results)} results of {progress.n} images")
            print(f"{str(folder)!r}: their pictures")
    if unreadable:
        raise UserError(_summary(unreadable))


class Predictor:
    """A trained model that gives its results in COCO's format, and draws them.

    Args:
        cfg: its weights are left alone.
        metadata: of the data set whose classes the model knows.
        confidence: the lowest score of a result, in [0, 1]; by default the task's.
    """

    def __init__(self, cfg: CfgNode, metadata: Metadata, confidence: float | None = None):
        cfg = cfg.clone()
        cfg.MODEL.WEIGHTS = ""
        self._cfg = cfg
        self._task = find_task(cfg)
        self._metadata = metadata
        self._confidence = self._task.confidence if confidence is None else confidence
        self._predict = self._task.build_predictor(cfg, self._confidence)

    def load(self, weights: str) -> None:
        """Read the weights from a file or URL.

        Raises:
            UserError: there are none, or they cannot be read.
        """
        if not weights:
            raise UserError("no weights: give --weights FILE")
        if "://" in weights:
            fetched(weights)  # with a time limit; what is loaded is its copy
        elif not os.path.isfile(weights):
            raise UserError(f"weights {weights!r} do not exist")
        Checkpointer(self._predict.model, cfg=self._cfg).load(weights)

    def check(self, frame: np.ndarray, path: Path) -> None:
        """The model takes a picture (H, W, 3) of a file.

        Raises:
            UnreadableMedia: it does not.
        """
        if hasattr(self._predict, "check"):
            try:
                self._predict.check(frame)
            except UserError as error:
                raise UnreadableMedia(f"{str(path)!r}: {error}") from None

    def __call__(self, frames: Sequence[np.ndarray]) -> list[tuple[list[dict], np.ndarray]]:
        """Detect, and draw; see `Task.results`.

        Args:
            frames: (H, W, 3) each, uint8, BGR.

        Raises:
            UserError: the model gives what no task can show, or knows other classes.
        """
        if hasattr(self._predict, "batch"):
            outputs = self._predict.batch(frames)
        else:
            outputs = map(self._predict, frames)
        return [self._results(output, frame) for output, frame in zip(outputs, frames)]

    def _results(self, outputs: dict, frame: np.ndarray) -> tuple[list[dict], np.ndarray]:
        # A detector's meta-architecture may be one that segments.
        task = next((t for t in (self._task, *all_tasks()) if t.output in outputs), None)
        if task is None:
            known = ", ".join(t.output for t in all_tasks())
            raise UserError(
                f"the model gives {', '.join(outputs)} alone; what can be shown is {known}"
            )
        if task.labelled and not task.class_names(self._metadata):
            raise UserError(
                f"data set {self._metadata.name!r} has no classes of {task.name}, which the model "
                "knows: name the model's own in DATASETS.TEST"
            )
        return task.results(outputs, frame, self._metadata, self._confidence)


def check_class(number: int, classes: Sequence[str], metadata: Metadata) -> None:
    """The data set has the class of that number, from 0.

    Raises:
        UserError: it has fewer.
    """
    if number >= len(classes):
        raise UserError(
            f"the model knows more classes than data set {metadata.name!r}, which "
            f"has {len(classes)}: name its own in DATASETS.TEST"
        )


def _split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The inputs, and the overrides: what follows from the first name of a config's section on."""
    sections = get_cfg().keys()
    for i, argument in enumerate(arguments):
        if argument.split(".")[0] in sections and not os.path.exists(argument):
            return arguments[:i], arguments[i:]
    return arguments, []


def _metadata(cfg: CfgNode, carried: bool) -> Metadata:
    """Of the classes that the model knows, if it knows any: those of the weights' run, or of the
    config's data sets."""
    if not find_task(cfg).labelled:
        return Metadata(name="")
    return carried_metadata(cfg.MODEL.WEIGHTS) if carried else find_metadata(cfg)


def find_metadata(cfg: CfgNode) -> Metadata:
    """Of the first of a config's data sets.

    Raises:
        UserError: there is none, or its classes are not known.
    """
    names = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    if not names:
        raise UserError("DATASETS.TEST is empty: name the data set whose classes the model knows")
    register_slice(names[0])
    metadata = MetadataCatalog.get(names[0])
    known = any(task.class_names(metadata) for task in all_tasks())
    ids_known = not metadata.get("json_file") or metadata.get("thing_dataset_id_to_contiguous_id")
    if not known or not ids_known:
        try:
            DatasetCatalog.get(names[0])  # many learn their classes from their annotation file
        except (KeyError, OSError) as error:
            reason = str(error.args[-1]).splitlines()[0]
            if known:
                logger.warning(f"category_id is the number of the class, from 0: {reason}")
                return metadata
            raise UserError(
                f"the classes of data set {names[0]!r} are not known: {reason}"
            ) from None
    return metadata


def _together(media: Sequence[ImageFile | VideoFile], number: int) -> Iterator[list[int]]:
    """What is read at once: a video, or up to so many images, those of similar size together."""
    videos = [isinstance(item, VideoFile) for item in media]
    for is_video, run in itertools.groupby(range(len(media)), key=videos.__getitem__):
        indices = list(run)
        if number > 1 and not is_video:
            indices.sort(key=lambda index: media[index].size)
        yield from _batches(indices, 1 if is_video else number)


def _batches(items: Iterable, number: int) -> Iterator[list]:
    items = iter(items)
    while batch := list(itertools.islice(items, number)):
        yield batch


def _with_origins(
    media: Sequence[ImageFile | VideoFile], found: Sequence[Sequence[Sequence[dict]]]
) -> list[dict]:
    """Results with what they are of.

    Args:
        found: those of each frame of each item, as far as they were read.
    """
    image_ids = itertools.count(1)
    results = []
    for item, frames in zip(media, found):
        for number, of_frame in enumerate(frames):
            origin = {"image_id": next(image_ids), "file_name": str(item.path)}
            if isinstance(item, VideoFile):
                origin["frame"] = number
            results.extend(origin | result for result in of_frame)
    return results


@contextmanager
def _listed(unreadable: list[UnreadableMedia]) -> Iterator[None]:
    """A file that cannot be read there is logged and put on the list."""
    try:
        yield
    except UnreadableMedia as error:
        logger.warning(f"Skipped a file: {error}")
        unreadable.append(error)


def _summary(unreadable: list[UnreadableMedia]) -> str:
    first, *others = unreadable
    if not others:
        return str(first)
    return f"{first}; nor are {len(others)} other files, which are named above"


def _prepare(folder: Path) -> None:
    """Make the folder of the output, and look whether it can take one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--output {str(folder)!r}: {error.strerror}") from None
    path = folder / RESULTS
    if not os.path.lexists(path):
        return
    try:
        with path.open() as file:
            is_own = re.match(r'\[(\]$|\{"image_id": \d+, "file_name": )', file.read(100))
    except (OSError, UnicodeDecodeError):
        is_own = False
    if not is_own:
        raise UserError(f"{str(path)!r} is not of an earlier prediction: give another --output")
