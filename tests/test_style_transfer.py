"""Style transfer: the networks, the losses, what is trained and stylized, and what is refused."""

import json
import re

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model
from helpers.runs import TRAIN_NET, check_killed_run_resumes_to_the_same_result, refuse, run
from PIL import Image
from torch import nn
from torchvision.models import vgg16

from sw_detectron import SwitchWhiten2d, UserError
from sw_detectron.data import register_shapes
from sw_detectron.data.images import read_image
from sw_detectron.data.registration import register_dataset
from sw_detectron.engine import load_config
from sw_detectron.engine.prediction import Predictor
from sw_detectron.task import find_task
from sw_detectron.tasks.style_transfer.data import ContentMapper, style_tensor
from sw_detectron.tasks.style_transfer.evaluator import StyleEvaluator, to_frame
from sw_detectron.tasks.style_transfer.loss import (
    LossNetwork,
    PerceptualLoss,
    gram_matrix,
    load_loss_network,
    total_variation,
)
from sw_detectron.tasks.style_transfer.network import StylizingNetwork
from sw_detectron.tasks.style_transfer.page import _evaluated as evaluated_iterations
from sw_detectron.tasks.style_transfer.painting import painting
from sw_detectron.tasks.style_transfer.trainer import StyleTransferTrainer, build_criterion

SHAPES = "shapes_style_SW.yaml"
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
SMALL = "MODEL.STYLE.CHANNELS 4 MODEL.SW.NUM_PERGROUP 4 MODEL.STYLE.NUM_BLOCKS 1".split()
SMALL += "MODEL.STYLE.IMAGE_SIZE 32 INPUT.CONTENT_SIZE 32 MODEL.DEVICE cpu".split()
# Where torchvision's VGG-16 has these ReLUs, in its sequence of layers.
POSITIONS = {"relu1_2": 3, "relu2_2": 8, "relu3_3": 15, "relu4_3": 22}
# Relative; sums of some ten thousand products in float32.
TOLERANCE = 1e-6
# In pixel values of up to 270, of float32, whose sums are taken in another order.
PIXELS = {"rtol": 0, "atol": 1e-3}


def stylizer(norm="BN", channels=4, num_blocks=2, bounded=True):
    torch.manual_seed(0)
    return StylizingNetwork(norm, channels, num_blocks, bounded, MEAN, STD)


def pictures(*shape, seed=1, dtype=torch.float32):
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The stylizing network


def test_the_network_has_as_many_parameters_as_johnsons():
    # Weights and biases of Johnson et al.'s layers, and two parameters a channel of each norm.
    convs = [(3, 32, 9), (32, 64, 3), (64, 128, 3), *[(128, 128, 3)] * 10]
    convs += [(128, 64, 3), (64, 32, 3), (32, 3, 9)]
    expected = sum(i * o * k * k + o for i, o, k in convs) + 2 * sum(o for _, o, _ in convs[:-1])
    network = stylizer(channels=32, num_blocks=5)
    assert sum(p.numel() for p in network.parameters()) == expected
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 15


