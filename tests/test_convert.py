"""Checkpoints of BN ResNets become SW ones: names, values, configs, and what is said about them."""

import importlib.util
import pickle
import re
import shlex
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone, build_model
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from sw_detectron import SwitchWhiten2d, UserError, add_sw_config
from sw_detectron.checkpoint import Checkpointer, read_checkpoint
from sw_detectron.checkpoint.convert import Images, convert_checkpoint
from sw_detectron.engine.setup import load_config
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.modeling.summary import sw_layers

IMAGENET_50 = [
    "stem.conv1",
    "res2.1.conv2",
    "res3.0.conv2",
    "res3.2.conv2",
    "res4.0.conv2",
    "res4.2.conv2",
    "res4.4.conv2",
]


@pytest.fixture(scope="session")
def tool():
    path = Path(__file__).parents[1] / "tools/convert_checkpoint.py"
    spec = importlib.util.spec_from_file_location("convert_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *args: module.main(module.parser().parse_args([str(arg) for arg in args]))


class RecordingCheckpointer(DetectionCheckpointer):
    """Detectron2's own, which keeps what it would only log."""

    def _log_incompatible_keys(self, incompatible):
        self.incompatible = incompatible


class RecordingSWCheckpointer(Checkpointer):
    def _log_incompatible_keys(self, incompatible):
        self.incompatible = incompatible


@torch.no_grad()
def randomize(net, seed=0):
    """Random weights, small enough for any depth, and norms of which nothing is at its default."""
    generator = torch.Generator().manual_seed(seed)
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            # The last norm of a block scales what it adds; large ones would grow with the depth.
            scale = 0.3 if name.endswith(("bn3", "conv3.norm")) else 1.0
            module.weight.uniform_(0.5 * scale, 1.5 * scale, generator=generator)
            module.bias.normal_(0, 0.2, generator=generator)
            module.running_mean.normal_(0, 0.2, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


@torch.no_grad()
def torchvision_features(net, x):
    x = net.maxpool(torch.relu(net.bn1(net.conv1(x))))
    features = {}
    for k in range(1, 5):
        x = features[f"res{k + 1}"] = getattr(net, f"layer{k}")(x)
    return features


def sw_cfg(**backbone):
    cfg = get_cfg()
    add_sw_config(cfg)
    cfg.MODEL.BACKBONE.NAME = "build_sw_resnet_backbone"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    return cfg


def merge_printed_config(cfg, printed):
    lines = printed.split("config for ")[1].splitlines()[1:]
    cfg.merge_from_list([part for line in lines for part in shlex.split(line)])
    return cfg


def build_loaded(cfg, out_features=("res2", "res3", "res4", "res5")):
    """The backbone of a config with its MODEL.WEIGHTS, by Detectron2's own checkpointer."""
    cfg.MODEL.RESNETS.OUT_FEATURES = list(out_features)
    net = build_backbone(cfg, ShapeSpec(channels=3)).eval()
    checkpointer = RecordingCheckpointer(net)
    checkpointer.load(cfg.MODEL.WEIGHTS)
    return net, checkpointer.incompatible


def assert_close(found, expected):
    # The same sums in another order of float32 operations; relative to the largest value, for
    # after the ReLU many are 0.
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


NETWORKS = {
    "resnet18": lambda: torchvision.models.resnet18(),
    "resnet34": lambda: torchvision.models.resnet34(),
    "resnet50": lambda: torchvision.models.resnet50(),
    "resnet101": lambda: torchvision.models.resnet101(),
    "resnext50": lambda: torchvision.models.resnext50_32x4d(),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet101")) for name in NETWORKS],
)
def test_without_placement_the_network_computes_the_same(tool, tmp_path, capsys, name):
    source = randomize(NETWORKS[name]())
    torch.save(source.state_dict(), tmp_path / "source.pth")
    tool(tmp_path / "source.pth", tmp_path / "out.pkl", "--placement", "none")
    cfg = merge_printed_config(sw_cfg(), capsys.readouterr().out)
    net, incompatible = build_loaded(cfg)
    assert not incompatible.missing_keys and not incompatible.incorrect_shapes
    assert not incompatible.unexpected_keys
    assert cfg.INPUT.FORMAT == "RGB" and cfg.MODEL.PIXEL_STD == [58.395, 57.120, 57.375]
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found = net(x)
    expected = torchvision_features(source, x)
    assert found.keys() == expected.keys()
    for stage in found:
        assert_close(found[stage], expected[stage])
    saved = pickle.loads((tmp_path / "out.pkl").read_bytes())
    assert all(type(array) is np.ndarray for array in saved["model"].values())
    assert not any("num_batches_tracked" in key for key in saved["model"])


def test_timm_safetensors(tool, tmp_path, capsys):
    timm = pytest.importorskip("timm")
    source = randomize(timm.create_model("resnet50"))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    tool(tmp_path / "model.safetensors", tmp_path / "out.pth", "--placement", "none")
    net, incompatible = build_loaded(merge_printed_config(sw_cfg(), capsys.readouterr().out))
    assert not incompatible.missing_keys and not incompatible.unexpected_keys
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected, found = source.forward_features(x), net(x)["res5"]
    assert_close(found, expected)


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    """A torchvision ResNet-50 and its file."""
    net = randomize(torchvision.models.resnet50())
    path = tmp_path_factory.mktemp("resnet50") / "resnet50.pth"
    torch.save(net.state_dict(), path)
    return net, path


def torchvision_names(names):
    """Detectron2's names of a torchvision ResNet's, written down independently of the package."""
    stages = {"res2": "layer1", "res3": "layer2", "res4": "layer3", "res5": "layer4"}
    result = {}
    for name in names:
        stage, *rest = name.split(".")
        if stage == "linear":
            result[name] = f"fc.{rest[0]}"
        elif stage == "stem":
            result[name] = ".".join(["bn1", rest[2]] if rest[1] == "norm" else ["conv1", rest[1]])
        else:
            block, conv, *inner = rest
            if conv == "shortcut":
                place = ["downsample", "1" if inner[0] == "norm" else "0", inner[-1]]
            else:
                place = [conv.replace("conv", "bn") if inner[0] == "norm" else conv, inner[-1]]
            result[name] = ".".join([stages[stage], block, *place])
    return result


def test_seven_layers_become_sw_and_the_rest_stays(resnet50):
    net, path = resnet50
    source = net.state_dict()
    result = convert_checkpoint(path, keep_classifier=True)
    assert [(row.number, row.name) for row in result.placed] == list(
        zip([1, 6, 12, 18, 24, 30, 36], IMAGENET_50)
    )
    assert {row.before for row in result.placed} == {"BatchNorm2d"}
    assert result.placed[2].after == "SW {bw, iw} 8 x 16"
    placed = {f"{name}.norm." for name in IMAGENET_50}
    own = {"running_cov", "sw_mean_weight", "sw_var_weight"}
    sw_keys = {name for name in result.model if name.rpartition(".")[2] in own}
    assert sw_keys == {prefix + key for prefix in placed for key in own}
    names = torchvision_names(result.model.keys() - sw_keys)
    used = {name for name in source if not name.endswith("num_batches_tracked")}
    lost = {torchvision_names([f"{p}running_var"])[f"{p}running_var"] for p in placed}
    assert set(names.values()) == used - lost
    for name, source_name in names.items():
        expected = source[source_name]
        if any(name == f"{prefix}running_mean" for prefix in placed):
            expected = expected.view(-1, 16, 1)
        assert torch.equal(result.model[name], expected), name
    for prefix in placed:
        variance = source[torchvision_names([f"{prefix}running_var"])[f"{prefix}running_var"]]
        for group, cov in enumerate(result.model[f"{prefix}running_cov"]):
            assert torch.equal(cov, torch.diag(variance[16 * group : 16 * group + 16]))
        assert torch.equal(result.model[f"{prefix}sw_mean_weight"], torch.ones(2))


def test_options_reach_the_layers(resnet50):
    _, path = resnet50
    result = convert_checkpoint(
        path,
        placement=[1, 12],
        norm="SWb",
        statistics=["in", "bw"],
        num_pergroup=32,
        whitening="eigh",
    )
    assert result.config["MODEL.SW.LAYERS"] == [1, 12]
    assert result.config["MODEL.SW.STATISTICS"] == ["in", "bw"]
    assert result.config["MODEL.SW.WHITENING"] == "eigh"
    assert [row.after for row in result.placed] == ["SW {bw, in} 2 x 32", "SW {bw, in} 4 x 32"]


def mask_rcnn_cfg():
    cfg = load_config("mask_rcnn_R50_FPN_SW_2x.yaml", [])
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"  # SyncBN's names, but for a CPU
    cfg.MODEL.ROI_BOX_HEAD.NORM = cfg.MODEL.ROI_MASK_HEAD.NORM = "BN"
    return cfg


@pytest.mark.parametrize("ending", ["pkl", "pth"])
@pytest.mark.parametrize("checkpointer_class", [RecordingCheckpointer, RecordingSWCheckpointer])
def test_a_detector_starts_from_it(tool, resnet50, tmp_path, capsys, ending, checkpointer_class):
    net, path = resnet50
    tool(path, tmp_path / f"out.{ending}")
    cfg = merge_printed_config(mask_rcnn_cfg(), capsys.readouterr().out)
    model = build_model(cfg)
    checkpointer = checkpointer_class(model)
    checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=False)
    incompatible = checkpointer.incompatible
    backbone = "backbone.bottom_up."
    assert not [key for key in incompatible.missing_keys if key.startswith(backbone)]
    assert not incompatible.unexpected_keys
    assert not incompatible.incorrect_shapes
    resnet = model.backbone.bottom_up
    assert torch.equal(resnet.stem.conv1.weight, net.conv1.weight)
    assert torch.equal(resnet.res4[2].conv2.norm.bias, net.layer3[2].bn2.bias)
    assert isinstance(resnet.res4[2].conv2.norm, SwitchWhiten2d)


def test_whole_detector_keeps_its_heads(tool, tmp_path, capsys):
    cfg = mask_rcnn_cfg()
    cfg.MODEL.SW.PLACEMENT = "none"
    source = randomize(build_model(cfg))
    contents = {"model": source.state_dict(), "optimizer": {"state": {}}, "iteration": 7}
    torch.save(contents, tmp_path / "detector.pth")
    tool(tmp_path / "detector.pth", tmp_path / "out.pth")
    printed = capsys.readouterr().out
    assert "left out: optimizer" in printed and "left out: iteration" in printed
    cfg.MODEL.SW.PLACEMENT = "imagenet"
    model = build_model(cfg)
    checkpointer = RecordingCheckpointer(model)
    checkpointer.load(str(tmp_path / "out.pth"))
    assert not any(checkpointer.incompatible)
    state, before = model.state_dict(), source.state_dict()
    heads = [name for name in before if not name.startswith("backbone.bottom_up.")]
    assert len(heads) > 80
    assert all(torch.equal(state[name], before[name]) for name in heads)
    assert [row.name for row in sw_layers(model)] == IMAGENET_50
    assert not torch.load(tmp_path / "out.pth")["matching_heuristics"]


def test_detector_without_fpn(tmp_path):
    """Its last stage belongs to the heads."""
    cfg = sw_cfg()
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res4"]
    cfg.MODEL.SW.PLACEMENT = "none"
    net = randomize(build_backbone(cfg, ShapeSpec(channels=3)))
    model = {f"backbone.{name}": tensor for name, tensor in net.state_dict().items()}
    model["roi_heads.res5.0.conv1.weight"] = torch.randn(512, 1024, 1, 1)
    torch.save({"model": model}, tmp_path / "c4.pth")
    result = convert_checkpoint(tmp_path / "c4.pth")
    assert result.is_detector
    assert [row.name for row in result.placed] == IMAGENET_50
    assert "backbone.res4.4.conv2.norm.running_cov" in result.model
    key = "roi_heads.res5.0.conv1.weight"
    assert torch.equal(result.model[key], model[key])


def test_own_pretraining(tmp_path):
    cfg = sw_cfg()
    cfg.MODEL.SW.PLACEMENT = "none"
    net = randomize(build_backbone(cfg, ShapeSpec(channels=3)))
    model = {f"backbone.{name}": tensor for name, tensor in net.state_dict().items()}
    model |= {"linear.weight": torch.randn(10, 2048), "linear.bias": torch.randn(10)}
    torch.save({"model": model, "trainer": {"iteration": 3}}, tmp_path / "model_final.pth")
    result = convert_checkpoint(tmp_path / "model_final.pth")
    assert not result.is_detector and result.left_out == ["trainer"] and not result.unused
    assert "linear.weight" not in result.model
    assert any("linear.weight, linear.bias" in note for note in result.notes)
    kept = convert_checkpoint(tmp_path / "model_final.pth", keep_classifier=True)
    assert torch.equal(kept.model["linear.weight"], model["linear.weight"])
    assert torch.equal(result.model["stem.conv1.weight"], net.stem.conv1.weight)


def caffe2_blobs(seed=0, groups=1, width=64):
    """A ResNet-50 under the names of MSRA's R-50.pkl: BN folded into a scale and a bias.

    `groups` of the 3x3 convolutions, which have `width` channels in res2; 32 and 128 is ResNeXt.
    """
    rng = np.random.default_rng(seed)
    blobs = {
        "conv1_w": rng.normal(size=(64, 3, 7, 7)),
        "conv1_b": np.zeros(64),
        "res_conv1_bn_s": rng.uniform(0.5, 1.5, 64),
        "res_conv1_bn_b": rng.normal(size=64),
        "fc1000_w": rng.normal(size=(1000, 2048)),
        "fc1000_b": rng.normal(size=1000),
    }
    channels = 64
    for stage, (blocks, out) in enumerate(((3, 256), (4, 512), (6, 1024), (3, 2048)), start=2):
        inner = width * out // 256
        for i in range(blocks):
            convs = {
                "branch2a": (inner, channels, 1, 1),
                "branch2b": (inner, inner // groups, 3, 3),
                "branch2c": (out, inner, 1, 1),
            }
            if i == 0:
                convs["branch1"] = (out, channels, 1, 1)
            for name, shape in convs.items():
                prefix = f"res{stage}_{i}_{name}"
                blobs[f"{prefix}_w"] = 0.01 * rng.standard_normal(shape, np.float32)
                blobs[f"{prefix}_bn_s"] = rng.uniform(0.5, 1.5, shape[0])
                blobs[f"{prefix}_bn_b"] = rng.normal(size=shape[0])
            channels = out
    blobs["conv1_w_momentum"] = np.zeros(3)
    return {name: np.asarray(blob, np.float32) for name, blob in blobs.items()}


@pytest.fixture(scope="module")
def caffe2_pickle(tmp_path_factory):
    path = tmp_path_factory.mktemp("caffe2") / "R-50.pkl"
    path.write_bytes(pickle.dumps({"blobs": caffe2_blobs()}, protocol=2))
    return path


def test_caffe2_names_as_detectron2_maps_them(tool, caffe2_pickle, tmp_path, capsys):
    tool(caffe2_pickle, tmp_path / "out.pkl", "--placement", "none")
    printed = capsys.readouterr().out
    assert "not used: conv1_b" in printed
    cfg = merge_printed_config(sw_cfg(), printed)
    assert cfg.INPUT.FORMAT == "BGR" and cfg.MODEL.RESNETS.STRIDE_IN_1X1
    assert cfg.MODEL.PIXEL_MEAN == [103.530, 116.280, 123.675]
    assert cfg.MODEL.PIXEL_STD == [1.0, 1.0, 1.0]
    cfg.MODEL.RESNETS.NORM = "FrozenBN"
    net, incompatible = build_loaded(cfg)
    assert not incompatible.missing_keys
    reference = build_backbone(cfg, ShapeSpec(channels=3)).eval()
    DetectionCheckpointer(reference).load(str(caffe2_pickle))
    expected = reference.state_dict()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    model = convert_checkpoint(caffe2_pickle, keep_classifier=True).model
    assert torch.equal(model["linear.weight"], torch.from_numpy(caffe2_blobs()["fc1000_w"]))


def test_folded_bn_is_said(caffe2_pickle):
    result = convert_checkpoint(caffe2_pickle)
    assert len(result.placed) == 7
    assert [note for note in result.notes if "--calibrate" in note and "unknown" in note]


@pytest.mark.parametrize(
    "variance, kind", [(1, "Caffe2"), (1 - 1e-5, "Caffe2"), (1.001, "torchvision")]
)
def test_norms_are_folded_where_all_variances_are_one(tmp_path, variance, kind):
    """To the rounding, also where FrozenBN's ε has been taken off."""
    cfg = sw_cfg()
    cfg.MODEL.SW.PLACEMENT = "none"
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    state = build_backbone(cfg, ShapeSpec(channels=3)).state_dict()
    for name, tensor in state.items():
        if name.endswith("running_var"):
            tensor.fill_(variance)
    torch.save(state, tmp_path / "R-18.pth")
    result = convert_checkpoint(tmp_path / "R-18.pth")
    assert [note for note in result.notes if f"taken to be {kind}'s" in note]


def test_caffe2s_resnext_strides_in_the_3x3_and_scales_pixels(tmp_path):
    """As Detectron2's model zoo says of X-101-32x8d.pkl."""
    blobs = caffe2_blobs(groups=32, width=128)
    (tmp_path / "X-50.pkl").write_bytes(pickle.dumps({"blobs": blobs}))
    config = convert_checkpoint(tmp_path / "X-50.pkl").config
    assert config["MODEL.RESNETS.NUM_GROUPS"] == 32
    assert config["MODEL.RESNETS.WIDTH_PER_GROUP"] == 4
    assert config["MODEL.RESNETS.STRIDE_IN_1X1"] is False
    assert config["INPUT.FORMAT"] == "BGR"
    assert config["MODEL.PIXEL_MEAN"] == [103.530, 116.280, 123.675]
    assert config["MODEL.PIXEL_STD"] == [57.375, 57.120, 58.395]


@pytest.mark.parametrize(
    "mean, expected", [((103.5, 116.3, 123.7), "BGR"), ((120.0, 115.0, 100.0), "RGB")]
)
def test_the_order_of_channels_is_that_of_the_detectors_own_mean(tmp_path, mean, expected):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet18.pth")
    backbone = convert_checkpoint(tmp_path / "resnet18.pth", placement="none").model
    detector = {f"backbone.bottom_up.{name}": tensor for name, tensor in backbone.items()}
    detector |= {"roi_heads.fc.weight": torch.ones(2), "pixel_std": torch.ones(3, 1, 1)}
    detector["pixel_mean"] = torch.tensor(mean).view(3, 1, 1)
    torch.save({"model": detector}, tmp_path / "detector.pth")
    config = convert_checkpoint(tmp_path / "detector.pth").config
    assert config["INPUT.FORMAT"] == expected
    assert config["MODEL.PIXEL_MEAN"] == pytest.approx(mean, rel=1e-6)  # float32
    assert config["MODEL.PIXEL_STD"] == [1, 1, 1]
    detector["pixel_mean"] = torch.ones(4)
    torch.save({"model": detector}, tmp_path / "detector.pth")
    with pytest.raises(UserError, match="pixel_mean has 4 values"):
        convert_checkpoint(tmp_path / "detector.pth")


def released_state(num_weights=2, tied=False, seed=0):
    """The paper authors' release: torchvision's names, with sw in the place of some bn."""
    rng = torch.Generator().manual_seed(seed)
    state = OrderedDict()
    for name, tensor in torchvision.models.resnet50().state_dict().items():
        match = re.fullmatch(r"(layer[123]\.[135]\.|)bn([12])\.(\w+)", name)
        layer = match and (match[1] == "") == (match[2] == "1") and match[1] + f"sw{match[2]}"
        if not layer:
            state[f"module.{name}"] = torch.rand(tensor.shape, generator=rng).to(tensor.dtype)
        elif match[3] in ("weight", "bias"):
            state[f"module.{layer}.{match[3]}"] = torch.randn(tensor.shape, generator=rng)
        elif match[3] == "running_mean":
            groups = tensor.numel() // 16
            key = f"module.{layer}"
            root = torch.randn(groups, 16, 16, generator=rng)
            state[f"{key}.running_mean"] = torch.randn(groups, 16, 1, generator=rng)
            state[f"{key}.running_cov"] = root @ root.mT
            state[f"{key}.sw_mean_weight"] = torch.randn(num_weights, generator=rng)
            if not tied:
                state[f"{key}.sw_var_weight"] = torch.randn(num_weights, generator=rng)
    return state


@pytest.mark.parametrize("num_weights, tied", [(2, False), (5, False), (2, True)])
def test_the_authors_release_keeps_every_value(tool, tmp_path, capsys, num_weights, tied):
    state = released_state(num_weights, tied)
    torch.save({"state_dict": state, "arch": "resnet50", "step": 5}, tmp_path / "sw.pth.tar")
    tool(tmp_path / "sw.pth.tar", tmp_path / "out.pkl")
    printed = capsys.readouterr().out
    cfg = merge_printed_config(sw_cfg(), printed)
    assert "left out: arch" in printed
    assert cfg.MODEL.SW.PLACEMENT == "released" and tied == cfg.MODEL.SW.TIE_WEIGHT
    net, incompatible = build_loaded(cfg)
    assert not incompatible.missing_keys
    assert [row.number for row in sw_layers(net)] == [1, 6, 15, 21, 27, 33, 39]
    assert {len(row.layer.statistics) for row in sw_layers(net)} == {num_weights}
    found = read_checkpoint(tmp_path / "out.pkl")
    names = torchvision_names(found)
    kept = {k.removeprefix("module."): v for k, v in state.items() if "num_batches" not in k}
    sw = {f"{row.name}.norm" for row in sw_layers(net)}
    for name, source_name in names.items():
        if name.rpartition(".")[0] in sw:
            source_name = re.sub(r"bn(\d)", r"sw\1", source_name)
        assert torch.equal(found[name], kept.pop(source_name)), name
    assert not kept


def test_the_authors_release_with_a_set_to_name(tmp_path):
    torch.save({"state_dict": released_state(3)}, tmp_path / "sw.pth")
    with pytest.raises(UserError, match="3 importance weights.*--statistics bn,in,ln"):
        convert_checkpoint(tmp_path / "sw.pth")
    result = convert_checkpoint(tmp_path / "sw.pth", statistics=["bw", "iw", "ln"])
    assert result.config["MODEL.SW.STATISTICS"] == ["bw", "iw", "ln"]
    with pytest.raises(UserError, match="already.*--placement"):
        convert_checkpoint(tmp_path / "sw.pth", placement="imagenet")
    # SN has three statistics, which its name says.
    assert convert_checkpoint(tmp_path / "sw.pth", norm="SN").config["MODEL.SW.STATISTICS"] == [
        *("bn", "in", "ln")
    ]


def test_a_release_whose_layers_differ_is_refused(tmp_path):
    state = released_state(2)
    name = next(key for key in state if key.endswith("sw_mean_weight"))
    state[name] = torch.randn(5)
    torch.save({"state_dict": state}, tmp_path / "sw.pth")
    with pytest.raises(UserError, match="differ in statistics, groups or tied weights"):
        convert_checkpoint(tmp_path / "sw.pth")


def test_cifar_checkpoint(tmp_path):
    """A network under He-style names with option-A shortcuts, as trained by DataParallel."""
    net = randomize(make_cifar_resnet(20, num_classes=10))
    names = {}
    for name in net.state_dict():
        old = name.replace("stem.conv1.norm", "bn1").replace("stem.", "")
        old = re.sub(r"conv(\d)\.norm", r"bn\1", old)
        names[name] = re.sub(r"^res(\d)", lambda m: f"layer{int(m[1]) - 1}", old)
    state = {f"module.{names[name]}": tensor for name, tensor in net.state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 91.0}, tmp_path / "cifar.th")
    result = convert_checkpoint(tmp_path / "cifar.th", placement="none")
    for name, tensor in net.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(result.model[name], tensor), name
    result = convert_checkpoint(tmp_path / "cifar.th")
    assert [row.number for row in result.placed] == [1, 4, 8, 12, 16]
    assert result.config["MODEL.RESNETS.DEPTH"] == 20


def test_cifar_networks_are_calibrated_with_images_of_their_size(tmp_path):
    net = randomize(make_cifar_resnet(20))
    torch.save(net.state_dict(), tmp_path / "cifar.pth")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    (tmp_path / "pictures").mkdir()
    for i, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"pictures/{i}.png")
    images = Images(str(tmp_path / "pictures"), 3)
    found = convert_checkpoint(tmp_path / "cifar.pth", images=images).model
    mean = torch.tensor([123.675, 116.280, 103.530]).double().view(3, 1, 1)
    std = torch.tensor([58.395, 57.120, 57.375]).double().view(3, 1, 1)
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2) - mean) / std
    y = nn.functional.conv2d(x, net.stem.conv1.weight.double(), padding=1).detach()
    for name, expected in (
        ("running_mean", y.mean((0, 2, 3)).view(1, 16, 1)),
        ("running_cov", torch.cov(y.transpose(0, 1).flatten(1), correction=0)[None]),
    ):
        value = found[f"stem.conv1.norm.{name}"].double()
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("depth", [20, 44, 56])
def test_real_cifar_checkpoints(shared_data, depth):
    (path,) = (shared_data / "data/pretrained").glob(f"cifar10_resnet{depth}-*.th")
    result = convert_checkpoint(path)
    assert result.config["MODEL.SW.PLACEMENT"] == "cifar"
    assert result.config["MODEL.RESNETS.DEPTH"] == depth
    assert len(result.placed) == 1 + (depth - 1) // 4
    assert not result.unused and result.left_out == ["best_prec1"]


