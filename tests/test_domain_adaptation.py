"""Domain adaptation: networks, the adversarial step, data sets, and the page of a run."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.events import EventStorage
from helpers.ranks import spawn
from helpers.runs import TRAIN_NET, check_killed_run_resumes_to_the_same_result, refuse, run
from PIL import Image
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError
from sw_detectron.data.images import read_image
from sw_detectron.engine.optimizer import build_lr_scheduler
from sw_detectron.engine.setup import load_config
from sw_detectron.modeling.vgg import VGG
from sw_detectron.tasks.domain_adaptation import shapes
from sw_detectron.tasks.domain_adaptation.data import CITYSCAPES_IDS, load_gta5
from sw_detectron.tasks.domain_adaptation.model import (
    AdaptedSegmentor,
    DeepLabV2Head,
    Discriminator,
)
from sw_detectron.tasks.domain_adaptation.page import accuracy_figure, predictions_figure
from sw_detectron.tasks.domain_adaptation.step import AdversarialStep
from sw_detectron.tasks.segmentation.data import read_labels

SHAPES = "shapes_adaptation_VGG_SW.yaml"
PAPER = "gta5_cityscapes_VGG16_SW.yaml"
THIN = "MODEL.VGG.CHANNELS [16,16,16,16,16] MODEL.VGG.FC_CHANNELS 16".split()
K, WEIGHT = 3, 0.3


def make_networks(norm=None, dtype=torch.float64):
    torch.manual_seed(0)
    backbone = VGG(channels=(4, 4, 4, 4, 4), fc_channels=4)
    if norm:
        backbone.group1.conv1.norm = norm(4)
    head = DeepLabV2Head(
        in_feature="fc7", in_channels=4, num_classes=K, dilations=[1, 2], ignore_value=255
    )
    for classifier in head.classifiers:
        nn.init.normal_(classifier.weight)  # so that a prediction says something
    model = AdaptedSegmentor(
        backbone=backbone,
        sem_seg_head=head,
        pixel_mean=[100.0, 110.0, 120.0],
        pixel_std=[50.0, 55.0, 60.0],
    )
    return model.to(dtype), Discriminator(K, 4).to(dtype)


def batch(seed, size=(40, 48), labelled=False, number=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(number):
        inputs.append({"image": torch.randint(0, 256, (3, *size), generator=generator)})
        if labelled:
            inputs[-1]["sem_seg"] = torch.randint(0, K, size, generator=generator)
    return inputs


class Loader:
    """Batches by their number, from the iteration that a resumed run begins with."""

    def __init__(self, first, **kwargs):
        self.resumable_sampler = type("Sampler", (), {"start": 0})()
        self._first, self._kwargs = first, kwargs

    def __iter__(self):
        for number in itertools.count(self.resumable_sampler.start):
            yield batch(self._first + number, **self._kwargs)


def make_step(model, discriminator, lr=0.1, **kwargs):
    loaders = (Loader(0, labelled=True), Loader(100, size=(64, 40)))
    optimizers = (
        torch.optim.SGD(model.parameters(), lr=lr),
        torch.optim.Adam(discriminator.parameters(), lr=lr),
    )
    return AdversarialStep(
        model,
        discriminator,
        loaders,
        optimizers,
        images_per_step=1,
        adversarial_weight=WEIGHT,
        **kwargs,
    )


def take_step(step, iteration=0):
    with EventStorage(iteration) as storage:
        step.iter = iteration
        step.run_step()
    return {name: value for name, (value, _) in storage.latest().items()}


def gradients(network):
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def test_discriminator_has_the_parameters_of_five_convolutions():
    widths = [19, 64, 128, 256, 512, 1]
    expected = sum(16 * a * b + b for a, b in itertools.pairwise(widths))
    assert sum(p.numel() for p in Discriminator(19).parameters()) == expected


def test_discriminator_is_what_is_written_down():
    net = Discriminator(K, 4).double()
    logits = torch.randn(2, K, 64, 96, dtype=torch.float64)
    x = torch.exp(logits) / torch.exp(logits).sum(dim=1, keepdim=True)
    parameters = list(net.parameters())
    for number, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2])):
        assert weight.shape[2:] == (4, 4)
        x = F.conv2d(x, weight, bias, stride=2, padding=1)
        x = x if number == 4 else torch.where(x > 0, x, 0.2 * x)
    assert x.shape == (2, 1, 2, 3)
    torch.testing.assert_close(net(logits), x)


def test_head_is_a_sum_of_dilated_convolutions():
    cfg = load_config(PAPER, [])
    assert cfg.MODEL.SEM_SEG_HEAD.DILATIONS == [6, 12]
    torch.manual_seed(0)
    shape = {"fc7": VGG().output_shape()["fc7"]}
    head = DeepLabV2Head(cfg, shape)
    weights = [p for p in head.parameters() if p.dim() == 4]
    assert [w.shape for w in weights] == [(19, 1024, 3, 3)] * 2
    assert all(abs(w.std() - 0.01) < 1e-4 and abs(w.mean()) < 1e-4 for w in weights)
    x = torch.randn(1, 1024, 30, 31)
    low = sum(F.conv2d(F.pad(x, [d] * 4), w, dilation=d) for w, d in zip(weights, (6, 12)))
    expected = F.interpolate(low, size=(240, 250), mode="bilinear")
    torch.testing.assert_close(head.logits({"fc7": x}, (240, 250)), expected)
    cfg.MODEL.SEM_SEG_HEAD.DILATIONS = []
    with pytest.raises(UserError, match="one or more DILATIONS, got"):
        DeepLabV2Head(cfg, shape)


def test_loss_is_the_mean_over_labelled_pixels():
    _, head = make_networks()[0], make_networks()[0].sem_seg_head
    logits = torch.randn(1, K, 5, 6, dtype=torch.float64)
    labels = torch.randint(0, K, (1, 5, 6))
    labels[0, 2:] = 255
    chances = logits.softmax(dim=1)[0, :, :2].gather(0, labels[:, :2])
    torch.testing.assert_close(head.loss(logits, labels), -chances.log().mean())
    assert head.loss(logits, torch.full_like(labels, 255)) == 0


def test_predictions_have_the_size_that_is_asked_for():
    model, _ = make_networks()
    model.eval()
    inputs = batch(0) + batch(1, size=(24, 32))
    inputs[0] |= {"height": 80, "width": 96}
    with torch.no_grad():
        found = [output["sem_seg"] for output in model(inputs)]
        low = model([{"image": inputs[0]["image"]}])[0]["sem_seg"]
        alone = model([{"image": inputs[0]["image"]} | {"height": 80, "width": 96}])[0]["sem_seg"]
    assert [f.shape for f in found] == [(K, 80, 96), (K, 24, 32)]
    torch.testing.assert_close(found[0], alone)
    expected = F.interpolate(low[None], size=(80, 96), mode="bilinear")[0]
    torch.testing.assert_close(found[0], expected)


def test_gradients_are_those_of_the_equations():
    """The network's reach it through the discriminator, whose own do not reach the network."""
    model, critic = make_networks()
    expected_model, expected_critic = copy.deepcopy(model), copy.deepcopy(critic)
    step = make_step(model, critic, lr=0.0)
    recorded = take_step(step)

    def predict(network, inputs):
        image = inputs[0]["image"].double()[None]
        mean = torch.tensor([100.0, 110.0, 120.0], dtype=torch.float64).view(1, 3, 1, 1)
        std = torch.tensor([50.0, 55.0, 60.0], dtype=torch.float64).view(1, 3, 1, 1)
        features = network.backbone((image - mean) / std)["fc7"]
        low = sum(classifier(features) for classifier in network.sem_seg_head.classifiers)
        return F.interpolate(low, size=image.shape[2:], mode="bilinear")

    def log_chance(said, domain):
        return (torch.sigmoid(said) if domain else 1 - torch.sigmoid(said)).log().mean()

    source, target = batch(0, labelled=True), batch(100, size=(64, 40))
    of_source, of_target = predict(expected_model, source), predict(expected_model, target)
    labels = F.one_hot(source[0]["sem_seg"], K).permute(2, 0, 1)[None]
    loss_seg = -(of_source.log_softmax(dim=1) * labels).sum(dim=1).mean()
    loss_adv = -WEIGHT * log_chance(expected_critic(of_target), 0)
    names, parameters = zip(*expected_model.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss_seg + loss_adv, parameters)))
    without = dict(
        zip(
            names,
            torch.autograd.grad(
                -log_chance(expected_critic(predict(expected_model, target)), 0), parameters
            ),
        )
    )
    assert all(gradient.abs().max() > 0 for gradient in without.values())
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)

    said = [expected_critic(x.detach()) for x in (of_source, of_target)]
    loss_d = -(log_chance(said[0], 0) + log_chance(said[1], 1)) / 2
    names, parameters = zip(*expected_critic.named_parameters())
    wanted = dict(zip(names, torch.autograd.grad(loss_d, parameters)))
    for name, gradient in gradients(critic).items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)

    right = [(said[0] <= 0).double().mean(), (said[1] > 0).double().mean()]
    for name, value in {
        "loss_seg": loss_seg,
        "loss_adv": loss_adv,
        "loss_d": loss_d,
        "discriminator_accuracy": sum(right) / 2,
        "total_loss": loss_seg + loss_adv,
    }.items():
        assert recorded[name] == pytest.approx(value.item(), rel=1e-6), name


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: SwitchWhiten2d(c, num_pergroup=4)])
def test_running_values_are_of_both_domains_or_of_the_target(norm):
    start, critic = make_networks(norm)
    source, target = batch(0, labelled=True), batch(100, size=(64, 40))
    found = {}
    for of_target in (False, True):
        step = make_step(copy.deepcopy(start), copy.deepcopy(critic), target_statistics=of_target)
        take_step(step)
        found[of_target] = dict(step.model.backbone.group1.conv1.norm.named_buffers())
        momentum = step.model.backbone.group1.conv1.norm.momentum
        assert momentum == 0.1
    for of_target, seen in ((False, [source, target]), (True, [target])):
        # The weights of one step are the same for both passes.
        model = copy.deepcopy(start).train()
        for inputs in seen:
            model(inputs)
        for name, value in model.backbone.group1.conv1.norm.named_buffers():
            if name != "num_batches_tracked":
                torch.testing.assert_close(found[of_target][name], value, msg=name)
    assert any(not torch.equal(found[True][k], found[False][k]) for k in found[True])


