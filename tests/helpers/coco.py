"""A small data set in COCO's format, to break in all ways."""

import json
import uuid

import numpy as np
from detectron2.data.datasets import register_coco_instances
from PIL import Image

WIDTH, HEIGHT = 32, 24


def small_coco(images=3):
    """The content of an annotation file: two objects an image, of categories 3 and 7."""
    annotations = []
    for image in range(1, images + 1):
        for category, x in ((3, 2), (7, 16)):
            polygon = [x, 4, x + 10, 4, x + 10, 16, x, 16]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": category}
                | {"bbox": [x, 4, 10, 12], "area": 120, "iscrowd": 0, "segmentation": [polygon]}
            )
    return {
        "info": {},
        "images": [
            {"id": i, "file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT}
            for i in range(1, images + 1)
        ],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "circle"}, {"id": 7, "name": "star"}],
    }


def write_images(folder, names=("1.png", "2.png", "3.png")):
    for name in names:
        Image.fromarray(np.full((HEIGHT, WIDTH, 3), 90, np.uint8)).save(folder / name)


def register_small(folder, content, **metadata):
    """The new name under which a file of this content, a text or an object, is registered."""
    name = f"small_{uuid.uuid4().hex}"
    path = folder / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    register_coco_instances(name, metadata, str(path), str(folder))
    return name
