"""Image classification: the model, its data, its schedule, and what a detector takes from it."""

import json
import logging
import os
import pickle

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, DatasetFromList, MetadataCatalog
from detectron2.modeling import build_model
from helpers.classification import TINY, TOY, run_here
from helpers.runs import PAPER, ROOT, SHAPES, refuse
from helpers.runs import TINY as TINY_DETECTOR
from PIL import Image
from torch import nn
from torchvision import datasets as torchvision_datasets

from sw_detectron.checkpoint import Checkpointer
from sw_detectron.data import register_shapes
from sw_detectron.engine import load_config
from sw_detectron.engine.hooks import BestCheckpointer
from sw_detectron.engine.schedule import epochs_to_iterations
from sw_detectron.errors import UserError
from sw_detectron.modeling.summary import sw_layers
from sw_detectron.tasks.classification import (
    ImageClassifier,
    data,
    register_class_folders,
    register_classification,
    register_shape_classes,
)
from sw_detectron.tasks.classification.data import (
    CorruptImages,
    LabelledImages,
    class_names,
    collate,
)
from sw_detectron.tasks.classification.evaluator import ClassificationEvaluator
from sw_detectron.tasks.classification.model import IGNORED_LABEL
from sw_detectron.tasks.classification.trainer import ClassificationTrainer


@pytest.fixture
def generated(datasets):
    """The generated data sets in a folder of their own, for runs in this process."""
    register_shapes(datasets / "shapes")
    register_shape_classes(datasets / "shapes_cls")
    yield
    register_shapes()
    register_shape_classes()


def toy_model(*overrides):
    torch.manual_seed(0)
    return build_model(load_config(TOY, ["MODEL.DEVICE", "cpu", *overrides]))


# The model


def test_the_linear_layer_starts_with_a_deviation_of_a_hundredth():
    weight = toy_model("MODEL.CLASSIFIER.NUM_CLASSES", "200").linear.weight
    assert weight.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("channels_last", ["False", "True"])
def test_loss_and_scores_are_those_of_the_formulas(channels_last):
    model = toy_model(
        *["MODEL.CLASSIFIER.LABEL_SMOOTHING", "0.1"],
        *["MODEL.CLASSIFIER.CHANNELS_LAST", channels_last],
    )
    assert isinstance(model, ImageClassifier)
    images = torch.randint(0, 256, (5, 3, 48, 48), dtype=torch.uint8)
    labels = torch.tensor([0, 3, IGNORED_LABEL, 2, 1])
    model.eval()
    with torch.no_grad():
        logits = model({"image": images})
        mean = torch.tensor([123.675, 116.280, 103.530])[:, None, None]
        std = torch.tensor([58.395, 57.120, 57.375])[:, None, None]
        pooled = model.backbone((images - mean) / std)["res5"].flatten(2).mean(2)
        expected = pooled @ model.linear.weight.T + model.linear.bias
        # float32, convolutions in another memory format
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

        model.training = True  # the loss, over the layers in evaluation mode
        loss = model({"image": images, "label": labels})["loss_cls"]
    log_p = np.log(np.exp(expected.double().numpy()))
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    terms = [-0.9 * log_p[i, k] - 0.1 * log_p[i].mean() for i, k in enumerate(labels) if k >= 0]
    assert loss.item() == pytest.approx(np.mean(terms), rel=1e-4)
    stored_last = model.backbone.res3[0].conv1.weight.is_contiguous(
        memory_format=torch.channels_last
    )
    assert stored_last == (channels_last == "True")


def test_training_reaches_every_parameter():
    model = toy_model()
    model({"image": torch.rand(2, 3, 48, 48), "label": torch.tensor([0, 1])})["loss_cls"].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(sw_layers(model)) == 5


# The evaluator


