"""The configs of detectors: which norm sits where, which schedule, and that each one trains; and
how configs of all kinds are found."""

import os
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import detectron2
import pytest
import torch
import torchvision
from detectron2.config import CfgNode, LazyConfig, get_cfg
from detectron2.data import DatasetMapper
from detectron2.data.datasets import load_coco_json
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, add_sw_config
from sw_detectron.config import config_folder, find_config
from sw_detectron.data import generate_shapes
from sw_detectron.engine import Trainer, load_config

ROOT = Path(__file__).resolve().parents[1]


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
    assert {p.stem for p in config_folder().glob("coco/*_[123]x.yaml")} == set(FILES)


@pytest.fixture(scope="module")
def their_schedules():
    """Detectron2's own schedules by name: the steps, and the number of iterations."""
    folder = Path(detectron2.__file__).parent / "model_zoo/configs/common"
    cfg = LazyConfig.load(str(folder / "coco_schedule.py"))
    schedules = {}
    for times, schedule in enumerate(("1x", "2x", "3x"), start=1):
        multiplier = cfg[f"lr_multiplier_{schedule}"].scheduler
        assert list(multiplier["values"]) == [1, 0.1, 0.01]
        ends = [end / multiplier.milestones[-1] * times * 90_000 for end in multiplier.milestones]
        schedules[schedule] = (tuple(ends[:-1]), ends[-1])
    return schedules


@pytest.mark.parametrize("file", FILES)
def test_the_schedule_is_detectron2s_of_that_name(file, their_schedules):
    name, schedule = FILES[file]
    cfg = load_config(f"{file}.yaml", [])
    assert (tuple(cfg.SOLVER.STEPS), cfg.SOLVER.MAX_ITER) == their_schedules[schedule]
    assert cfg.SOLVER.IMS_PER_BATCH == 16
    base_lr = 0.01 if name.startswith("retinanet") else 0.02
    assert base_lr == cfg.SOLVER.BASE_LR
    assert (tuple(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN) == ((800,), 1333)


def test_all_configs_take_torchvisions_weights():
    pixels = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    block = torchvision.models.resnet50().layer2[0]
    for file in FILES:
        cfg = load_config(f"{file}.yaml", [])
        assert cfg.INPUT.FORMAT == "RGB"
        assert list(cfg.MODEL.PIXEL_MEAN) == pytest.approx([255 * x for x in pixels.mean])
        assert list(cfg.MODEL.PIXEL_STD) == pytest.approx([255 * x for x in pixels.std])
        assert (block.conv1.stride == (2, 2)) == cfg.MODEL.RESNETS.STRIDE_IN_1X1
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


# Networks of 101 layers take longer.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * ("R101" in name)) for name in TABLE]


@pytest.mark.parametrize("name", NAMES)
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


# Names and files


@pytest.mark.parametrize("network", ["R18", "R50"])
def test_nuclei_configs_differ_in_norms_alone(network):
    files = sorted(config_folder().glob(f"nuclei/nuclei_mask_rcnn_{network}_FPN_*.yaml"))
    norms = {path.stem.rpartition("_")[2] for path in files}
    assert norms == {"SyncBN", "SW"} | ({"GN", "SN", "SWb"} if network == "R18" else set())
    rest = set()
    for path in files:
        cfg = load_config(str(path), ["OUTPUT_DIR", ""])
        norm = path.stem.rpartition("_")[2]
        outside = "SyncBN" if norm.startswith("SW") else norm
        for part in ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD"):
            assert outside == cfg.MODEL[part].NORM
            cfg.MODEL[part].NORM = ""
        assert ("SWb" if norm == "SWb" else "SW") == cfg.MODEL.SW.NORM
        assert (cfg.MODEL.SW.PLACEMENT == "none") != norm.startswith("SW")
        del cfg.MODEL["SW"]
        rest.add(cfg.dump())
    assert len(rest) == 1


R50 = "mask_rcnn_R50_FPN_SW_2x.yaml"


def test_no_two_files_have_the_same_name():
    names = [p.name for p in config_folder().rglob("*.*") if p.is_file()]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))


def test_bare_names_find_both_kinds_of_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for suffix in (".yaml", ".py"):
        name = "mask_rcnn_R50_FPN_SW_2x" + suffix
        assert find_config(name) == config_folder() / "coco" / name
    with pytest.raises(UserError, match=r"did you mean.* mask_rcnn_R50_FPN_SW_2x\.py"):
        find_config("mask_rcnn_R50_FPN_SW2x.py")
    with pytest.raises(UserError, match=rf"did you mean {R50}"):  # where it once was
        find_config(f"configs/{R50}")
    with pytest.raises(UserError) as error:  # bases are no configs
        find_config("commom.yaml")
    assert "common.yaml" not in str(error.value)
    Path("retinanet_R50_FPN_SW_1x.yaml").touch()
    assert find_config("retinanet_R50_FPN_SW_1x.yaml") == tmp_path / "retinanet_R50_FPN_SW_1x.yaml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def load(path: Path) -> CfgNode:
    """Read by Detectron2 alone."""
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.merge_from_file(str(path))
    return cfg


