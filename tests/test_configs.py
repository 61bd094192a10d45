"""The configs of detectors: which norm sits where, which schedule, and that each one trains."""

import re
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data.datasets import load_coco_json
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError
from sw_detectron.config import config_folder, find_config
from sw_detectron.data import generate_shapes
from sw_detectron.engine import Trainer, load_config


class Row(NamedTuple):
    """A row of Table 7: the norms of each part of the network, None for none."""

    stem: str
    placed: str  # the backbone's other layers of the placement "imagenet"
    backbone: str  # its remaining layers, shortcuts left out
    shortcut: str
    fpn: str | None
    box_head: str | None
    mask_head: str | None
    box_layers: str
    trained_from: str  # the first part of the backbone that is not frozen


HEAD = "conv1 conv2 conv3 conv4 fc1"
S = "SyncBN"
ROWS = {
    "FrozenBN": Row(*["FrozenBN"] * 4, None, None, None, "fc1 fc2", "res3"),
    "SyncBN": Row(S, S, S, S, S, S, S, HEAD, "stem"),
    "GN": Row(*["GN"] * 7, HEAD, "stem"),
    "SN": Row(*["bn in ln"] * 7, HEAD, "stem"),
    "SW": Row("bw iw", "bw iw", S, S, S, S, S, HEAD, "stem"),
    "SWb": Row("bw iw bn in ln", "bw iw bn in ln", S, S, S, S, S, HEAD, "stem"),
}

# Every sixth convolution, without the stem and without res5.
PLACED = {
    50: "res2.1 res3.0 res3.2 res4.0 res4.2 res4.4".split(),
    101: "res2.1 res3.0 res3.2".split() + [f"res4.{i}" for i in range(0, 23, 2)],
}
SCHEDULES = {
    "1x": ((60_000, 80_000), 90_000),
    "2x": ((120_000, 160_000), 180_000),
    "3x": ((210_000, 250_000), 270_000),
}


class Detector(NamedTuple):
    architecture: str
    depth: int
    norms: str
    schedules: str = "1x 2x 3x"


TABLE = {
    "mask_rcnn_R50_FPN_FrozenBN": Detector("GeneralizedRCNN", 50, "FrozenBN"),
    "mask_rcnn_R50_FPN_SyncBN": Detector("GeneralizedRCNN", 50, "SyncBN"),
    "mask_rcnn_R50_FPN_GN": Detector("GeneralizedRCNN", 50, "GN"),
    "mask_rcnn_R50_FPN_SN": Detector("GeneralizedRCNN", 50, "SN"),
    "mask_rcnn_R50_FPN_SW": Detector("GeneralizedRCNN", 50, "SW"),
    "mask_rcnn_R50_FPN_SWb": Detector("GeneralizedRCNN", 50, "SWb"),
    "mask_rcnn_R101_FPN_FrozenBN": Detector("GeneralizedRCNN", 101, "FrozenBN", "2x"),
    "mask_rcnn_R101_FPN_SyncBN": Detector("GeneralizedRCNN", 101, "SyncBN", "2x"),
    "mask_rcnn_R101_FPN_SW": Detector("GeneralizedRCNN", 101, "SW", "2x"),
    "faster_rcnn_R50_FPN_SW": Detector("GeneralizedRCNN", 50, "SW"),
    "retinanet_R50_FPN_SW": Detector("RetinaNet", 50, "SW"),
    "cascade_mask_rcnn_R50_FPN_SW": Detector("GeneralizedRCNN", 50, "SW"),
    "panoptic_fpn_R50_SW": Detector("PanopticFPN", 50, "SW"),
}
FILES = {f"{name}_{s}": (name, s) for name, d in TABLE.items() for s in d.schedules.split()}

# Two small images, few regions: a second or two for each step.
SMALL = """
    MODEL.DEVICE cpu INPUT.MIN_SIZE_TRAIN (96,) MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 8
    MODEL.RPN.PRE_NMS_TOPK_TRAIN 50 MODEL.RPN.POST_NMS_TOPK_TRAIN 20
""".split()