@pytest.mark.parametrize(
    "pattern, replacement, words",
    [
        (r"^conv1\.weight", "conv1.0.weight", "deep stem"),
        (r"^layer2\.0\.conv1", "layer2.0.se.fc", "no plain ResNet.*res3.0.se.fc.weight"),
        (r"^layer3\.1\.bn1", "other.bn1", "incomplete: .*res4.1.conv1.norm.weight"),
        (r"^layer(\d)", r"features.\1", "no checkpoint of a ResNet.*conv1.weight"),
        (r"^layer1\.1\.", "layer1.7.", "no plain ResNet.*res2.7"),
        (r"^layer3\.5", "layer3.5x", r"no ResNet with \(3, 4, 5, 3\) bottleneck blocks"),
    ],
)
def test_other_architectures_are_one_clear_line(resnet50, tmp_path, pattern, replacement, words):
    net, _ = resnet50
    state = {re.sub(pattern, replacement, k): v for k, v in net.state_dict().items()}
    torch.save(state, tmp_path / "source.pth")
    with pytest.raises(UserError, match=words) as error:
        convert_checkpoint(tmp_path / "source.pth")
    assert "\n" not in str(error.value)


def test_group_norm_is_not_taken_for_folded_bn(resnet50, tmp_path):
    net, _ = resnet50
    state = {k: v for k, v in net.state_dict().items() if "running" not in k}
    torch.save(state, tmp_path / "gn.pth")
    with pytest.raises(UserError, match="no running statistics.*GroupNorm"):
        convert_checkpoint(tmp_path / "gn.pth")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(resnet50, tmp_path, value):
    net, _ = resnet50
    state = dict(net.state_dict())
    state["layer4.2.conv3.weight"] = state["layer4.2.conv3.weight"].clone()
    state["layer4.2.conv3.weight"][5, 5] = value
    torch.save(state, tmp_path / "nan.pth")
    with pytest.raises(UserError, match="res5.2.conv3.weight.*not finite"):
        convert_checkpoint(tmp_path / "nan.pth")


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("layer2.1.bn2.running_var", lambda v: v - 1, "res3.1.conv2.norm.running_var .*negative"),
        ("layer2.1.conv2.weight", lambda v: v.int(), "res3.1.conv2.weight .*torch.int32.*float"),
        ("layer2.1.bn2.weight", lambda v: v > 0, "res3.1.conv2.norm.weight .*torch.bool.*float"),
    ],
)
def test_values_that_no_network_has(resnet50, tmp_path, name, change, words):
    net, _ = resnet50
    state = net.state_dict()
    torch.save(state | {name: change(state[name])}, tmp_path / "wrong.pth")
    with pytest.raises(UserError, match=words):
        convert_checkpoint(tmp_path / "wrong.pth")