def step_of_rank(rank, world_size):
    from torch.nn.parallel import DistributedDataParallel

    model, critic = make_networks()
    networks = [model, critic]
    if world_size > 1:
        networks = [
            DistributedDataParallel(network, broadcast_buffers=False) for network in networks
        ]
    step = make_step(*networks, lr=0.0)
    inputs = [batch(0, labelled=True, number=2), batch(100, number=2)]
    if world_size > 1:
        inputs = [images[rank : rank + 1] for images in inputs]
    step._batches = [iter([images]) for images in inputs]
    with EventStorage():
        step.iter = 0
        step.run_step()
    return gradients(model), gradients(critic)


def test_two_processes_have_the_gradients_of_one(tmp_path):
    expected = step_of_rank(0, 1)
    for found in spawn(step_of_rank, 2, tmp_path):
        for ours, theirs in zip(found, expected):
            for name, gradient in ours.items():
                torch.testing.assert_close(gradient, theirs[name], msg=name)


def test_a_step_has_all_of_its_state():
    def make():
        return make_step(*make_networks(nn.BatchNorm2d))

    whole = make()
    for iteration in range(4):
        take_step(whole, iteration)
    first = make()
    for iteration in range(2):
        take_step(first, iteration)
    rest = make()
    rest.model.load_state_dict(first.model.state_dict())
    rest.load_state_dict(copy.deepcopy(first.state_dict()))
    rest.continue_from(2)
    for iteration in range(2, 4):
        take_step(rest, iteration)
    for ours, theirs in ((rest.model, whole.model), (rest.discriminator, whole.discriminator)):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name


