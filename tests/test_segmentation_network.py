"""The segmentation network: against the same network written out, and its published sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.models.segmentation import FCN_ResNet50_Weights, FCN_ResNet101_Weights

from sw_detectron import UserError
from sw_detectron.engine import load_config
from sw_detectron.tasks.segmentation.model import (
    MultiScaleSegmentor,
    SlidingWindowSegmentor,
    window_slices,
)
from sw_detectron.tasks.segmentation.psp_head import PSPHead

PSPNET = "ade20k_pspnet_R101_BN.yaml"
BLOCKS = {"res2": 3, "res3": 4, "res4": 6, "res5": 3}
STRIDES = {"res2": 1, "res3": 2, "res4": 1, "res5": 1}
DILATIONS = {"res2": 1, "res3": 1, "res4": 2, "res5": 4}


class Written:
    """PSPNet with ResNet-50 out of plain functions, on the values of a state dict."""

    def __init__(self, state: dict, training: bool):
        self.state = {name: value.clone() for name, value in state.items()}
        self.training = training

    def conv(self, x, name, stride=1, dilation=1, relu=True):
        weight = self.state[f"{name}.weight"]
        padding = (weight.shape[-1] - 1) // 2 * dilation
        x = F.conv2d(x, weight, None, stride, padding, dilation)
        axes = (0, 2, 3)
        if self.training:
            mean, variance = x.mean(axes), x.var(axes, correction=0)
        else:
            mean, variance = (self.state[f"{name}.norm.running_{k}"] for k in ("mean", "var"))
        scale = self.state[f"{name}.norm.weight"] / (variance + 1e-5).sqrt()
        shift = self.state[f"{name}.norm.bias"] - mean * scale
        x = x * scale[:, None, None] + shift[:, None, None]
        return x.clamp(min=0) if relu else x

    def backbone(self, x):
        x = self.conv(x, "backbone.stem.conv1", stride=2)
        x = F.max_pool2d(x, 3, 2, 1)
        features = {}
        for stage, blocks in BLOCKS.items():
            for block in range(blocks):
                name = f"backbone.{stage}.{block}"
                stride = STRIDES[stage] if block == 0 else 1
                y = self.conv(x, f"{name}.conv1")
                y = self.conv(y, f"{name}.conv2", stride, DILATIONS[stage])
                y = self.conv(y, f"{name}.conv3", relu=False)
                if block == 0:
                    x = self.conv(x, f"{name}.shortcut", stride, relu=False)
                x = (x + y).clamp(min=0)
            features[stage] = x
        return features

    def classify(self, x, name):
        x = self.conv(x, f"sem_seg_head.{name}.conv")
        predictor = f"sem_seg_head.{name}.predictor"
        x = torch.einsum("nchw,kc->nkhw", x, self.state[f"{predictor}.weight"][..., 0, 0])
        x = x + self.state[f"{predictor}.bias"][:, None, None]
        return stretch(x, [8 * (side - 1) + 1 for side in x.shape[2:]])

    def pyramid(self, x):
        levels = [x]
        for i, bins in enumerate((1, 2, 3, 6)):
            cells = torch.stack(
                [
                    torch.stack([x[:, :, r, c].mean((2, 3)) for c in cells_of(x.shape[3], bins)], 2)
                    for r in cells_of(x.shape[2], bins)
                ],
                2,
            )
            reduced = self.conv(cells, f"sem_seg_head.pyramid.reductions.{i}")
            levels.append(stretch(reduced, x.shape[2:]))
        return torch.cat(levels, 1)

    def logits(self, x):
        features = self.backbone(x)
        return (
            self.classify(self.pyramid(features["res5"]), "classifier"),
            self.classify(features["res4"], "auxiliary"),
        )


def cells_of(length, bins):
    """Cell i of a grid reaches from floor(i L / bins) to ceil((i + 1) L / bins)."""
    return [slice(i * length // bins, -(-(i + 1) * length // bins)) for i in range(bins)]


def stretch(x, size):
    """Linear interpolation between the outermost samples, by a matrix for each axis."""
    matrices = []
    for source, target in zip(x.shape[2:], size):
        place = np.arange(target) * ((source - 1) / max(target - 1, 1))
        low = np.minimum(place.astype(int), max(source - 2, 0))
        matrix = np.zeros((target, source))
        matrix[np.arange(target), low] += 1 - (place - low)
        matrix[np.arange(target), np.minimum(low + 1, source - 1)] += place - low
        matrices.append(torch.from_numpy(matrix))
    return torch.einsum("nchw,ih,jw->ncij", x, *matrices)


@pytest.fixture(scope="module")
def pspnet():
    """In float64, with random statistics, and five classes."""
    torch.manual_seed(0)
    options = """
        MODEL.DEVICE cpu MODEL.RESNETS.DEPTH 50 MODEL.RESNETS.NORM BN MODEL.SEM_SEG_HEAD.NORM BN
        MODEL.SEM_SEG_HEAD.NUM_CLASSES 5 MODEL.SEM_SEG_HEAD.DROPOUT 0.0
        MODEL.SEM_SEG_HEAD.CLASS_WEIGHTS (1.0,0.5,2.0,3.0,0.25) INPUT.CROP.SIZE (57,65)
    """.split()
    model = build_model(load_config(PSPNET, options))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.3, 0.7)
            nn.init.normal_(module.bias, std=0.1)
    return model.double()


def normalized(pixels):
    mean = torch.tensor([123.675, 116.28, 103.53], dtype=torch.float64)
    std = torch.tensor([58.395, 57.12, 57.375], dtype=torch.float64)
    return (pixels.double() - mean[:, None, None]) / std[:, None, None]


def test_probabilities_are_those_of_the_network_written_out(pspnet):
    pixels = torch.randint(256, (3, 57, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        (output,) = pspnet.eval()([{"image": pixels.to(torch.uint8)}])
        logits, _ = Written(pspnet.state_dict(), training=False).logits(normalized(pixels)[None])
    # float64 all the way; the pixels' mean and deviation are float32 numbers.
    torch.testing.assert_close(output["sem_seg"], logits[0].softmax(0), atol=1e-7, rtol=1e-6)


def test_losses_are_weighted_means_over_labelled_pixels(pspnet):
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(256, (2, 3, 57, 65), generator=generator)
    labels = torch.randint(5, (2, 57, 65), generator=generator)
    labels[:, 10:30] = 255
    inputs = [{"image": p.to(torch.uint8), "sem_seg": t} for p, t in zip(pixels, labels)]
    written = Written(pspnet.state_dict(), training=True)
    with torch.no_grad():
        losses = pspnet.train()(inputs)
        both = written.logits(normalized(pixels))
    weights = np.array([1.0, 0.5, 2.0, 3.0, 0.25])
    kept = labels.numpy() != 255
    target = labels.numpy()[kept]
    for logits, name, factor in zip(both, ("loss_sem_seg", "loss_sem_seg_aux"), (1.0, 0.4)):
        score = np.moveaxis(logits.numpy(), 1, -1)[kept]
        log_p = score - np.log(np.exp(score).sum(1, keepdims=True))
        picked = log_p[np.arange(len(target)), target]
        expected = -(weights[target] * picked).sum() / weights[target].sum()
        assert losses[name].item() == pytest.approx(factor * expected, rel=1e-6), name


def head(**options):
    shapes = {"res4": ShapeSpec(channels=8, stride=8), "res5": ShapeSpec(channels=16, stride=8)}
    arguments = {
        "in_features": ["res4", "res5"],
        "num_classes": 3,
        "conv_dim": 4,
        "pool_bins": [],
        "norm": "BN",
        "dropout": 0.1,
        "ignore_value": 255,
        "loss_weight": 1.0,
        "aux_loss_weight": 0.4,
        "class_weights": [],
    }
    return PSPHead(shapes, **(arguments | options))


def test_crops_without_labels_have_no_loss():
    features = {"res4": torch.randn(2, 8, 3, 3), "res5": torch.randn(2, 16, 3, 3)}
    model = head().train()
    _, losses = model(features, torch.full((2, 17, 17), 255))
    sum(losses.values()).backward()
    assert [loss.item() for loss in losses.values()] == [0, 0]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_one_feature_has_no_auxiliary_loss():
    _, losses = head(in_features=["res5"]).train()(
        {"res5": torch.randn(2, 16, 3, 3)}, torch.zeros(2, 17, 17, dtype=torch.long)
    )
    assert list(losses) == ["loss_sem_seg"]


def test_class_weights_must_be_one_for_each_class():
    with pytest.raises(UserError, match="2, but there are 3 classes"):
        head(class_weights=[1.0, 2.0])


def build_on_meta(config, *options):
    with torch.device("meta"):
        return build_model(load_config(config, ["MODEL.DEVICE", "meta", *options]))


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    "depth, weights", [("50", FCN_ResNet50_Weights), ("101", FCN_ResNet101_Weights)]
)
def test_plain_network_has_as_many_parameters_as_torchvisions_fcn(depth, weights):
    """The same layers; theirs is published with 21 classes and auxiliary classifier."""
    options = ["MODEL.RESNETS.DEPTH", depth, "MODEL.SEM_SEG_HEAD.NUM_CLASSES", "21"]
    model = build_on_meta("ade20k_semantic_R50_BN.yaml", *options)
    assert count(model) == weights.DEFAULT.meta["num_params"]


def test_pspnet_has_as_many_parameters_as_published():
    """Open Model Zoo's pspnet-pytorch, ResNet-50 and 21 classes: 46.5827 million.

    Without the auxiliary classifier and with BN folded into the convolutions, of whose two
    parameters a channel one is left. Its stem, of three 3x3 convolutions with 32, 32 and 64
    channels, counts here in place of ours.
    """
    options = "MODEL.RESNETS.DEPTH 50 MODEL.SEM_SEG_HEAD.NUM_CLASSES 21".split()
    model = build_on_meta(PSPNET, *options)
    norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    auxiliary = model.sem_seg_head.auxiliary
    channels = sum(m.num_features for m in norms) - auxiliary.conv.norm.num_features
    ours, theirs = 3 * 64 * 49 + 64, 9 * (3 * 32 + 32 * 32 + 32 * 64) + 32 + 32 + 64
    folded = count(model) - count(auxiliary) - channels - ours + theirs
    assert folded == pytest.approx(46.5827e6, abs=150)


# Windows


class Pointwise(nn.Module):
    """A head whose logits depend on a pixel, and on its place in the window."""

    size_divisibility, padding_constraints, ignore_value = 0, {}, 255

    def __init__(self, window):
        super().__init__()
        rows, columns = torch.arange(window[0])[:, None], torch.arange(window[1])
        self.place = torch.stack([rows * 0.03 + columns * 0, -rows + columns * 0.1])

    def forward(self, x, targets=None):
        return torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1) * 0.5 + self.place, {}


def segmentor(window):
    return SlidingWindowSegmentor(
        window=window,
        backbone=nn.Identity(),
        sem_seg_head=Pointwise(window),
        pixel_mean=[100.0, 110.0, 120.0],
        pixel_std=[50.0, 60.0, 70.0],
    ).eval()


@pytest.mark.parametrize("size", [(9, 9), (25, 31), (5, 20), (4, 3)])
def test_windows_are_averaged_and_borders_have_the_mean_colour(size):
    window = (9, 9)
    model = segmentor(window)
    pixels = torch.randint(256, (3, *size), generator=torch.Generator().manual_seed(0)).numpy()
    got = model.probabilities(torch.from_numpy(pixels)).numpy()

    mean, std = (np.array(v).reshape(3, 1, 1) for v in ([100, 110, 120], [50, 60, 70]))
    height, width = (max(s, w) for s, w in zip(size, window))
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    padded = np.zeros((3, height, width))
    padded[:, top : top + size[0], left : left + size[1]] = (pixels - mean) / std
    total, times = np.zeros((2, height, width)), np.zeros((height, width))
    place = model.sem_seg_head.place.double().numpy()
    starts = {9: [0], 25: [0, 6, 12, 16], 31: [0, 6, 12, 18, 22], 20: [0, 6, 11]}
    for y in starts[height]:
        for x in starts[width]:
            cut = padded[:, y : y + 9, x : x + 9]
            score = np.exp(np.stack([cut[0] * cut[1], cut[2]]) * 0.5 + place)
            total[:, y : y + 9, x : x + 9] += score / score.sum(0)
            times[y : y + 9, x : x + 9] += 1
    expected = (total / times)[:, top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(got, expected, atol=1e-6)  # float32 softmax


@given(st.integers(1, 60), st.integers(0, 200))
def test_windows_reach_everywhere_and_are_as_few_as_possible(window, more):
    slices = window_slices(window + more, window)
    assert (slices[0].start, slices[-1].stop) == (0, window + more)
    assert all(s.stop - s.start == window for s in slices)
    steps = [b.start - a.start for a, b in zip(slices, slices[1:])]
    largest = -(-2 * window // 3)
    assert all(0 < step <= largest for step in steps)
    assert not steps or (len(slices) - 2) * largest < more


def test_several_scales_and_mirror_images_are_averaged():
    """By hand: Pillow scales the image, the window is larger than all of them."""
    from PIL import Image

    cfg = load_config(
        "ade20k_semantic_R50_BN.yaml",
        "INPUT.MIN_SIZE_TEST 24 INPUT.MAX_SIZE_TEST 24 TEST.AUG.SCALES (0.5,1.0,1.5)".split(),
    )
    model = segmentor((41, 41))
    pixels = torch.randint(256, (3, 30, 40), generator=torch.Generator().manual_seed(0))
    pixels = pixels.to(torch.uint8)
    (output,) = MultiScaleSegmentor(cfg, model)([{"image": pixels, "height": 15, "width": 20}])
    expected = 0
    for width, height in ((12, 9), (24, 18), (36, 27)):  # the longer side becomes 24, then scaled
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        scaled = np.array(picture.resize((width, height), Image.Resampling.BILINEAR))
        image = torch.from_numpy(scaled).permute(2, 0, 1)
        for flip in (False, True):
            found = model.probabilities(image.flip(2) if flip else image)
            found = found.flip(2) if flip else found
            expected += F.interpolate(found[None], (15, 20), mode="bilinear")[0] / 6
    torch.testing.assert_close(output["sem_seg"], expected, atol=1e-6, rtol=1e-5)


def test_images_keep_their_size_where_min_size_test_is_zero():
    options = "INPUT.MIN_SIZE_TEST 0 TEST.AUG.SCALES (1.0,) TEST.AUG.FLIP False".split()
    model = segmentor((41, 41))
    pixels = torch.randint(256, (3, 30, 40)).to(torch.uint8)
    cfg = load_config("ade20k_semantic_R50_BN.yaml", options)
    (output,) = MultiScaleSegmentor(cfg, model)([{"image": pixels}])
    assert torch.equal(output["sem_seg"], model.probabilities(pixels))