def test_bases_are_found_by_their_bare_names(tmp_path):
    path = write(tmp_path / "mine.yaml", f"_BASE_: {R50}\nSEED: 3\n")
    theirs, ours = load(config_folder() / "coco" / R50), load(path)
    assert (theirs.MODEL.SW.PLACEMENT, theirs.SOLVER.MAX_ITER) == ("imagenet", 180_000)
    assert ours.SEED == 3
    ours.SEED = theirs.SEED
    assert ours == theirs


def test_a_list_of_bases_may_mix_ones_own_with_the_packages(tmp_path):
    write(tmp_path / "bases/short.yaml", "SOLVER: {MAX_ITER: 10, STEPS: [5]}")
    write(tmp_path / "bases/mine.yaml", "_BASE_: [mask_rcnn_FPN.yaml, norm_SW.yaml, short.yaml]")
    path = write(tmp_path / "again.yaml", "_BASE_: bases/mine.yaml\nSEED: 3\n")
    cfg = load(path)
    assert cfg.MODEL.MASK_ON and cfg.MODEL.FPN.NORM == "SyncBN"
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SEED) == (10, (5,), 3)


def test_a_file_beside_comes_before_the_packages(tmp_path):
    write(tmp_path / "norm_SW.yaml", "SEED: 7")
    cfg = load(write(tmp_path / "mine.yaml", "_BASE_: norm_SW.yaml"))
    assert (cfg.SEED, cfg.MODEL.SW.PLACEMENT) == (7, "imagenet")
    # It is no base of the package's files, which look beside themselves.
    cfg = load(write(tmp_path / "other.yaml", f"_BASE_: {R50}"))
    assert (cfg.SEED, cfg.MODEL.RESNETS.NORM) == (-1, "SyncBN")


def test_a_config_may_have_the_name_of_its_base(tmp_path):
    cfg = load(write(tmp_path / R50, f"_BASE_: {R50}\nSEED: 3\n"))
    assert (cfg.SEED, cfg.SOLVER.MAX_ITER) == (3, 180_000)


@pytest.mark.parametrize("base", ["mask_rcnn_R50_FPN_SW_4x.yaml", f"folder/{R50}", f"../{R50}"])
@pytest.mark.parametrize("form", ["_BASE_: {}", "_BASE_: [schedule_1x.yaml, {}]"])
def test_a_missing_base_is_one_line_with_both_names(tmp_path, base, form):
    """Only a bare name is looked up: a wrong path is a mistake."""
    write(tmp_path / "mine.yaml", form.format(base))
    path = write(tmp_path / "derived.yaml", "_BASE_: mine.yaml")
    for read in (load, lambda path: load_config(str(path), [])):
        with pytest.raises(UserError, match="did you mean") as error:
            read(path)
        message = str(error.value)
        assert str(tmp_path / "mine.yaml") in message and base in message and R50 in message
        assert "derived" not in message and "\n" not in message


def test_the_output_has_the_configs_name(tmp_path):
    cases = {
        "": "output/mine",
        f"_BASE_: {R50}\n": "output/mine",
        "OUTPUT_DIR: ./output\n": "./output",  # Detectron2's default, but asked for
        "_BASE_: base_of_mine.yaml\n": "elsewhere",
    }
    write(tmp_path / "base_of_mine.yaml", f"_BASE_: {R50}\nOUTPUT_DIR: elsewhere\n")
    for text, expected in cases.items():
        path = str(write(tmp_path / "mine.yaml", text + "VERSION: 2\n"))
        assert expected == load_config(path, []).OUTPUT_DIR
        assert load_config(path, ["OUTPUT_DIR", "./output"]).OUTPUT_DIR == "./output"
    for path in config_folder().glob("*/*.yaml"):
        if path.parent.name != "base":
            assert f"output/{path.stem}" == load_config(path.name, []).OUTPUT_DIR


SCRIPT = """
import multiprocessing
import sys
from detectron2.config import get_cfg

def main():
    cfg = get_cfg()
    cfg.merge_from_file(sys.argv[-1].removeprefix("--config-file="))
    print(cfg.OUTPUT_DIR, cfg.MODEL.SW.PLACEMENT, flush=True)

if __name__ == "__main__":
    main()
    process = multiprocessing.get_context("spawn").Process(target=main)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_other_scripts_find_bases_and_the_output_too(tmp_path):
    script = write(tmp_path / "script.py", SCRIPT)
    path = write(tmp_path / "mine.yaml", f"_BASE_: {R50}")
    command = [sys.executable, "-m", "sw_detectron.run", str(script), f"--config-file={path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == 2 * ["output/mine imagenet"], done.stderr
    write(tmp_path / "mine.yaml", "_BASE_: nowhere.yaml")
    command[-1:] = ["--config-file", str(path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "nowhere.yaml" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_installed_package_has_all_configs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    for name in ("sw_detectron", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    pip += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    installed = target / "sw_detectron/configs"
    files = [p.relative_to(ROOT / "configs") for p in config_folder().rglob("*.*") if p.is_file()]
    assert len(files) > 100
    for file in files:
        assert (installed / file).read_bytes() == (ROOT / "configs" / file).read_bytes()
    script = f"""
from sw_detectron.engine import load_config
from sw_detectron.config import find_config
print(load_config({R50!r}, []).OUTPUT_DIR, find_config({R50!r}))
"""
    environment = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [f"output/{R50[:-5]}", str(installed / "coco" / R50)], done.stderr