def test_a_loss_that_is_not_finite_ends_the_run():
    step = make_step(*make_networks())
    nn.init.constant_(step.discriminator[0].bias, float("nan"))
    with pytest.raises(FloatingPointError):
        take_step(step)


def test_rates_fall_to_zero_at_an_iteration_after_the_end():
    cfg = load_config(PAPER, [])
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.POLY_LR_MAX_ITER) == (150000, 250000)
    options = ["SOLVER.MAX_ITER", "6", "SOLVER.POLY_LR_MAX_ITER", "10"]
    cfg = load_config(PAPER, options)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=cfg.SOLVER.BASE_LR)
    schedule = build_lr_scheduler(cfg, optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([2.5e-4 * (1 - i / 10) ** 0.9 for i in range(6)])
    cfg.SOLVER.POLY_LR_MAX_ITER = 5
    with pytest.raises(UserError, match="POLY_LR_MAX_ITER 5 is before the end"):
        build_lr_scheduler(cfg, optimizer)


@pytest.mark.parametrize(
    "name, statistics",
    [("none", None), ("BN", None), ("SN", "bn in ln"), ("SW", "bw iw"), ("SWb", "bw iw bn in ln")],
)
def test_configs_differ_in_the_norm_alone(name, statistics):
    from detectron2.modeling import build_backbone

    cfg = load_config(f"gta5_cityscapes_VGG16_{name}.yaml", [])
    base = load_config(PAPER, [])
    for key in ("NORM", "PLACEMENT"):
        base.MODEL.SW[key] = cfg.MODEL.SW[key]
    base.OUTPUT_DIR = cfg.OUTPUT_DIR
    assert cfg == base
    with torch.device("meta"):
        backbone = build_backbone(cfg)
    norms = {f"group{k}": getattr(backbone, f"group{k}").conv1.norm for k in range(1, 6)}
    kinds = {type(norm) for norm in norms.values()}
    if name == "none":
        assert kinds == {type(None)}
    elif name == "BN":
        assert kinds == {nn.BatchNorm2d}
    else:
        assert kinds == {SwitchWhiten2d}
        assert {" ".join(norm.statistics) for norm in norms.values()} == {statistics}


def make_gta5(root, number=3, size=(64, 48)):
    """In GTA5's layout: images, and labels with a palette, whose numbers are Cityscapes' ids."""
    rng = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (root / "gta5" / kind).mkdir(parents=True)
    for k in range(1, number + 1):
        pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(root / f"gta5/images/{k:05d}.png")
        labels = Image.fromarray(rng.integers(0, 35, (size[1], size[0]), np.uint8), mode="P")
        labels.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
        labels.save(root / f"gta5/labels/{k:05d}.png")


def make_cityscapes(root, size=(128, 64)):
    rng = np.random.default_rng(1)
    for split, number in (("train", 3), ("val", 2)):
        images, labels = (
            root / "cityscapes" / kind / split / "bonn" for kind in ("leftImg8bit", "gtFine")
        )
        for folder in (images, labels):
            folder.mkdir(parents=True)
        for k in range(number):
            stem = f"bonn_{k:06d}_000019"
            pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).save(images / f"{stem}_leftImg8bit.png")
            if split == "val":
                ids = rng.choice([*range(19), 255], (size[1], size[0])).astype(np.uint8)
                for kind in ("labelTrainIds", "labelIds", "instanceIds"):
                    Image.fromarray(ids).save(labels / f"{stem}_gtFine_{kind}.png")
                content = {"imgHeight": size[1], "imgWidth": size[0], "objects": []}
                (labels / f"{stem}_gtFine_polygons.json").write_text(json.dumps(content))