def test_errors_are_exact_and_leave_out_unreadable_images():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(203, 7)).astype(np.float32)
    labels = rng.integers(0, 7, 203)
    ranks = (logits > np.take_along_axis(logits, labels[:, None], 1)).sum(1)
    given = labels.copy()
    given[50] = IGNORED_LABEL
    kept = np.arange(203) != 50
    evaluator = ClassificationEvaluator()
    for _ in range(2):  # a second evaluation starts anew
        evaluator.reset()
        for part in np.array_split(np.arange(203), 4):
            corrupt = {"a.png": "cut off"} if 50 in part else {}
            evaluator.process(
                {"label": torch.from_numpy(given[part]), "corrupt": corrupt},
                torch.from_numpy(logits[part]),
            )
    results = evaluator.evaluate()["classification"]
    assert results == {
        "top1_error": pytest.approx(100 * (ranks[kept] >= 1).mean()),
        "top5_error": pytest.approx(100 * (ranks[kept] >= 5).mean()),
    }


@pytest.mark.parametrize("classes, names", [(5, ["top1"]), (6, ["top1", "top5"])])
def test_the_top5_error_is_of_more_than_five_classes(classes, names):
    evaluator = ClassificationEvaluator()
    labels = torch.arange(classes)
    evaluator.process({"label": labels, "corrupt": {}}, torch.eye(classes))
    results = evaluator.evaluate()["classification"]
    assert results == {f"{name}_error": 0 for name in names}


# Schedules in epochs


def test_epochs_become_iterations():
    """ImageNet's 1281167 training images, 256 a step: 5004.55… iterations an epoch."""
    if "many" not in DatasetCatalog.list():
        DatasetCatalog.register("many", lambda: range(1281167))
    cfg = load_config("classification_R50_SW_100e.yaml", ["DATASETS.TRAIN", "('many',)"])
    table = epochs_to_iterations(cfg, [])
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS) == (500456, 0)
    assert tuple(cfg.SOLVER.STEPS) == (150137, 300274, 450410)
    assert cfg.SOLVER.IMPORTANCE_STOP_ITER == 150137
    assert (cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD) == (5005, 5005)
    assert all(word in table for word in ("SOLVER.EPOCHS", "100", "500456", "150137, 300274"))
    assert epochs_to_iterations(load_config(PAPER, []), []) == ""


def test_an_epoch_is_all_images_of_all_data_sets():
    for name, images in (("three hundred", 300), ("five hundred", 500)):
        if name not in DatasetCatalog.list():
            DatasetCatalog.register(name, lambda images=images: range(images))
    options = ["DATASETS.TRAIN", "('three hundred', 'five hundred')", "SOLVER.IMS_PER_BATCH", "8"]
    cfg = load_config("classification_R50_SW_100e.yaml", options)
    epochs_to_iterations(cfg, [])
    assert cfg.SOLVER.MAX_ITER == 100 * (300 + 500) // 8


def test_a_key_that_epochs_would_replace_is_one_clear_line(capsys, tmp_path, generated):
    arguments = ["--config", TOY, "OUTPUT_DIR", str(tmp_path / "run")]
    message = refuse(capsys, *arguments, "SOLVER.MAX_ITER", "7")
    assert all(word in message for word in ("SOLVER.MAX_ITER", "SOLVER.EPOCHS 0"))
    assert not (tmp_path / "run").exists()


# Data


def write_images(folder, num_images, classes=("cat", "dog"), size=(40, 30)):
    rng = np.random.default_rng(0)
    for i in range(num_images):
        directory = folder / classes[i % len(classes)]
        directory.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / f"{i:03d}.png")


def test_folders_of_classes(tmp_path):
    write_images(tmp_path, 5, ("dog", "cat"))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    register_class_folders("pets", tmp_path)
    expected = [("dog/000.png", 1), ("cat/001.png", 0), ("dog/002.png", 1), ("cat/003.png", 0)]
    expected = [(str(tmp_path / name), label) for name, label in [*expected, ("dog/004.png", 1)]]
    assert [(r["file_name"], r["label"]) for r in DatasetCatalog.get("pets")] == expected
    assert class_names("pets") == ("cat", "dog")
    assert MetadataCatalog.get("pets").evaluator_type == "classification"


@pytest.mark.parametrize("image_format", ["RGB", "BGR"])
def test_evaluation_sees_the_centre_of_the_resized_image(image_format):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
    sizes = ["INPUT.CLASSIFIER.SIZE", "32", "INPUT.CLASSIFIER.RESIZE_TEST", "40"]
    cfg = load_config(TOY, [*sizes, "INPUT.FORMAT", image_format])
    seen = data.test_transform(cfg)(image)
    resized = np.asarray(image.resize((60, 40), Image.Resampling.BILINEAR))
    expected = torch.from_numpy(resized[4:36, 14:46].transpose(2, 0, 1).copy())
    assert torch.equal(seen, expected.flip(0) if image_format == "BGR" else expected)


