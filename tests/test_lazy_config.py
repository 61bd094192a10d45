"""Python configs: the same network, data and schedule as in YAML, and the tool that runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from detectron2.config import instantiate
from detectron2.data import DatasetMapper
from detectron2.data.datasets import load_coco_json
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage

from sw_detectron import UserError
from sw_detectron.config import find_config
from sw_detectron.data import generate_shapes
from sw_detectron.engine import Trainer, argument_parser, launch, load_config, load_lazy_config
from sw_detectron.engine.lazy import build_lazy_model, train_or_evaluate_lazy
from sw_detectron.modeling.summary import sw_layers

ROOT = Path(__file__).resolve().parents[1]
NAME = "mask_rcnn_R50_FPN_SW_2x"
YAML_SIZE = ["INPUT.MIN_SIZE_TRAIN", "(96,)"]
PY_SIZE = ["dataloader.train.mapper.augmentations.0.short_edge_length=[96]"]


@pytest.fixture(scope="module")
def folder(datasets):
    """Four generated images for training and two for validation."""
    root = datasets / "for_lazy_config"
    generate_shapes(root, "train", num_images=4, size=96)
    generate_shapes(root, "val", num_images=2, size=96)
    return root


@pytest.fixture(scope="module")
def batch(folder):
    records = load_coco_json(str(folder / "annotations/train.json"), str(folder / "train"))
    mapper = DatasetMapper(load_config(f"{NAME}.yaml", YAML_SIZE), True)
    return [mapper(record) for record in records[:2]]


@pytest.fixture(scope="module")
def pair():
    """The model of the YAML config, and that of the Python config with the same weights."""
    torch.manual_seed(0)
    theirs = build_model(load_config(f"{NAME}.yaml", ["MODEL.DEVICE", "cpu"]))
    ours = build_lazy_model(load_lazy_config(f"{NAME}.py", ["train.device=cpu"]))
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (theirs, ours)]
    assert list(shapes[0].items()) == list(shapes[1].items())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_the_same_weights_give_the_same_losses_and_gradients(pair, batch):
    """To the bit: it is the same computation."""
    losses, gradients = [], []
    for model in pair:
        assert model.roi_heads.batch_size_per_image == 512
        model.roi_heads.batch_size_per_image = 16  # for speed
        seed_all_rng(1)  # of the sampled regions
        with EventStorage():
            losses.append(model.train()(batch))
        sum(losses[-1].values()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert set(losses[0]) == {
        *("loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg", "loss_mask")
    }
    assert losses[0] == losses[1]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.slow
def test_the_same_weights_give_the_same_predictions(pair, batch):
    """To the bit. Untrained, all scores are alike: the threshold is lowered in both."""
    outputs = []
    for model in pair:
        model.roi_heads.box_predictor.test_score_thresh = 0.0
        with torch.no_grad():
            outputs.append(model.eval()([{"image": batch[0]["image"]}])[0]["instances"])
    assert len(outputs[0]) == 100
    for field in ("scores", "pred_classes", "pred_masks"):
        assert torch.equal(outputs[0].get(field), outputs[1].get(field))
    assert torch.equal(outputs[0].pred_boxes.tensor, outputs[1].pred_boxes.tensor)


def test_optimizer_and_schedule_are_the_same(pair):
    cfg, lazy = load_config(f"{NAME}.yaml", []), load_lazy_config(f"{NAME}.py", [])
    theirs = Trainer.build_optimizer(cfg, pair[0])
    lazy.optimizer.params.model = pair[1]
    ours = instantiate(lazy.optimizer)
    assert type(ours) is type(theirs)
    assert [settings(pair[1], ours)] == [settings(pair[0], theirs)]
    expected = build_lr_scheduler(cfg, theirs)._multiplier
    multiplier = instantiate(lazy.lr_multiplier)
    max_iter = lazy.train.max_iter
    assert max_iter == cfg.SOLVER.MAX_ITER == 180_000
    by_hand = {0: 0.001, 1_000: 1, 119_999: 1, 120_000: 0.1, 159_999: 0.1, 160_000: 0.01}
    for iteration, factor in by_hand.items():
        assert multiplier(iteration / max_iter) == pytest.approx(factor, rel=1e-12)
    for iteration in (1, 500, 999, 1_001, 60_000, 130_000, 179_999):
        # 0.1 ** 2 is not 0.01 to the bit.
        assert multiplier(iteration / max_iter) == pytest.approx(
            expected(iteration / max_iter), rel=1e-15
        )


def settings(model, optimizer):
    """The settings of every parameter, by its name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_the_data_is_the_same(folder):
    cfg, lazy = load_config(f"{NAME}.yaml", YAML_SIZE), load_lazy_config(f"{NAME}.py", PY_SIZE)
    records = load_coco_json(str(folder / "annotations/train.json"), str(folder / "train"))
    mappers = {
        "train": (DatasetMapper(cfg, True), instantiate(lazy.dataloader.train.mapper)),
        "test": (DatasetMapper(cfg, False), instantiate(lazy.dataloader.test.mapper)),
    }
    for split, two in mappers.items():
        mapped = []
        for mapper in two:
            seed_all_rng(2)  # of the flips
            mapped.append([mapper(dict(record)) for record in records])
        for a, b in zip(*mapped):
            assert torch.equal(a["image"], b["image"])
            assert a["image"].shape == ((3, 96, 96) if split == "train" else (3, 800, 800))
            if split == "train":
                assert str(a["instances"]) == str(b["instances"])
    assert (lazy.dataloader.train.dataset.names,) == cfg.DATASETS.TRAIN
    assert (lazy.dataloader.test.dataset.names,) == cfg.DATASETS.TEST
    assert lazy.dataloader.train.total_batch_size == cfg.SOLVER.IMS_PER_BATCH
    assert lazy.dataloader.train.num_workers == cfg.DATALOADER.NUM_WORKERS
    assert lazy.dataloader.train.aspect_ratio_grouping == cfg.DATALOADER.ASPECT_RATIO_GROUPING