def test_ids_of_files_become_classes(tmp_path):
    values = np.array([[7, 8, 33, 0], [6, 34, 19, 255]], np.uint8)
    Image.fromarray(values).save(tmp_path / "labels.png")
    found = read_labels(str(tmp_path / "labels.png"), 19, 255, label_ids=CITYSCAPES_IDS)
    assert found.tolist() == [[0, 1, 18, 255], [255, 255, 6, 255]]
    # By Cityscapes' own table, whose names Detectron2 has too.
    names = MetadataCatalog.get("gta5_train").stuff_classes
    ids = dict(zip(names, CITYSCAPES_IDS))
    assert (ids["road"], ids["pole"], ids["sky"], ids["bicycle"]) == (7, 17, 23, 33)
    with pytest.raises(UserError, match="has the value 7|have the value 7"):
        read_labels(str(tmp_path / "labels.png"), 5, 255)


def test_folders_of_ones_own_have_ids_too(tmp_path):
    for kind in ("images", "labels"):
        (tmp_path / kind).mkdir()
        Image.fromarray(np.full((4, 4), 40, np.uint8)).save(tmp_path / kind / "a.png")

    def load(ids):
        folder = f"IMAGES: {tmp_path}/images, LABELS: {tmp_path}/labels, CLASSES: 2"
        path = tmp_path / "config.yaml"
        path.write_text(
            f"_BASE_: {SHAPES}\nDATASETS:\n  SEM_SEG_FOLDERS:\n"
            f"    own_ids: {{{folder}, LABEL_IDS: {ids}}}\n"
        )
        load_config(str(path), [])

    load([30, 40])
    (record,) = DatasetCatalog.get("own_ids")
    labels = read_labels(record["sem_seg_file_name"], 2, 255, label_ids=record["label_ids"])
    assert (labels == 1).all()
    with pytest.raises(
        UserError, match="LABEL_IDS are 1 different values, but there are 2 classes"
    ):
        load([30, 30])