def test_training_crops():
    pixels = np.random.default_rng(0).integers(1, 256, (32, 32, 3), dtype=np.uint8)
    image, tensor = Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1)
    cfg = load_config("base/cifar10.yaml", [])
    padded = torch.nn.functional.pad(tensor, (4, 4, 4, 4))
    crops = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 32, 32)
    possible = torch.cat([crops, crops.flip(3)])  # 9 x 9 places, and mirrored
    seen = set()
    torch.manual_seed(0)
    for _ in range(100):
        crop = data.train_transform(cfg)(image)
        (match,) = (possible == crop).flatten(1).all(1).nonzero().flatten().tolist()
        seen.add(match)
    assert len(seen) > 60
    assert min(seen) < 81 <= max(seen)
    cfg = load_config("classification_R50_SW_100e.yaml", [])
    assert data.train_transform(cfg)(image).shape == (3, 224, 224)


def test_cifar_as_torchvision_unpacks_it(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    parts = {"data_batch_1": 3, "test_batch": 2}
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = {}
    for part, n in parts.items():
        pixels[part] = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
        content = {"data": pixels[part].reshape(n, -1), "labels": list(range(n))}
        (folder / part).write_bytes(pickle.dumps(content))
    meta = {"label_names": [*"abcdefghij"]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))
    register_classification(tmp_path)
    with pytest.raises(UserError, match="checksums"):
        DatasetCatalog.get("cifar10_train")
    cifar = torchvision_datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(cifar, "test_list", [["test_batch", None]])
    monkeypatch.setitem(cifar.meta, "md5", None)
    for name, part in (("cifar10_train", "data_batch_1"), ("cifar10_test", "test_batch")):
        records = DatasetCatalog.get(name)
        assert [r["label"] for r in records] == list(range(parts[part]))
        expected = pixels[part].transpose(0, 2, 3, 1)
        assert all(np.array_equal(r["image"], x) for r, x in zip(records, expected))
        assert class_names(name) == tuple("abcdefghij")
    write_images(tmp_path / "cifar100" / "test", 4)
    register_classification(tmp_path)
    assert len(DatasetCatalog.get("cifar100_test")) == 4
    register_classification()


def spoil(folder, numbers):
    """Cut files short, so that they begin like images; their names."""
    spoiled = []
    for path in sorted(folder.rglob("*.png")):
        if int(path.stem) in numbers:
            path.write_bytes(path.read_bytes()[:200])
            spoiled.append(str(path))
    return spoiled


def test_unreadable_images_are_named_and_skipped(tmp_path, caplog):
    write_images(tmp_path, 10)
    spoiled = spoil(tmp_path, {3, 4, 9})
    register_class_folders("spoiled", tmp_path)
    records = DatasetFromList(DatasetCatalog.get("spoiled"))
    cfg = load_config(TOY, [])
    transform, size = data.test_transform(cfg), cfg.INPUT.CLASSIFIER.SIZE
    training, evaluation = (LabelledImages(records, transform, size, tries) for tries in (3, 1))
    for number, taken in {2: 2, 3: 5, 4: 5, 9: 0}.items():
        assert torch.equal(training[number]["image"], training[taken]["image"])
        assert training[number]["label"] == taken % 2
    batch = collate([evaluation[i] for i in range(10)])
    assert batch["label"].tolist() == [-1 if i in {3, 4, 9} else i % 2 for i in range(10)]
    assert not batch["image"][[3, 4, 9]].any()
    assert sorted(batch["corrupt"]) == sorted(spoiled)

    corrupt = CorruptImages(1000)
    corrupt.add(batch["corrupt"])
    corrupt.add(batch["corrupt"])
    corrupt.report()
    assert all(caplog.text.count(repr(name)) == 1 for name in spoiled)
    assert "Skipped 3 of 1000" in caplog.text
    with pytest.raises(UserError, match=r"3 of 299 .*cannot be read.* 1%"):
        CorruptImages(299).add(batch["corrupt"])