def test_overrides_reach_the_sw_layers():
    overrides = """
        model.backbone.bottom_up.norm=SWb model.backbone.bottom_up.placement=[1,3]
        +model.backbone.bottom_up.num_pergroup=32 +model.backbone.bottom_up.statistics=[bw,ln]
        train.padding=ignored
    """.split()
    rows = sw_layers(build_lazy_model(load_lazy_config(f"{NAME}.py", overrides)))
    assert [row.name for row in rows] == ["stem.conv1", "res2.0.conv2"]
    assert all(row.layer.num_pergroup == 32 for row in rows)
    assert all(row.layer.statistics == ("bw", "ln") for row in rows)
    assert all(row.layer.padding == "ignored" for row in rows)


@pytest.mark.parametrize(
    "config, overrides, words",
    [
        ("mask_rcnn.py", [], ["mask_rcnn.py", f"{NAME}.py"]),
        (f"{NAME}.yaml", [], [f"{NAME}.yaml", "tools/train_net.py"]),
        (f"{NAME}.py", ["train.max_iters=3"], ["train.max_iters", "no such key"]),
        (f"{NAME}.py", ["train.max_iter", "3"], ["key=value", "train.max_iter"]),
        (f"{NAME}.py", ["train.max_iter=[1"], ["train.max_iter=[1"]),
        (f"{NAME}.py", ["dataloader.train.dataset.names=coco"], ["'coco'", "shapes_train"]),
    ],
)
def test_mistakes_are_one_clear_line(capsys, config, overrides, words):
    args = argument_parser("", "").parse_args(["--config", config, *overrides])
    with pytest.raises(SystemExit) as stop:
        launch(train_or_evaluate_lazy, args)
    assert isinstance(stop.value.code, str)  # Python prints it and exits with status 1
    assert "\n" not in stop.value.code
    assert all(word in stop.value.code for word in words), stop.value.code


def test_mistakes_in_a_config_are_one_clear_line(tmp_path):
    for text, words in {
        "model = dict(": "syntax error",
        "from .nowhere import model": "nowhere.py does not exist",
        "model = {}": "does not define dataloader, optimizer, lr_multiplier, train",
    }.items():
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(UserError, match=words) as error:
            load_lazy_config(str(tmp_path / "mine.py"), [])
        assert "mine.py" in str(error.value)
    with pytest.raises(UserError, match="lazyconfig_train_net.py"):
        load_config(f"{NAME}.py", [])


OURS = """
from detectron2.config import LazyConfig
from sw_detectron.config import find_config

parts = ("model", "dataloader", "optimizer", "lr_multiplier", "train")
model, dataloader, optimizer, lr_multiplier, train = LazyConfig.load(
    str(find_config("mask_rcnn_R50_FPN_SW_2x.py")), parts
)
"""


def test_the_output_has_the_configs_name(tmp_path):
    cases = {
        OURS: "output/mine_lazy",
        OURS + "del train.output_dir": "output/mine_lazy",
        OURS + "train.output_dir = './output'": "./output",
    }
    for text, expected in cases.items():
        (tmp_path / "mine.py").write_text(text)
        cfg = load_lazy_config(str(tmp_path / "mine.py"), [])
        assert expected == cfg.train.output_dir
        assert cfg.dataloader.evaluator.output_dir == f"{expected}/inference"
        cfg = load_lazy_config(str(tmp_path / "mine.py"), ["train.output_dir=elsewhere"])
        assert cfg.train.output_dir == "elsewhere"
    # Apart from the output of the YAML config of the same name.
    assert load_lazy_config(f"{NAME}.py", []).train.output_dir == f"output/{NAME}_lazy"


