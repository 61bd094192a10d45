"""The nuclei of BBBC038 (Data Science Bowl 2018, stage 1) as a folder in COCO's format.

The download has a folder for each image, `ID/images/ID.png`, with a mask for each nucleus in
`ID/masks/*.png`.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
from PIL import Image
from tqdm import tqdm

from ..errors import UserError, one_line
from .registration import whole_folder

NAME_LENGTH = 12
"""Characters of an image's id that name its file; they tell all images apart."""

MODALITIES = ("fluorescence", "stained", "brightfield")


def prepare_nuclei(download: Path, folder: Path, val: Collection[str]) -> dict[str, int]:
    """Write `train/`, `val/` and `annotations/{train,val}[_MODALITY].json` to a new folder.

    Args:
        download: the folder `stage1_train`.
        folder: it must not exist.
        val: the first `NAME_LENGTH` characters of the ids of the images in `val/`.

    Returns:
        How many images are in each annotation file, by its name.

    Raises:
        UserError: there are no images, one of them or a mask cannot be read, or `folder` exists.
    """
    if folder.exists():
        raise UserError(f"{str(folder)!r} exists already; give the name of a new folder")
    if not download.is_dir():
        raise UserError(f"{str(download)!r} is no folder; give the one of the unpacked download")
    images = sorted(d for d in download.iterdir() if (d / "images").is_dir())
    if not images:
        raise UserError(f"{str(download)!r} has no folders ID/images; is it stage1_train?")
    sizes = {}
    with whole_folder(folder) as made:
        (made / "annotations").mkdir()
        for split in ("train", "val"):
            (made / split).mkdir()
            members = [d for d in images if (d.name[:NAME_LENGTH] in val) == (split == "val")]
            records = [_convert(d, made / split) for d in tqdm(members, desc=split, unit="image")]
            for modality in (None, *MODALITIES):
                chosen = [r for r in records if modality in (None, r[0]["modality"])]
                name = split if modality is None else f"{split}_{modality}"
                if chosen or modality is None:
                    _write(made / f"annotations/{name}.json", chosen)
                    sizes[name] = len(chosen)
    return sizes


def modality_of(picture: np.ndarray) -> str:
    """Of an image (H, W, 3), uint8: stained ones have colours, and fluorescence is dark."""
    if (picture != picture[..., :1]).any():
        return "stained"
    return "brightfield" if picture.mean() > 127 else "fluorescence"


def _convert(source: Path, folder: Path) -> tuple[dict, list[dict]]:
    """Write an image as RGB; its record and its annotations, without ids."""
    path = source / "images" / f"{source.name}.png"
    picture = _read(path, "RGB")
    height, width = picture.shape[:2]
    record = {"file_name": f"{source.name[:NAME_LENGTH]}.png", "height": height, "width": width}
    Image.fromarray(picture).save(folder / record["file_name"])
    annotations = []
    for file in sorted((source / "masks").glob("*.png")):
        mask = _read(file, "L") > 0
        if mask.shape != (height, width):
            raise UserError(f"mask {str(file)!r} is not of the size of its image")
        if mask.any():
            rle = mask_util.encode(np.asfortranarray(mask.astype(np.uint8)))
            annotations.append(
                {
                    "category_id": 1,
                    "segmentation": rle | {"counts": rle["counts"].decode()},
                    "bbox": mask_util.toBbox(rle).tolist(),
                    "area": float(mask_util.area(rle)),
                    "iscrowd": 0,
                }
            )
    return record | {"modality": modality_of(picture)}, annotations


def _read(path: Path, mode: str) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert(mode))
    except Exception as error:  # Pillow's decoders have many kinds of errors
        raise UserError(f"image {str(path)!r} cannot be read: {one_line(error)}") from None


def _write(path: Path, records: Sequence[tuple[dict, list[dict]]]) -> None:
    images = [{"id": i} | record for i, (record, _) in enumerate(records, start=1)]
    annotations = [
        annotation | {"image_id": i}
        for i, (_, found) in enumerate(records, start=1)
        for annotation in found
    ]
    content = {
        "info": {"description": "BBBC038, Data Science Bowl 2018, stage 1; CC0"},
        "categories": [{"id": 1, "name": "nucleus", "supercategory": "cell"}],
        "images": images,
        "annotations": [{"id": i} | a for i, a in enumerate(annotations, start=1)],
    }
    path.write_text(json.dumps(content))