def test_mistakes_in_data_sets_are_one_clear_line(capsys, tmp_path, generated):
    def message(*overrides, config=TOY):
        return refuse(capsys, "--config", config, "OUTPUT_DIR", str(tmp_path / "run"), *overrides)

    folder = ["DATASETS.TRAIN", "('folder_train',)", "DATASETS.TEST", "('folder_val',)"]
    folder += ["DATASETS.FOLDER", str(tmp_path / "pets")]
    assert str(tmp_path / "pets/train") in message(*folder)
    (tmp_path / "pets/train").mkdir(parents=True)
    (tmp_path / "pets/val").mkdir()
    assert "no class folders" in message(*folder)
    write_images(tmp_path / "pets/train", 4)
    write_images(tmp_path / "pets/val", 4, ("dog", "cow"))
    assert "NUM_CLASSES" in message(*folder)
    assert "'cat'" in message(*folder, "MODEL.CLASSIFIER.NUM_CLASSES", "2")
    assert "labels" in message(*TINY, "DATASETS.TRAIN", "('shapes_train',)")
    assert "TRAIN_CROP" in message("INPUT.CLASSIFIER.TRAIN_CROP", "square")
    if not torch.cuda.is_available():
        assert "SOLVER.AMP.ENABLED" in message("SOLVER.AMP.ENABLED", "True")
    if not os.path.exists(MetadataCatalog.get("imagenet_train").image_root):
        imagenet = message(config="classification_R50_SW_100e.yaml")
        assert all(w in imagenet for w in ("imagenet/train", "imagenet_", "DETECTRON2_DATASETS"))


def test_workers_load_what_one_process_loads(generated):
    loaders = [
        ClassificationTrainer.build_test_loader(
            load_config(TOY, [*TINY, "DATALOADER.NUM_WORKERS", workers]), "shapes_cls_val"
        )
        for workers in ("0", "2")
    ]
    count = 0
    for alone, together in zip(*loaders, strict=True):
        assert torch.equal(alone["image"], together["image"])
        assert torch.equal(alone["label"], together["label"])
        count += len(alone["label"])
    assert count == 400


# Training