def test_a_backbone_without_its_last_stage_is_refused(resnet50, tmp_path):
    """In a detector the heads have it; alone it is no ResNet of any depth."""
    _, path = resnet50
    model = convert_checkpoint(path, placement="none").model
    model = {name: tensor for name, tensor in model.items() if not name.startswith("res5")}
    torch.save({"model": model}, tmp_path / "cut.pth")
    with pytest.raises(UserError, match=r"no ResNet with \(3, 4, 6\) bottleneck blocks"):
        convert_checkpoint(tmp_path / "cut.pth")
    state = {n: t for n, t in resnet50[0].state_dict().items() if not n.startswith("layer4")}
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(UserError, match=r"\(3, 4, 6\) blocks"):
        convert_checkpoint(tmp_path / "cut.pth")


def test_half_precision_becomes_float32(resnet50, tmp_path):
    net, _ = resnet50
    torch.save({k: v.half() for k, v in net.state_dict().items()}, tmp_path / "half.pth")
    result = convert_checkpoint(tmp_path / "half.pth", placement="none")
    weight = result.model["res2.0.conv1.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, net.layer1[0].conv1.weight.half().float())


def test_our_checkpointer_reads_caffe2_as_detectron2_does(caffe2_pickle):
    cfg = sw_cfg()
    cfg.MODEL.RESNETS.NORM, cfg.MODEL.SW.PLACEMENT = "FrozenBN", "none"
    ours, theirs = (build_backbone(cfg, ShapeSpec(channels=3)) for _ in range(2))
    Checkpointer(ours).load(str(caffe2_pickle))
    DetectionCheckpointer(theirs).load(str(caffe2_pickle))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "key, value", [("INPUT.FORMAT", "RGB"), ("MODEL.RESNETS.STRIDE_IN_1X1", False)]
)
def test_our_checkpointer_knows_what_caffe2s_weights_need(caffe2_pickle, caplog, key, value):
    cfg = sw_cfg()  # has what Detectron2 takes for Caffe2's by default
    cfg.MODEL.SW.PLACEMENT = "none"
    net = build_backbone(cfg, ShapeSpec(channels=3))
    Checkpointer(net, cfg=cfg).load(str(caffe2_pickle))
    assert "the weights were made for" not in caplog.text
    cfg.merge_from_list([key, value])
    Checkpointer(net, cfg=cfg).load(str(caffe2_pickle))
    assert f"{key} is {value}, but the weights were made for" in caplog.text
    assert caplog.text.count("the weights were made for") == 1


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for i in range(3):
        pixels = rng.integers(0, 256, (7, 7, 3), np.uint8)
        Image.fromarray(pixels).resize((224, 224)).save(folder / f"{i}.png")
    return folder