def test_a_config_is_read_from_within_its_folder_too(monkeypatch):
    """Its imports are relative to the folder above."""
    monkeypatch.chdir(find_config(f"{NAME}.py").parent)
    assert Path(f"{NAME}.py").is_file()
    assert load_lazy_config(f"{NAME}.py", []).train.max_iter == 180_000


@pytest.mark.parametrize(
    "override, words",
    [
        ("model.backbone.bottom_up.norm=XX", "XX"),
        ("model.backbone.bottom_up.placement=everywhere", "everywhere.*imagenet"),
        ("+model.backbone.bottom_up.num_pergroup=48", r"stem\.conv1.*48"),
        ("+model.backbone.bottom_up.groups=4", "groups"),
        ("train.padding=none", "train.padding .*zeroed.*'none'"),
    ],
)
def test_norms_that_do_not_fit_are_named(override, words):
    with pytest.raises(UserError, match=words):
        build_lazy_model(load_lazy_config(f"{NAME}.py", [override]))


MINE = """
from detectron2.config import LazyConfig
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from sw_detectron.config import find_config

for split in ("train", "val"):
    if f"mine_{{split}}" not in DatasetCatalog.list():
        register_coco_instances(
            f"mine_{{split}}", {{}}, "{root}/annotations/" + split + ".json", "{root}/" + split
        )
(model, dataloader, optimizer, lr_multiplier, train) = LazyConfig.load(
    str(find_config("mask_rcnn_R50_FPN_SW_2x.py")),
    ("model", "dataloader", "optimizer", "lr_multiplier", "train"),
)
dataloader.train.dataset.names = "mine_train"
dataloader.train.mapper.augmentations[0].short_edge_length = [64]
dataloader.train.total_batch_size = 2
dataloader.train.num_workers = 0
dataloader.train.aspect_ratio_grouping = False
dataloader.test.dataset.names = "mine_val"
dataloader.test.mapper.augmentations[0].short_edge_length = 64
dataloader.test.num_workers = 0
model.roi_heads.num_classes = 4
model.roi_heads.batch_size_per_image = 8
model.roi_heads.box_predictor.test_score_thresh = 0.0
model.proposal_generator.post_nms_topk = (20, 10)
train.update(max_iter=4, device="cpu", seed=5)
train.checkpointer.period = 2
train.precise_bn.update(enabled=True, num_iter=2)
"""


@pytest.mark.slow
def test_a_run_stopped_halfway_resumes_to_the_same_result(folder, tmp_path):
    """A user's config that builds on the package's, through the tool, in whole and in halves."""
    (tmp_path / "mine.py").write_text(MINE.format(root=folder))
    tool = [sys.executable, str(ROOT / "tools/lazyconfig_train_net.py")]
    command = [*tool, "--config", "mine.py", "train.output_dir=whole"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "12  res3.0.conv2" in done.stdout
    whole = tmp_path / "whole"
    records = [json.loads(line) for line in (whole / "metrics.json").read_text().splitlines()]
    ratios = {k: v for r in records for k, v in r.items() if k.startswith("sw/res4.4.conv2/cov/")}
    assert sum(ratios.values()) == pytest.approx(1, abs=1e-6)
    assert any("bbox/AP" in r for r in records)
    assert (whole / "inference/coco_instances_results.json").is_file()
    assert (whole / "config.yaml").is_file()
    assert "Precise statistics of 7 SW layers: 2 batches" in done.stdout
    page = (whole / "report.html").read_text()
    assert all(
        word in page for word in ("<h2>Predictions", "<h2>Losses", "res4.4.conv2", "mine_val")
    )

    rest = tmp_path / "rest"  # as the folder is after the first checkpoint
    rest.mkdir()
    shutil.copy(whole / "model_0000001.pth", rest)
    (rest / "last_checkpoint").write_text("model_0000001.pth")
    arguments = ["--config", str(tmp_path / "mine.py"), "--resume"]
    launch(
        train_or_evaluate_lazy,
        argument_parser("", "").parse_args([*arguments, f"train.output_dir={rest}"]),
    )
    ends = [torch.load(f / "model_final.pth", weights_only=False) for f in (whole, rest)]
    assert ends[0]["iteration"] == ends[1]["iteration"] == 3
    for name, value in ends[0]["model"].items():
        assert torch.equal(ends[1]["model"][name], value), name

    wanted = argument_parser("", "").parse_args([*arguments[:2], "--eval-only"])
    with pytest.raises(SystemExit, match=r"train\.init_checkpoint"):
        launch(train_or_evaluate_lazy, wanted)
    wanted.opts = [f"train.init_checkpoint={whole}/model_final.pth", f"train.output_dir={rest}"]
    shutil.rmtree(rest / "inference")
    train_or_evaluate_lazy(wanted)
    predictions = [(f / "inference/coco_instances_results.json").read_text() for f in (whole, rest)]
    assert len(json.loads(predictions[0])) > 10
    assert predictions[0] == predictions[1]