def test_gta5_leaves_out_images_whose_labels_differ_in_size(tmp_path, caplog):
    make_gta5(tmp_path)
    Image.new("P", (32, 32)).save(tmp_path / "gta5/labels/00002.png")
    records = load_gta5("gta5_train", tmp_path / "gta5/images", tmp_path / "gta5/labels")
    assert [record["file_name"][-9:] for record in records] == ["00001.png", "00003.png"]
    assert "without 1 of 3 images" in caplog.text
    assert "00002.png" in caplog.text


def test_data_sets_that_are_not_there(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"_BASE_: {SHAPES}\nDATASETS:\n  IMAGE_FOLDERS: {{mine: {tmp_path}/none}}\n"
        "  TARGET: [mine]\n"
    )
    said = refuse(capsys, "--config", str(config), "OUTPUT_DIR", str(tmp_path / "run"))
    assert "data set 'mine' is not there" in said
    assert "set DATASETS.IMAGE_FOLDERS.mine to a folder of images" in said
    config.write_text(f"_BASE_: {SHAPES}\nDATASETS:\n  IMAGE_FOLDERS: {{mine: [a, b]}}\n")
    said = refuse(capsys, "--config", str(config), "OUTPUT_DIR", str(tmp_path / "run"))
    assert "DATASETS.IMAGE_FOLDERS.mine ['a', 'b'] must be a folder of images" in said
    said = refuse(capsys, "--config", PAPER, "OUTPUT_DIR", str(tmp_path / "run"))
    assert "data set 'gta5_train' is not there" in said
    assert "DETECTRON2_DATASETS" in said
    said = refuse(
        capsys, "--config", SHAPES, "DATASETS.TARGET", "()", "OUTPUT_DIR", str(tmp_path / "run")
    )
    assert "error: DATASETS.TARGET is empty: name the data sets of the target" in said


def test_images_that_are_too_small_for_the_discriminator(tmp_path, capsys, datasets, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(datasets))
    shapes.register_shapes_adaptation()
    said = refuse(
        capsys,
        "--config",
        SHAPES,
        "INPUT.TARGET_SIZE",
        "[24, 64]",
        "OUTPUT_DIR",
        str(tmp_path / "run"),
    )
    assert "INPUT.TARGET_SIZE [24, 64]" in said
    assert "at least 32 pixels" in said


def test_the_generated_domains_show_the_same_scenes(datasets):
    shapes.register_shapes_adaptation(datasets / "shapes")
    pair = [DatasetCatalog.get(f"shapes_{domain}_train")[5] for domain in ("flat", "textured")]
    flat, textured = (read_image(record["file_name"], "RGB") for record in pair)
    assert pair[0]["sem_seg_file_name"] == pair[1]["sem_seg_file_name"]
    labels = read_labels(pair[0]["sem_seg_file_name"], 5, 255)
    background = flat[labels == 0]
    assert (background == background[0]).mean() > 0.99
    assert len(np.unique(flat.reshape(-1, 3), axis=0)) <= 5
    assert len(np.unique(textured.reshape(-1, 3), axis=0)) > 1000
    # The same scene: its lightest and darkest parts are where they were.
    levels = [image.astype(float).mean(axis=2) for image in (flat, textured)]
    assert np.corrcoef([level.ravel() for level in levels])[0, 1] > 0.3


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_result(tmp_path, datasets):
    tiny = ["SOLVER.MAX_ITER", "24", "SOLVER.CHECKPOINT_PERIOD", "4", "SOLVER.WARMUP_ITERS", "0"]
    arguments = ["--config", SHAPES, *THIN, "SOLVER.IMS_PER_BATCH", "4", *tiny]
    expected, _ = check_killed_run_resumes_to_the_same_result(
        arguments, datasets, tmp_path, kills=[2]
    )
    assert {"optimizers", "discriminator"} <= set(expected["trainer"]["_trainer"])