def test_training_resumes_with_its_best_error_and_reports_images_per_second(
    generated, tmp_path, monkeypatch
):
    arguments = ["--config", TOY, "--resume", *TINY, "TEST.EVAL_PERIOD", "2", "OUTPUT_DIR"]
    arguments += [str(tmp_path), "SOLVER.CHECKPOINT_PERIOD", "2"]
    results = run_here(*arguments, "SOLVER.MAX_ITER", "4")
    error = results["classification"]["top1_error"]
    assert error in range(0, 101, 10)  # of ten images
    saved = torch.load(tmp_path / "model_0000001.pth")["trainer"]["hooks"]["BestCheckpointer"]
    assert saved["best_iter"] == 1
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert "trainer" not in torch.load(tmp_path / "model_best.pth")
    (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    known = []
    check = BestCheckpointer._best_checking
    monkeypatch.setattr(
        BestCheckpointer,
        "_best_checking",
        lambda hook: (known.append(hook.best_metric), check(hook)),
    )
    run_here(*arguments, "SOLVER.MAX_ITER", "5")
    assert known[0] == saved["best_metric"]
    records = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert any(r.get("[metric]images_per_second", 0) > 0 for r in records)
    assert any("classification/top1_error" in r for r in records)


@pytest.mark.slow
def test_a_few_images_are_learned_by_heart(generated, tmp_path):
    run_here(
        *["--config", TOY, *TINY, "DATASETS.TEST", "()", "OUTPUT_DIR", str(tmp_path)],
        *["DATASETS.TRAIN", "('shapes_cls_train[:16]',)", "SOLVER.IMS_PER_BATCH", "16"],
        *["SOLVER.MAX_ITER", "20", "INPUT.CLASSIFIER.PADDING", "0", "INPUT.RANDOM_FLIP", "none"],
    )
    last = json.loads((tmp_path / "metrics.json").read_text().splitlines()[-1])
    assert last["total_loss"] < 0.3  # smoothed over 20 iterations; chance is log 4 = 1.39


@pytest.mark.slow
def test_a_run_skips_unreadable_images_and_stops_at_many(tmp_path, capsys):
    for split in ("train", "val"):
        write_images(tmp_path / split, 120)
    spoiled = spoil(tmp_path, {7})
    arguments = f"""
        --config {TOY} {" ".join(TINY)} DATASETS.FOLDER {tmp_path} DATASETS.TRAIN ('folder_train',)
        DATASETS.TEST ('folder_val',) MODEL.CLASSIFIER.NUM_CLASSES 2 SOLVER.IMS_PER_BATCH 40
        DATALOADER.NUM_WORKERS 2 OUTPUT_DIR {tmp_path}/run INPUT.CLASSIFIER.SIZE 32
    """.split()
    results = run_here(*arguments)
    log = (tmp_path / "run/log.txt").read_text()
    assert all(log.count(f"Skipped {name!r}") == 1 for name in spoiled)
    assert log.count("Skipped 1 of 120 images") == 2  # of each split
    wrong = results["classification"]["top1_error"] * 119 / 100
    assert wrong == pytest.approx(round(wrong))
    spoil(tmp_path, {20, 21})
    assert "of 120 images cannot be read" in refuse(capsys, *arguments)


# What a detector takes from it


@pytest.mark.parametrize("norm", ["SyncBN", "FrozenBN"])
def test_a_detector_takes_every_backbone_tensor(tmp_path, caplog, norm):
    caplog.set_level(logging.INFO)
    classifier = toy_model()
    torch.nn.init.normal_(classifier.backbone.stem.conv1.norm.running_cov)
    Checkpointer(classifier, str(tmp_path)).save("model_final")
    overrides = ["MODEL.DEVICE", "cpu", "MODEL.RESNETS.NORM", norm]
    detector = build_model(load_config(SHAPES, overrides))
    caplog.clear()
    Checkpointer(detector).load(str(tmp_path / "model_final.pth"))
    taken = detector.backbone.bottom_up.state_dict()
    expected = classifier.backbone.state_dict()
    left_out = {key.rsplit(".", 1)[-1] for key in expected.keys() ^ taken.keys()}
    assert left_out == ({"num_batches_tracked"} if norm == "FrozenBN" else set())
    assert all(torch.equal(value, expected[key]) for key, value in taken.items())
    assert f"its backbone, {len(expected)} tensors" in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_model_without_a_pyramid_takes_every_backbone_tensor(tmp_path):
    classifier = toy_model()
    Checkpointer(classifier, str(tmp_path)).save("model_final")
    model = nn.Module()
    model.backbone = toy_model().backbone
    model.head = nn.Linear(2, 2)
    torch.nn.init.zeros_(model.backbone.stem.conv1.weight)
    Checkpointer(model).load(str(tmp_path / "model_final.pth"))
    expected = classifier.backbone.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.backbone.state_dict().items())