def test_the_table_names_every_config():
    assert {p.stem for p in config_folder().glob("*_[123]x.yaml")} == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_the_schedule_is_what_the_name_says(file):
    name, schedule = FILES[file]
    cfg = load_config(f"{file}.yaml", [])
    assert (tuple(cfg.SOLVER.STEPS), cfg.SOLVER.MAX_ITER) == SCHEDULES[schedule]
    assert cfg.SOLVER.IMS_PER_BATCH == 16
    base_lr = 0.01 if name.startswith("retinanet") else 0.02
    assert base_lr == cfg.SOLVER.BASE_LR
    assert f"output/{file}" == cfg.OUTPUT_DIR
    assert (tuple(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN) == ((800,), 1333)


def test_all_configs_take_torchvisions_weights():
    for file in FILES:
        cfg = load_config(f"{file}.yaml", [])
        assert cfg.INPUT.FORMAT == "RGB"
        assert list(cfg.MODEL.PIXEL_MEAN) == [123.675, 116.280, 103.530]
        assert list(cfg.MODEL.PIXEL_STD) == [58.395, 57.120, 57.375]
        assert not cfg.MODEL.RESNETS.STRIDE_IN_1X1
        assert TABLE[FILES[file][0]].depth == cfg.MODEL.RESNETS.DEPTH


def test_no_two_configs_are_the_same_and_schedules_differ_in_nothing_else():
    whole, network = {}, {}
    for file in FILES:
        cfg = load_config(f"{file}.yaml", ["OUTPUT_DIR", ""])
        whole[file] = cfg.dump()
        cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER = (), 0
        network[file] = cfg.dump()
    for a, b in combinations(FILES, 2):
        assert whole[a] != whole[b], (a, b)
        assert (network[a] == network[b]) == (FILES[a][0] == FILES[b][0]), (a, b)


@pytest.fixture(scope="module")
def records(datasets):
    root = datasets / "for_configs"
    generate_shapes(root, "train", num_images=2, size=96)
    return load_coco_json(str(root / "annotations/train.json"), str(root / "train"))


def norm_kind(module: nn.Module | None) -> str | None:
    if module is None:
        return None
    if isinstance(module, SwitchWhiten2d):
        return " ".join(module.statistics)
    kinds = {FrozenBatchNorm2d: "FrozenBN", nn.SyncBatchNorm: "SyncBN", nn.GroupNorm: "GN"}
    return kinds[type(module)]


def part_of(name: str, placed: list[str]) -> str:
    """Which part of the network, in the words of `Row`, a convolution belongs to."""
    if name.endswith("predictor") or name.startswith("proposal_generator"):
        return "without norm"
    parts = [
        ("backbone.bottom_up.stem", "stem"),
        (r"backbone.bottom_up.*\.shortcut", "shortcut"),
        (rf"backbone.bottom_up.({'|'.join(placed)})\.conv2", "placed"),
        ("backbone.bottom_up", "backbone"),
        ("backbone.fpn", "fpn"),
        ("roi_heads.box_head", "box_head"),
        ("roi_heads.mask_head", "mask_head"),
        ("sem_seg_head", "semantic"),
    ]
    return next(part for pattern, part in parts if re.match(pattern, name))


@pytest.mark.parametrize("name", TABLE)
def test_norms_sit_where_the_row_says_and_a_step_trains(name, records):
    detector, row = TABLE[name], ROWS[TABLE[name].norms]
    cfg = load_config(f"{name}_2x.yaml", SMALL)
    torch.manual_seed(0)
    model = build_model(cfg)
    assert type(model).__name__ == detector.architecture
    check_norms(model, name, row, PLACED[detector.depth])
    check_training_step(cfg, model, records, row.trained_from)


def check_norms(model: nn.Module, name: str, row: Row, placed: list[str]) -> None:
    found = {}
    for conv_name, conv in model.named_modules():
        if hasattr(conv, "norm"):  # Detectron2's Conv2d
            found.setdefault(part_of(conv_name, placed), []).append(norm_kind(conv.norm))
    expected = {part: getattr(row, part) for part in Row._fields[:7]}
    expected["without norm"] = None
    if row.box_head is None:
        del expected["box_head"]  # it has no convolution
    if name.startswith("retinanet"):
        for part in ("box_head", "mask_head", "without norm"):
            del expected[part]
    if name.startswith("faster"):
        del expected["mask_head"]
    if name.startswith("panoptic"):
        expected["semantic"] = "GN"
    assert {part: set(kinds) for part, kinds in found.items()} == {
        part: {kind} for part, kind in expected.items()
    }
    assert len(found["stem"]) == 1 and len(found["placed"]) == len(placed)
    assert len(found["shortcut"]) == 4
    layers = re.compile(r"roi_heads\.box_head\.(?:[012]\.)?((?:conv|fc)\d)")
    matches = [layers.fullmatch(module_name) for module_name, _ in model.named_modules()]
    heads = 3 if name.startswith("cascade") else 0 if name.startswith("retinanet") else 1
    assert [m[1] for m in matches if m] == row.box_layers.split() * heads


def check_training_step(
    cfg: CfgNode, model: nn.Module, records: list[dict], trained_from: str
) -> None:
    """Losses and parameters are finite; what is not frozen has a gradient, and nothing else."""
    batch = [DatasetMapper(cfg, True)(record) for record in records]
    for image in batch:  # the semantic labels of Panoptic FPN: bright and dark
        image["sem_seg"] = (image["image"].float().mean(0) > 128).long()
    optimizer = Trainer.build_optimizer(cfg, model)
    with EventStorage():
        losses = model.train()(batch)
    assert all(torch.isfinite(loss) and loss >= 0 for loss in losses.values()), losses
    sum(losses.values()).backward()
    optimizer.step()
    parts = ["stem", "res2", "res3"]
    frozen = tuple(f"backbone.bottom_up.{p}." for p in parts[: parts.index(trained_from)])
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        learns = p.grad is not None and bool(p.grad.any())
        assert learns == p.requires_grad == (not name.startswith(frozen)), name


def test_retinanets_anchors_divide_an_octave_in_three():
    sizes = load_config("retinanet_R50_FPN_SW_1x.yaml", []).MODEL.ANCHOR_GENERATOR.SIZES
    expected = [[2 ** (octave + third / 3) for third in range(3)] for octave in range(5, 10)]
    assert [pytest.approx(row, rel=1e-14) for row in expected] == sizes


def test_bare_names_find_both_kinds_of_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suffix in (".yaml", ".py"):
        name = "mask_rcnn_R50_FPN_SW_2x" + suffix
        assert find_config(name) == config_folder() / name
    with pytest.raises(UserError, match=r"did you mean.* mask_rcnn_R50_FPN_SW_2x\.py"):
        find_config("mask_rcnn_R50_FPN_SW2x.py")
    with pytest.raises(UserError) as error:  # bases are no configs
        find_config("commom.yaml")
    assert "common.yaml" not in str(error.value)
    Path("retinanet_R50_FPN_SW_1x.yaml").touch()
    assert find_config("retinanet_R50_FPN_SW_1x.yaml") == Path("retinanet_R50_FPN_SW_1x.yaml")