@pytest.mark.slow
def test_gta5_and_cityscapes_train_and_evaluate(tmp_path):
    make_gta5(tmp_path / "data", size=(96, 64))
    make_cityscapes(tmp_path / "data")
    source = tmp_path / "source_only"
    small = [*THIN, "INPUT.SOURCE_SIZE", "[40,64]", "INPUT.TARGET_SIZE", "[32,64]"]
    small += "SOLVER.MAX_ITER 2 DATALOADER.NUM_WORKERS 0 SOLVER.POLY_LR_MAX_ITER 4".split()
    small += "MODEL.DA.DISCRIMINATOR_CHANNELS 4 TEST.EVAL_PERIOD 0 SEED 0".split()
    command = [*TRAIN_NET, "--config", PAPER, *small]
    off = ["MODEL.DA.ADVERSARIAL_WEIGHT", "0.0", "DATASETS.TARGET", "()"]
    done = run([*command, *off, "OUTPUT_DIR", str(source)], tmp_path / "data")
    assert done.returncode == 0, done.stderr[-2000:]
    adapted = tmp_path / "adapted"
    compare = ["MODEL.DA.COMPARE_WITH", str(source), "TEST.PRECISE_BN.ENABLED", "True"]
    compare += ["TEST.PRECISE_BN.NUM_ITER", "2"]
    done = run([*command, *compare, "OUTPUT_DIR", str(adapted)], tmp_path / "data")
    assert done.returncode == 0, done.stderr[-2000:]
    records = {}
    for folder in (source, adapted):
        lines = (folder / "metrics.json").read_text().splitlines()
        records[folder] = {k: v for line in lines for k, v in json.loads(line).items()}
        assert 0 <= records[folder]["sem_seg/mIoU"] <= 100
        # One picture of a prediction has the full size.
        (first, *_) = json.loads((folder / "inference/sem_seg_predictions.json").read_text())
        assert first["segmentation"]["size"] == [64, 128]
    assert "loss_d" not in records[source]
    assert {"loss_seg", "loss_adv", "loss_d", "discriminator_accuracy"} <= records[adapted].keys()
    page = (adapted / "report.html").read_text()
    assert "<h2>Predictions</h2>" in page
    assert "<h2>Discriminator</h2>" in page
    assert "<h2>Discriminator</h2>" not in (source / "report.html").read_text()


def test_figures_of_the_page(tmp_path, datasets):
    shapes.register_shapes_adaptation(datasets / "shapes")
    name = "shapes_textured_val"
    import pycocotools.mask as mask_util

    entries = []
    for record in DatasetCatalog.get(name):
        labels = read_labels(record["sem_seg_file_name"], 5, 255)
        for number in np.unique(labels).tolist():
            rle = mask_util.encode(np.asfortranarray(labels == number, dtype=np.uint8))
            rle["counts"] = rle["counts"].decode()
            entries.append(
                {"file_name": record["file_name"], "category_id": number, "segmentation": rle}
            )
    for run_name in ("source_only", "adapted"):
        (tmp_path / run_name / "inference").mkdir(parents=True)
        path = tmp_path / run_name / "inference/sem_seg_predictions.json"
        path.write_text(json.dumps(entries))
    runs = {n: tmp_path / n for n in ("source_only", "adapted")}
    axes = predictions_figure(name, runs).axes
    assert [axis.get_title() for axis in axes[:4]] == ["image", "truth", "source_only", "adapted"]
    for row in range(4):
        pictures = [axis.images[0].get_array() for axis in axes[4 * row : 4 * row + 4]]
        # What was written as predictions is the truth.
        assert np.array_equal(pictures[1], pictures[2])
        assert np.array_equal(pictures[1], pictures[3])
        assert pictures[0].shape != pictures[1].shape  # it has no legend
    with pytest.raises(ValueError, match="has no prediction for"):
        predictions_figure("shapes_textured_train", runs)
    (line, guess) = accuracy_figure((np.array([1, 2]), np.array([0.5, 0.75]))).axes[0].lines
    assert line.get_ydata().tolist() == [0.5, 0.75]
    assert guess.get_ydata() == [0.5, 0.5]
