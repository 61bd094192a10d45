"""The page of a run: everything is in it, and nothing outside of it."""

import base64
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog
from PIL import Image
from torch import nn

from sw_detectron.data import generate_shapes, register_shapes
from sw_detectron.engine import load_config
from sw_detectron.errors import UserError
from sw_detectron.layers import SwitchWhiten2d
from sw_detectron.report import write_page
from sw_detectron.task import find_task

SHAPES = "shapes_mask_rcnn_R18_FPN_SW.yaml"
RESULTS = {
    "bbox": {"AP": 12.345, "AP50": 45.678, "AP-star<1>": 9.876},
    "segm": {"AP": 21.5, "AP50": float("nan")},
}
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Page(HTMLParser):
    """The parts of a page that a test asks about."""

    def __init__(self, path):
        super().__init__()
        self.images, self.attributes, self.text = {}, [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag == "img":
            self.images[dict(attrs)["alt"]] = dict(attrs)["src"]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """`shapes_val`, for once a split of four images only."""
    root = tmp_path_factory.mktemp("shapes")
    generate_shapes(root, "val", 4)
    register_shapes(root)
    yield DatasetCatalog.get("shapes_val")
    register_shapes()


@pytest.fixture
def make_run(shapes, tmp_path):
    """Write the records of a run, and its predictions if asked to; returns the config."""

    def make(sw=True, predictions=True, evaluations=2, tail=""):
        folder = tmp_path / "a <run>"
        (folder / "inference").mkdir(parents=True)
        with open(folder / "metrics.json", "w") as file:
            for iteration in (19, 39, 59):
                record = {"iteration": iteration, "total_loss": 1 / iteration, "loss_cls": 0.5}
                if sw:
                    record |= {f"sw/0/{m}/{k}": 0.5 for m in ("mean", "cov") for k in ("bw", "iw")}
                if iteration >= 79 - 20 * evaluations:
                    record |= {f"bbox/{key}": value for key, value in RESULTS["bbox"].items()}
                file.write(json.dumps(record) + "\n")
            file.write(tail)
        if predictions:
            annotations = shapes[0]["annotations"]
            found = [
                {
                    "image_id": shapes[0]["image_id"],
                    "category_id": 1,
                    "score": 0.9,
                    "bbox": a["bbox"],
                }
                for a in annotations
            ]
            (folder / "inference/coco_instances_results.json").write_text(json.dumps(found))
        return load_config(SHAPES, ["OUTPUT_DIR", str(folder)])

    return make


def decode(source):
    """The size of the picture of a data URL."""
    kind, data = re.fullmatch(r"data:image/([\w+]+);base64,(.+)", source).groups()
    content = base64.b64decode(data, validate=True)
    if kind == "svg+xml":
        root = ElementTree.fromstring(content)
        links = [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)
        return tuple(float(root.attrib[name].removesuffix("pt")) for name in ("width", "height"))
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        return image.size


def page_of(cfg, model, results):
    folder = Path(cfg.OUTPUT_DIR)
    sections = find_task(cfg).page_sections(cfg, cfg.DATASETS.TEST, folder)
    return write_page(folder, model, results, cfg.dump(), sections)


def test_the_page_holds_the_run(make_run):
    cfg = make_run()
    path = page_of(cfg, nn.Sequential(SwitchWhiten2d(16)), RESULTS)
    page = Page(path)
    assert list(page.images) == [
        "ground truth beside predictions on shapes_val",
        "losses by iteration",
        "evaluations by iteration",
        "importance ratios by iteration",
        "final importance ratios",
    ]
    for text in ("a <run>", "12.35", "45.68", "star<1>", "9.88", "21.50", "nan", "bw, iw"):
        assert text in page.text, text
    assert "PLACEMENT: segmentation" in page.text
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_every_picture_decodes_and_nothing_lies_outside(make_run):
    path = page_of(make_run(), nn.Sequential(SwitchWhiten2d(16)), RESULTS)
    page = Page(path)
    for source in page.images.values():
        assert min(decode(source)) > 100
    for name, value in page.attributes:
        assert name not in ("href", "srcset", "action", "data"), name
        assert name != "src" or value.startswith("data:"), value
    text = path.read_text()
    for word in ("<script", "<link", "<iframe", "@import", "url("):
        assert word not in text


def test_a_run_without_sw_has_a_page_too(make_run):
    cfg = make_run(sw=False, predictions=False, evaluations=1)
    page = Page(page_of(cfg, nn.Sequential(nn.Conv2d(3, 4, 1)), RESULTS))
    assert list(page.images) == ["losses by iteration"]  # one evaluation makes no curve
    assert "no SW layers" in page.text
    assert "12.35" in page.text


def test_a_run_that_was_not_evaluated_has_a_page_too(make_run):
    cfg = make_run(predictions=False, tail='{"iteration": 79, "total_l')
    page = Page(page_of(cfg, nn.Sequential(), None))
    assert "Results" not in page.text
    assert "losses by iteration" in page.images


def test_predictions_of_another_data_set_are_left_out(make_run, caplog):
    cfg = make_run()
    path = f"{cfg.OUTPUT_DIR}/inference/coco_instances_results.json"
    with open(path, "w") as file:
        json.dump([{"image_id": 1, "category_id": 77, "score": 0.9, "bbox": [1, 1, 9, 9]}], file)
    page = Page(page_of(cfg, nn.Sequential(), RESULTS))
    assert "losses by iteration" in page.images
    assert not any("predictions" in name for name in page.images)
    assert "no category of id 77" in caplog.text


class Rows(HTMLParser):
    """The tables of a page, as lists of rows of cells."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.in_cell = [], False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.in_cell = tag in ("td", "th")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        if self.in_cell:
            self.tables[-1][-1][-1] += data.strip()


NAMES = ["wall", "Cabinet/shelf", "a-b", "-", "", "x<y>|z&", "bbox/AP"]


def test_each_category_has_one_row_whatever_its_name(make_run):
    cfg = make_run(predictions=False)
    iou = {f"IoU-{name}": float(i) for i, name in enumerate(NAMES)}
    acc = {f"ACC-{name}": 10.0 + i for i, name in enumerate(NAMES) if name != "a-b"}
    results = {
        "sem_seg": {"mIoU": 50.0, **iou, "mACC": 60.0, **acc},
        "bbox": {"AP": 1.0} | {f"AP-{name}": 0.5 for name in NAMES},
    }
    tables = Rows(page_of(cfg, nn.Sequential(), results)).tables
    assert tables[0] == [["task", "mIoU", "mACC"], ["sem_seg", "50.00", "60.00"]]
    accuracies = [f"{10 + i}.00" if name != "a-b" else "" for i, name in enumerate(NAMES)]
    rows = [[name, f"{i}.00", accuracies[i]] for i, name in enumerate(NAMES)]
    assert tables[1] == [["category", "IoU", "ACC"], *rows]
    assert tables[2] == [["task", "AP"], ["bbox", "1.00"]]
    assert tables[3] == [["category", "AP"], *([name, "0.50"] for name in NAMES)]
    assert len(tables) == 4


def test_layers_of_an_earlier_run_in_the_folder_are_left_out(make_run):
    cfg = make_run(predictions=False)
    page = Page(page_of(cfg, nn.Sequential(nn.Identity(), SwitchWhiten2d(16)), RESULTS))
    assert not any("importance" in name for name in page.images)  # the records are of layer 0


def test_results_of_several_data_sets_are_told_apart(make_run):
    cfg = make_run(predictions=False)
    page = Page(page_of(cfg, nn.Sequential(), {"a": RESULTS, "b": {"bbox": {"AP": 1.0}}}))
    assert all(name in page.text for name in ("a/bbox", "a/segm", "b/bbox"))


def test_a_run_without_records_is_named(make_run):
    cfg = make_run()
    with open(f"{cfg.OUTPUT_DIR}/metrics.json", "w"):
        pass
    with pytest.raises(UserError, match="metrics.json"):
        page_of(cfg, nn.Sequential(), RESULTS)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_a_browser_without_network_shows_every_picture(make_run, tmp_path):
    path = page_of(make_run(), nn.Sequential(SwitchWhiten2d(16)), RESULTS)
    script = """<script>addEventListener("load", () => { document.title =
        [...document.images].map(image => image.complete && image.naturalWidth).join(" ") +
        " and " + performance.getEntriesByType("resource")
            .filter(entry => !entry.name.startsWith("data:")).length })</script>"""
    copy = tmp_path / "copy.html"
    copy.write_text(path.read_text().replace("</body>", f"{script}</body>"))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        + ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}"]
        + ["--virtual-time-budget=5000", "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    widths, requests = re.search(r"<title>([\d ]+) and (\d+)</title>", done.stdout).groups()
    assert len(widths.split()) == 5
    assert all(int(width) > 100 for width in widths.split())
    assert requests == "0"