def test_statistics_are_found_where_bn_is_folded(caffe2_pickle, picture_folder):
    """The network computes what it did, and its norms know the moments of their inputs."""
    images = Images(str(picture_folder), 3)
    found = convert_checkpoint(caffe2_pickle, placement="none", images=images).model
    cfg = sw_cfg()
    cfg.MODEL.SW.PLACEMENT, cfg.MODEL.RESNETS.STRIDE_IN_1X1 = "none", True
    pictures = [Image.open(path) for path in sorted(picture_folder.iterdir())]
    rgb = torch.tensor(np.stack([np.asarray(picture) for picture in pictures])).float()
    x = rgb.flip(3).permute(0, 3, 1, 2) - torch.tensor([103.530, 116.280, 123.675])[:, None, None]
    net, folded = (build_backbone(cfg, ShapeSpec(channels=3)).eval() for _ in range(2))
    net.load_state_dict(found, strict=False)
    DetectionCheckpointer(folded).load(str(caffe2_pickle))
    with torch.no_grad():
        ours, expected = net(x)["res5"], folded(x)["res5"]
        conv1 = nn.functional.conv2d(x.double(), folded.stem.conv1.weight.double(), None, 2, 3)
    # 53 norms scale in float32, each another way round.
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
    mean, variance = conv1.mean((0, 2, 3)), conv1.var((0, 2, 3), correction=0)
    torch.testing.assert_close(
        found["stem.conv1.norm.running_mean"].double(), mean, rtol=1e-4, atol=1e-2
    )
    torch.testing.assert_close(
        found["stem.conv1.norm.running_var"].double(), variance, rtol=1e-4, atol=0
    )
    result = convert_checkpoint(caffe2_pickle, placement=[1], images=images, keep_classifier=True)
    cov = torch.cov(conv1[:, 16:32].transpose(0, 1).flatten(1), correction=0)
    torch.testing.assert_close(
        result.model["stem.conv1.norm.running_cov"][1].double(),
        cov,
        rtol=1e-4,
        atol=1e-4 * cov.max(),
    )
    assert not result.notes


def test_warm_start(resnet50):
    _, path = resnet50
    result = convert_checkpoint(path, norm="SWb", whitening="eigh", warm_start=True)
    weights = result.model["res4.4.conv2.norm.sw_var_weight"].softmax(0)
    assert weights[2] > 0.999  # of bw, iw, bn, in, ln
    with pytest.raises(UserError, match="bn in its set"):
        convert_checkpoint(path, warm_start=True)