@pytest.mark.parametrize("bounded", [True, False])
def test_the_network_computes_what_its_layers_say(bounded):
    network = stylizer(num_blocks=1, bounded=bounded).double().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.running_mean)
    state = network.state_dict()

    def conv(x, name, stride=1):
        weight, bias = (state[f"{name}.{kind}"] for kind in ("weight", "bias"))
        margin = weight.shape[-1] // 2
        return F.conv2d(F.pad(x, [margin] * 4, mode="reflect"), weight, bias, stride)

    def conv_norm(x, name, stride=1):
        x = conv(x, f"{name}.conv", stride)
        values = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(state[f"{name}.norm.{kind}"] for kind in values))

    def doubled(x):
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    images = pictures(2, 3, 20, 24, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (MEAN, STD))
    x = (images - mean.float()) / std.float()
    x = conv_norm(x, "down.0").relu()
    x = conv_norm(x, "down.1", stride=2).relu()
    x = conv_norm(x, "down.2", stride=2).relu()
    x = x + conv_norm(conv_norm(x, "blocks.0.conv1").relu(), "blocks.0.conv2")
    x = conv_norm(doubled(x), "up.1").relu()
    x = conv_norm(doubled(x), "up.3").relu()
    x = conv(x, "last")
    expected = (150 * x.tanh() if bounded else x) + mean.float()
    torch.testing.assert_close(network(images), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("size", [(1, 1), (3, 40), (5, 7), (33, 50)])
def test_images_of_any_size_keep_it(size):
    found = stylizer().eval()(pictures(1, 3, *size))
    assert found.shape == (1, 3, *size)
    assert found.isfinite().all()


def test_tanh_bounds_the_output():
    network = stylizer().eval()
    nn.init.constant_(network.last.bias, 1e4)
    found = network(pictures(1, 3, 16, 16))
    expected = torch.tensor(MEAN).view(1, 3, 1, 1) + 150
    torch.testing.assert_close(found, expected.expand_as(found))


@pytest.mark.parametrize(
    "name, statistics",
    [
        ("BN", None),
        ("IN", ("in",)),
        ("IW", ("iw",)),
        ("SW", ("bw", "iw")),
        ("SWb", ("bw", "iw", "bn", "in", "ln")),
    ],
)
@pytest.mark.parametrize("kind", ["style", "shapes_style"])
def test_each_config_has_its_norm_everywhere(kind, name, statistics):
    cfg = load_config(f"{kind}_{name}.yaml", ["MODEL.DEVICE", "cpu"])
    assert find_task(cfg).name == "style_transfer"
    model = build_model(cfg)
    if statistics is None:
        assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 15
        return
    layers = [m for m in model.modules() if isinstance(m, SwitchWhiten2d)]
    assert [set(layer.statistics) for layer in layers] == [set(statistics)] * 15
    assert {layer.num_pergroup for layer in layers} == {16}


# The losses


@torch.no_grad()
def test_losses_agree_with_torchvisions_vgg_and_sums_written_out():
    torch.manual_seed(3)
    vgg = vgg16(weights=None).features.eval()
    network = LossNetwork(tuple(POSITIONS))
    vgg = vgg[: len(network.features)]
    network.features.load_state_dict(vgg.state_dict())
    style, stylized, content = (pictures(2, 3, 48, 40, seed=s) for s in range(3))
    weights = (1.0, 5.0, 1e-6)
    found = PerceptualLoss(network, style[0], ["relu3_3"], list(POSITIONS), weights, MEAN, STD)(
        stylized, content
    )

    vgg = vgg.double()
    style, stylized, content = (x.double() for x in (style[:1], stylized, content))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (MEAN, STD))

    def features(images):
        x, maps = (images - mean) / std, {}
        for index, layer in enumerate(vgg):
            x = layer(x)
            maps |= {name: 57.63 * x for name, i in POSITIONS.items() if i == index}
        return maps

    def gram(x):
        n, c, h, w = x.shape
        return torch.einsum("nihw,njhw->nij", x, x) / (c * h * w)

    of_style, ours, of_content = (features(x) for x in (style, stylized, content))
    grams = [(gram(ours[k]) - gram(of_style[k])).square().mean() for k in POSITIONS]
    variation = [x.diff(dim=1).square().sum() + x.diff(dim=2).square().sum() for x in stylized]
    expected = {
        "loss_content": (ours["relu3_3"] - of_content["relu3_3"]).square().mean(),
        "loss_style": 5 * sum(grams),
        "loss_tv": 1e-6 * sum(variation) / 2,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Float32 through ten convolutions, whose errors add up at random.
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name


def test_gram_matrices_and_total_variation_agree_with_loops():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    grams = torch.zeros(2, 3, 3, dtype=torch.float64)
    variation = 0.0
    for n in range(2):
        for i in range(5):
            for j in range(4):
                pixel = x[n, :, i, j]
                grams[n] += torch.outer(pixel, pixel) / 60
                if i:
                    variation += float((pixel - x[n, :, i - 1, j]).square().sum()) / 2
                if j:
                    variation += float((pixel - x[n, :, i, j - 1]).square().sum()) / 2
    torch.testing.assert_close(gram_matrix(x), grams, rtol=TOLERANCE, atol=1e-12)
    assert float(total_variation(x)) == pytest.approx(variation, rel=TOLERANCE)


def test_the_losses_of_the_style_itself_are_none():
    style = pictures(3, 32, 32)
    network = load_loss_network("random", ("relu1_2", "relu2_2"))
    loss = PerceptualLoss(network, style, ["relu2_2"], ["relu1_2"], (1.0, 1.0, 0.0), MEAN, STD)
    assert all(
        float(v) == pytest.approx(0, abs=1e-6) for v in loss(style[None], style[None]).values()
    )
    other = loss(pictures(1, 3, 32, 32, seed=5), style[None])
    assert other["loss_content"] > 1
    assert other["loss_style"] > 1


def test_losses_are_where_their_network_is():
    """A second criterion shares the network of the first, which is on a GPU then."""
    network = LossNetwork(("relu1_1",)).to("meta")
    layers = ["relu1_1"]
    loss = PerceptualLoss(network, pictures(3, 8, 8), layers, layers, (1.0, 1.0, 1.0), MEAN, STD)
    assert all(buffer.is_meta for buffer in loss.buffers())
    assert loss.features(torch.zeros(1, 3, 8, 8, device="meta"))["relu1_1"].is_meta


def test_random_filters_are_the_same_in_all_runs_and_keep_the_scale():
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        load_loss_network.cache_clear()
        networks.append(load_loss_network("random", ("relu1_1", "relu4_3")))
    for a, b in zip(*(network.state_dict().values() for network in networks)):
        assert torch.equal(a, b)
    with torch.no_grad():
        found = networks[0](torch.randn(1, 3, 64, 64))
    # The mean square of He et al.'s filters' outputs is that of their input.
    assert 0.5 < float(found["relu1_1"].square().mean()) < 2
    assert 0.2 < float(found["relu4_3"].square().mean()) < 20  # poolings take the largest


def test_weights_are_read_from_torchvisions_file(tmp_path):
    torch.manual_seed(1)
    vgg = vgg16(weights=None).eval()
    # Its fully connected layers, of half a gigabyte, are not read.
    state = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.")}
    torch.save(state, tmp_path / "vgg16.pth")
    network = load_loss_network(str(tmp_path / "vgg16.pth"), tuple(POSITIONS))
    assert not any(p.requires_grad for p in network.parameters())
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = network(x)
        for name, index in POSITIONS.items():
            torch.testing.assert_close(found[name], vgg.features[: index + 1](x))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s.pop("features.0.bias"), "there is no features.0.bias"),
        (lambda s: s.update({"features.2.weight": torch.zeros(64, 3, 3, 3)}), r"\(64, 3, 3, 3\)"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path, change, words):
    state = LossNetwork(("relu1_2",)).state_dict()
    change(state)
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(UserError, match=f"MODEL.STYLE.LOSS_NETWORK .*{words}.*vgg16-397923af.pth"):
        load_loss_network(str(tmp_path / "other.pth"), ("relu1_2",))