def test_what_does_not_fit_a_detector_is_warned_of(tmp_path, caplog):
    classifier = toy_model()
    Checkpointer(classifier, str(tmp_path)).save("model_final")
    overrides = ["MODEL.DEVICE", "cpu", "MODEL.SW.PLACEMENT", "imagenet"]
    detector = build_model(load_config(SHAPES, overrides))
    Checkpointer(detector).load(str(tmp_path / "model_final.pth"))
    assert "backbone.bottom_up.res2.0.conv2.norm" in caplog.text
    assert [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_classifier_takes_the_linear_layer_too(tmp_path):
    classifier = toy_model()
    Checkpointer(classifier, str(tmp_path)).save("model_final")
    again = toy_model()
    torch.nn.init.zeros_(again.linear.weight)
    Checkpointer(again).load(str(tmp_path / "model_final.pth"))
    assert torch.equal(again.linear.weight, classifier.linear.weight)


def test_the_papers_configs_fit_together():
    """Table 2's network is Table 7's backbone, and both see the same pixels."""
    ours, theirs = (
        load_config(name, ["MODEL.DEVICE", "cpu"])
        for name in ("classification_R50_SW_100e.yaml", PAPER)
    )
    for cfg in (ours, theirs):
        cfg.INPUT.pop("CLASSIFIER")
    assert ours.INPUT.FORMAT == theirs.INPUT.FORMAT
    for key in ("PIXEL_MEAN", "PIXEL_STD", "SW"):
        assert ours.MODEL[key] == theirs.MODEL[key]
    assert ours.MODEL.RESNETS.STRIDE_IN_1X1 == theirs.MODEL.RESNETS.STRIDE_IN_1X1
    classifier, detector = build_model(ours), build_model(theirs)
    assert sum(p.numel() for p in classifier.linear.parameters()) == 1000 * 2049
    assert [row.number for row in sw_layers(classifier)] == [1, 6, 12, 18, 24, 30, 36]
    shapes = [
        {key: value.shape for key, value in backbone.state_dict().items()}
        for backbone in (classifier.backbone, detector.backbone.bottom_up)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "config, numbers",
    [
        ("cifar10_resnet20_SW.yaml", [1, 4, 8, 12, 16]),
        ("cifar10_resnet20_BN.yaml", []),
        ("cifar100_resnet110_SWb.yaml", [1, *range(4, 110, 4)]),
    ],
)
def test_layers_of_the_cifar_configs(config, numbers):
    model = build_model(load_config(config, ["MODEL.DEVICE", "cpu"]))
    assert [row.number for row in sw_layers(model)] == numbers
    classes = 100 if "100_" in config else 10
    assert model.eval()({"image": torch.rand(2, 3, 32, 32)}).shape == (2, classes)


def test_there_is_a_config_for_every_cell_of_table_2():
    names = {path.name for path in (ROOT / "configs").glob("*/*.yaml")}
    norms = ("BN", "SN", "BW", "SW", "SWb")
    imagenet = {f"classification_R{d}_{n}_100e.yaml": (d, n) for d in (50, 101) for n in norms}
    cells = [("cifar10", d) for d in (20, 44, 56, 110)] + [("cifar100", d) for d in (20, 110)]
    cifar = {f"{c}_resnet{d}_{n}.yaml": (c, d, n) for c, d in cells for n in norms}
    assert imagenet.keys() | cifar.keys() <= names
    for name, (depth, norm) in imagenet.items():
        cfg = load_config(name, [])
        assert (depth, norm) == (cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.SW.NORM)
        assert cfg.MODEL.SW.PLACEMENT == "imagenet"
        assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR, cfg.SOLVER.EPOCHS) == (256, 0.1, 100)
        assert f"output/{name[:-5]}" == cfg.OUTPUT_DIR
    for name, (dataset, depth, norm) in cifar.items():
        cfg = load_config(name, [])
        assert (depth, norm) == (cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.SW.NORM)
        assert (cfg.MODEL.SW.PLACEMENT, cfg.SOLVER.IMPORTANCE_STOP_EPOCH) == ("cifar", 80)
        assert tuple(cfg.DATASETS.TRAIN) == (f"{dataset}_train",)
        assert int(dataset.removeprefix("cifar")) == cfg.MODEL.CLASSIFIER.NUM_CLASSES
        assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER) == (128, 64000)
        assert tuple(cfg.SOLVER.STEPS) == (32000, 48000)
        assert (400 if depth == 110 else 0) == cfg.SOLVER.WARMUP_ITERS
        assert f"output/{name[:-5]}" == cfg.OUTPUT_DIR


@pytest.mark.slow
def test_pretrain_train_and_evaluate_a_detector(generated, tmp_path):
    """The three commands of the README at toy size."""
    run_here("--config", TOY, *TINY, "OUTPUT_DIR", str(tmp_path / "pretrained"))
    detector = ["--config", SHAPES, *TINY_DETECTOR, "SOLVER.MAX_ITER", "2", "SOLVER.WARMUP_ITERS"]
    detector += ["1", "DATASETS.TEST", "('shapes_val[:4]',)", "OUTPUT_DIR", str(tmp_path / "run")]
    run_here(*detector, "MODEL.WEIGHTS", str(tmp_path / "pretrained/model_final.pth"))
    weights = str(tmp_path / "run/model_final.pth")
    evaluated = run_here("--eval-only", *detector, "MODEL.WEIGHTS", weights)
    assert {"bbox", "segm"} <= evaluated.keys()