def test_only_the_stylizing_network_is_trained_and_saved():
    cfg = load_config(SHAPES, SMALL)
    model = build_model(cfg)
    criterion = build_criterion(cfg)
    model.set_criterion(criterion)
    assert {name.split(".")[0] for name in model.state_dict()} == {"network"}
    losses = model([{"image": pictures(3, 32, 32)} for _ in range(2)])
    sum(losses.values()).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert sum(float(g.abs().sum()) for g in gradients) > 0
    assert all(p.grad is None for p in criterion.parameters())
    optimizer = StyleTransferTrainer.build_optimizer(cfg, model)
    assert isinstance(optimizer, torch.optim.Adam)
    assert {(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups} == {
        (0.001, 0.0, (0.9, 0.999))
    }


# Images


def test_content_is_a_random_square_in_training_and_the_middle_in_evaluation(tmp_path):
    columns = np.arange(96, dtype=np.uint8)
    Image.fromarray(np.broadcast_to(columns, (48, 96)).copy()).save(tmp_path / "ramp.png")
    cfg = load_config(SHAPES, ["INPUT.CONTENT_SIZE", "48"])
    record = {"file_name": str(tmp_path / "ramp.png")}
    middle = ContentMapper(cfg, is_train=False)(record)["image"]
    assert middle.dtype == torch.uint8
    assert middle[:, 0].tolist() == [list(range(24, 72))] * 3
    starts = {int(ContentMapper(cfg, is_train=True)(record)["image"][0, 0, 0]) for _ in range(20)}
    assert len(starts) > 5
    assert max(starts) <= 48


def test_the_styles_image_is_as_long_as_asked_for(tmp_path):
    Image.new("RGB", (300, 100), (10, 200, 30)).save(tmp_path / "style.png")
    cfg = load_config(SHAPES, ["MODEL.STYLE.IMAGE", str(tmp_path / "style.png")])
    style = style_tensor(cfg)
    assert style.shape == (3, 85, 256)
    assert style.flatten(1).unique(dim=1).flatten().tolist() == [10, 200, 30]


def test_a_style_that_is_too_narrow_is_refused(tmp_path):
    Image.new("RGB", (1000, 20)).save(tmp_path / "narrow.png")
    cfg = load_config(SHAPES, ["MODEL.STYLE.IMAGE", str(tmp_path / "narrow.png")])
    with pytest.raises(UserError, match="MODEL.STYLE.IMAGE .*256 x 5 pixels.*IMAGE_SIZE"):
        style_tensor(cfg)
    cfg.MODEL.STYLE.IMAGE_SIZE = 800
    assert style_tensor(cfg).shape == (3, 16, 800)


def test_the_painting_is_the_same_picture_at_each_size():
    small, large = painting(64), painting(256)
    assert (painting(64) == small).all()
    blurred = np.asarray(Image.fromarray(large).resize((8, 8), Image.BOX)).astype(float)
    other = np.asarray(Image.fromarray(small).resize((8, 8), Image.BOX)).astype(float)
    assert np.corrcoef(blurred.ravel(), other.ravel())[0, 1] > 0.95
    assert len(np.unique(large.reshape(-1, 3), axis=0)) > 100


def test_a_folder_of_content_is_trained_on_unless_the_user_says_otherwise(tmp_path, caplog):
    for number in range(5):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{number}.png")
    cfg = load_config(SHAPES, ["DATASETS.CONTENT_FOLDER", str(tmp_path)])
    assert cfg.DATASETS.TRAIN == ("content_images",)
    assert cfg.DATASETS.TEST == ("content_images[:4]",)
    assert len(DatasetCatalog.get("content_images")) == 5
    overrides = ["DATASETS.CONTENT_FOLDER", str(tmp_path), "DATASETS.TEST", "('shapes_val',)"]
    assert load_config(SHAPES, overrides).DATASETS.TEST == ("shapes_val",)
    assert "DATASETS.CONTENT_FOLDER is not in DATASETS.TEST" in caplog.text
    assert "DATASETS.TRAIN" not in caplog.text
    detector = load_config("shapes_mask_rcnn_R18_FPN_SW.yaml", overrides[:2])
    assert detector.DATASETS.TRAIN == ("shapes_train",)


def test_images_with_any_labels_are_content(tmp_path):
    for name, annotations in (("a", []), ("b", [{"category_id": 0}]), ("c", None)):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{name}.png")
        record = {"file_name": str(tmp_path / f"{name}.png"), "width": 40, "height": 40}
        record |= {} if annotations is None else {"annotations": annotations}
        register_dataset(f"content_{name}", lambda record=record: [record])
    MetadataCatalog.get("content_a").set(thing_classes=["x"])
    MetadataCatalog.get("content_b").set(thing_classes=["y"])
    names = "('content_a','content_b','content_c')"
    cfg = load_config(SHAPES, ["DATASETS.TRAIN", names, *SMALL, "SOLVER.IMS_PER_BATCH", "3"])
    batch = next(iter(StyleTransferTrainer.build_train_loader(cfg)))
    assert sorted(x["file_name"][-5] for x in batch) == ["a", "b", "c"]


def test_frames_are_in_bgr():
    image = torch.tensor([300.0, 127.6, -4.0]).view(3, 1, 1).expand(3, 2, 5)
    frame = to_frame(image)
    assert frame.shape == (2, 5, 3)
    assert frame.dtype == np.uint8
    assert (frame == (0, 128, 255)).all()


def test_evaluation_is_the_mean_of_the_losses_and_shows_the_first_images(tmp_path):
    cfg = load_config(SHAPES, SMALL)
    criterion = build_criterion(cfg)
    evaluator = StyleEvaluator(criterion, tmp_path, max_iter=10)
    content = [pictures(3, 32, 32, seed=s).to(torch.uint8) for s in range(6)]
    stylized = [pictures(3, 32, 32, seed=s + 10) for s in range(6)]
    for image, output in zip(content, stylized):
        evaluator.process([{"image": image}], [{"stylized": output}])
    found = evaluator.evaluate()["style_transfer"]
    with torch.no_grad():
        together = criterion(torch.stack(stylized), torch.stack(content).float())
    # One image at a time, or six: sums in another order.
    for name, loss in together.items():
        assert found[name] == pytest.approx(float(loss), rel=1e-4)
    assert found["total_loss"] == pytest.approx(float(sum(together.values())), rel=1e-4)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.png"))
    folders = ("content", "evaluated")
    assert names == [f"{folder}/{number}.png" for folder in folders for number in range(4)]
    written = read_image(tmp_path / "evaluated/2.png", "RGB")
    assert (written == np.rint(stylized[2].permute(1, 2, 0).numpy()).astype(np.uint8)).all()


# Prediction and export


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A config, and a checkpoint of its network after some running values."""
    cfg = load_config("shapes_style_SWb.yaml", SMALL)
    torch.manual_seed(0)
    model = build_model(cfg)
    with torch.no_grad():
        model.train().network(pictures(4, 3, 32, 32))
    path = tmp_path_factory.mktemp("style") / "model.pth"
    torch.save({"model": model.state_dict()}, path)
    return cfg, model.eval(), path


def test_pictures_are_stylized_as_a_whole(trained):
    cfg, model, path = trained
    predictor = Predictor(cfg, metadata=None)
    predictor.load(str(path))
    frame = pictures(30, 41, 3).to(torch.uint8).numpy()
    ((results, picture),) = predictor([frame])
    assert results == []
    image = torch.from_numpy(frame[..., ::-1].copy()).permute(2, 0, 1).float()
    with torch.no_grad():
        expected = model.network(image[None])[0].clamp(0, 255)
    expected = expected.permute(1, 2, 0).numpy()[..., ::-1]
    assert np.abs(picture - expected).max() <= 0.51
    assert picture.shape == frame.shape


def test_a_picture_that_is_too_large_is_refused(trained):
    cfg = trained[0].clone()
    cfg.MODEL.STYLE.MAX_PIXELS = 99
    with pytest.raises(UserError, match="20 x 5 pixels .*MODEL.STYLE.MAX_PIXELS 99"):
        Predictor(cfg, metadata=None)([np.zeros((5, 20, 3), np.uint8)])


@torch.no_grad()
def test_the_network_traces_and_compiles(trained):
    network = trained[1].network
    images, other = pictures(1, 3, 32, 48), pictures(1, 3, 40, 24)
    traced = torch.jit.trace(network, images, check_trace=False)
    for x in (images, other, pictures(1, 3, 45, 31), pictures(1, 3, 5, 7)):
        torch.testing.assert_close(traced(x), network(x), **PIXELS)
    torch.compiler.reset()
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), network(images), **PIXELS)


@pytest.mark.slow
def test_the_network_as_onnx_stylizes_images_of_other_sizes(trained, tmp_path):
    network = trained[1].network.requires_grad_(False)
    dynamic = {"images": dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC)}
    path = str(tmp_path / "style.onnx")
    torch.onnx.export(network, (pictures(1, 3, 34, 49),), path, dynamo=True, dynamic_shapes=dynamic)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [value.name for value in session.get_inputs()]
    for size in ((34, 49), (64, 80), (45, 31)):
        images = pictures(1, 3, *size)
        (found,) = session.run(None, {name: images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), network(images), **PIXELS)


# Whole runs


@pytest.mark.parametrize(
    "overrides, words",
    [
        ("MODEL.STYLE.LOSS_NETWORK none.pth", "'none.pth' does not exist.*vgg16-397923af.pth"),
        ("MODEL.STYLE.IMAGE none.png", "MODEL.STYLE.IMAGE 'none.png' does not exist"),
        ("MODEL.STYLE.STYLE_LAYERS ['relu3_4']", "VGG-16 has no relu3_4; there are relu1_1"),
        ("MODEL.STYLE.STYLE_LAYERS []", "MODEL.STYLE.STYLE_LAYERS is empty.*STYLE_WEIGHT to 0.0"),
        ("MODEL.STYLE.CONTENT_LAYERS []", "MODEL.STYLE.CONTENT_LAYERS is empty.*CONTENT_WEIGHT"),
        ("MODEL.STYLE.OUTPUT sigmoid", "MODEL.STYLE.OUTPUT 'sigmoid' is none of tanh, none"),
        ("MODEL.STYLE.STYLE_WEIGHT -1.0", "MODEL.STYLE.STYLE_WEIGHT -1.0 must be 0 or more"),
        ("DATASETS.CONTENT_FOLDER none/", "set DATASETS.CONTENT_FOLDER to a folder of images"),
        ("INPUT.FORMAT BGR", "INPUT.FORMAT 'BGR': style transfer takes RGB"),
        ("MODEL.STYLE.CHANNELS 10", r"10.*16"),
    ],
)
def test_mistakes_are_one_line(overrides, words, tmp_path, capsys, datasets):
    register_shapes(datasets / "shapes")
    output = ["OUTPUT_DIR", str(tmp_path / "run"), "MODEL.DEVICE", "cpu"]
    said = refuse(capsys, "--config", SHAPES, *overrides.split(), *output)
    assert re.search(words, said), said


@pytest.mark.slow
def test_a_run_has_a_page_and_its_weights_stylize_a_video(tmp_path, datasets):
    folder = tmp_path / "run"
    shorter = "SOLVER.MAX_ITER 6 TEST.EVAL_PERIOD 4 SOLVER.IMS_PER_BATCH 2".split()
    command = [*TRAIN_NET, "--config", SHAPES, *SMALL, *shorter, "OUTPUT_DIR", str(folder)]
    done = run(command, datasets)
    assert done.returncode == 0, done.stderr[-2000:]
    records = {}
    for line in (folder / "metrics.json").read_text().splitlines():
        records |= json.loads(line)
    assert {"loss_content", "loss_style", "loss_tv", "style_transfer/loss_style"} <= records.keys()
    assert "sw/network.blocks.0.conv1.norm/cov/iw" in records
    stages = sorted(p.name for p in (folder / "inference").iterdir())
    assert stages == ["0000004", "0000006", "content"]
    page = (folder / "report.html").read_text()
    assert "<h2>Stylized images</h2>" in page
    assert "No page" not in (folder / "log.txt").read_text()
    # Pictures of an earlier run in the folder are not this run's.
    (folder / "inference/0000005").mkdir()
    assert evaluated_iterations(folder) == {4, 6}

    video = cv2.VideoWriter(
        str(tmp_path / "in.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 5.0, (40, 24)
    )
    for level in (0, 100, 200):
        video.write(np.full((24, 40, 3), level, np.uint8))
    video.release()
    predict = [TRAIN_NET[0], TRAIN_NET[1].replace("train_net", "predict"), str(tmp_path / "in.mp4")]
    weights = str(folder / "model_final.pth")
    Image.new("RGB", (60, 50)).save(tmp_path / "large.png")
    predict += [
        str(tmp_path / "large.png"),
        "--weights",
        weights,
        "--output",
        str(tmp_path / "out"),
    ]
    done = run([*predict, "MODEL.STYLE.MAX_PIXELS", "1000"], datasets)
    # What is too large is named, and the rest is done.
    assert done.returncode == 1, done.stderr[-2000:]
    (line,) = [x for x in done.stderr.splitlines() if "error: " in x]
    assert "large.png': a picture of 60 x 50 pixels" in line
    assert not (tmp_path / "out/large.png").exists()
    assert cv2.VideoCapture(str(tmp_path / "out/in.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 3
    assert json.loads((tmp_path / "out/predictions.json").read_text()) == []


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_result(tmp_path, datasets):
    arguments = ["--config", SHAPES, *SMALL, "SOLVER.IMS_PER_BATCH", "2"]
    arguments += ["SOLVER.MAX_ITER", "40", "SOLVER.CHECKPOINT_PERIOD", "4"]
    check_killed_run_resumes_to_the_same_result(arguments, datasets, tmp_path, kills=[2])
