"""Whole networks: an image's result beside larger ones against its result alone."""

import copy
import logging
import threading
import warnings

import pytest
import torch
from detectron2.data import transforms as T
from detectron2.data.detection_utils import read_image
from detectron2.export import scripting_with_instances
from detectron2.modeling import build_backbone, build_model
from detectron2.structures import BitMasks, Boxes, ImageList, Instances
from detectron2.utils.events import EventStorage
from helpers.detectors import SHAPES, SMALL, images, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sw_detectron import SwitchWhiten2d
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.engine import load_config
from sw_detectron.layers.padding import ImageSizes
from sw_detectron.modeling.calibration import PooledMoments, calibrated_layers
from sw_detectron.modeling.padding import _note as note_sizes
from sw_detectron.modeling.padding import _with_border as with_border
from sw_detectron.modeling.padding import set_padding

SCORES = 1e-5


def make_model(padding="zeroed", config=SHAPES, *overrides):
    """With running values, importance weights and shifts as after some training."""
    torch.manual_seed(0)
    model = build_model(load_config(config, [*SMALL, "MODEL.SW.PADDING", padding, *overrides]))
    return trained(model).eval()


DIFFERENT = images((64, 80), (96, 64), (49, 37), (128, 128))


@torch.no_grad()
def compare(model, inputs, box_tolerance=1e-3):
    """That each image's instances are the same alone and in the batch."""
    batched = model(inputs)
    for single, found in zip(inputs, batched):
        found, expected = found["instances"], model([single])[0]["instances"]
        assert len(found) == len(expected) > 5
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=SCORES)
        # Those of equal scores come in any order, and of the last ones others may be cut off.
        sure = expected.scores > expected.scores.min() + SCORES
        values = [
            torch.cat([1e4 * r.pred_classes[:, None], r.pred_boxes.tensor], dim=1)
            for r in (expected, found)
        ]
        distance, nearest = (values[0][:, None] - values[1]).abs().amax(dim=2).min(dim=1)
        assert sure.sum() > 5
        assert distance[sure].max() <= box_tolerance
        if found.has("pred_masks"):
            masks = expected.pred_masks[sure], found.pred_masks[nearest][sure]
            assert (masks[0] != masks[1]).float().mean() <= 1e-3


@pytest.mark.parametrize(
    "config",
    [
        SHAPES,
        "cascade_mask_rcnn_R50_FPN_SW_1x.yaml",
        "retinanet_R50_FPN_SW_1x.yaml",
        "panoptic_fpn_R50_SW_1x.yaml",
        "mask_rcnn_R50_FPN_SyncBN_1x.yaml",
    ],
)
def test_zeroed_padding_leaves_what_an_image_alone_gives(config):
    norm = ["MODEL.RESNETS.NORM", "BN", "MODEL.FPN.NORM", "BN"]
    model = make_model("zeroed", config, *norm)
    compare(model, DIFFERENT)


def test_counted_padding_does_not():
    """So the images above are no easy ones."""
    model = make_model("counted")
    with torch.no_grad():
        together = model(DIFFERENT)[2]["instances"].scores
        alone = model(DIFFERENT[2:3])[0]["instances"].scores
    assert len(together) != len(alone) or (together - alone).abs().max() > 1e-3


def test_real_images_of_different_sizes(shared_data):
    files = sorted((shared_data / "data/coco").rglob("*.jpg"))[:3]
    inputs = []
    for file, shortest in zip(files, (160, 120, 200)):
        image = read_image(str(file), "BGR")
        image = T.ResizeShortestEdge(shortest, 400).get_transform(image).apply_image(image)
        inputs.append({"image": torch.as_tensor(image.transpose(2, 0, 1).copy())})
    compare(make_model(), inputs)


def backbone_maps(backbone, inputs):
    list_ = ImageList.from_tensors([x["image"] / 128 - 1 for x in inputs], 32)
    return backbone(list_.tensor)


@torch.no_grad()
@pytest.mark.parametrize("padding", ["counted", "ignored", "zeroed"])
def test_the_maps_of_a_backbone_alone(padding):
    cfg = load_config(SHAPES, [*SMALL, "MODEL.SW.PADDING", padding])
    torch.manual_seed(0)
    backbone = trained(build_backbone(cfg)).eval()
    together = backbone_maps(backbone, DIFFERENT)
    for i, single in enumerate(DIFFERENT):
        for level, map_ in backbone_maps(backbone, [single]).items():
            h, w = map_.shape[2:]
            found = together[level][i, :, :h, :w]
            error = (found - map_[0]).abs().max() / map_.abs().max()
            largest = DIFFERENT[3] is single
            assert (error < 1e-5) == (padding == "zeroed" or largest), (level, i)
            beyond = together[level][i].clone()
            beyond[:, :h, :w] = 0
            assert (beyond.abs().max() == 0) == (padding == "zeroed" or largest)


@pytest.mark.parametrize("padding", ["ignored", "zeroed"])
def test_an_unpadded_batch_is_as_it_was(padding):
    inputs = images(*[(64, 96)] * 3)
    with torch.no_grad():
        expected = backbone_maps(make_model("counted").backbone, inputs)
        found = backbone_maps(make_model(padding).backbone, inputs)
    for level, map_ in expected.items():
        assert torch.equal(found[level], map_)


@pytest.mark.parametrize("padding", ["counted", "ignored", "zeroed"])
def test_a_detector_trains_on_images_of_different_sizes(padding):
    model = make_model(padding).train()
    inputs = images((64, 80), (96, 64))
    for x in inputs:
        size = x["image"].shape[1:]
        objects = Instances(size, gt_boxes=Boxes(torch.tensor([[8.0, 8.0, size[1], size[0]]])))
        objects.gt_classes = torch.tensor([1])
        objects.gt_masks = BitMasks(torch.ones(1, *size, dtype=torch.bool))
        x["instances"] = objects
    with EventStorage():
        losses = model(inputs)
    sum(losses.values()).backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_the_gradient_of_a_repeated_border():
    """That of the last row and column is what comes to them and to their copies."""
    sizes = ImageSizes(((20, 32), (32, 12)), 32, 32)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    noted = x * 1
    note_sizes(noted, sizes)
    weight = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    (found,) = torch.autograd.grad((with_border(noted) * weight).sum(), x)
    expected = weight.clone()
    expected[0, :, 4] += weight[0, :, 5]  # 20 of 32 pixels are 5 of 8 rows
    expected[0, :, 5] = 0
    expected[1, :, :, 2] += weight[1, :, :, 3]
    expected[1, :, :, 3] = 0
    assert torch.equal(found, expected)


def gradients(model, inputs):
    model.zero_grad()
    maps = backbone_maps(model.backbone, inputs)
    sum(map_.square().mean() for map_ in maps.values()).backward()
    return {name: p.grad.clone() for name, p in model.backbone.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("padding", ["ignored", "zeroed"])
def test_a_stage_that_runs_again_in_the_backward_pass_sees_its_own_sizes(padding, reentrant):
    # SW alone, whose running values move in the second run: not so the gradients.
    model = make_model(padding).train()
    expected = gradients(model, DIFFERENT)
    model = make_model(padding).train()
    for stage in model.backbone.bottom_up.stages[1:]:
        forward = stage.forward
        stage.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
    first = backbone_maps(model.backbone, DIFFERENT)
    # Another batch passes before the backward pass of this one.
    with torch.no_grad():
        backbone_maps(model.backbone, images((32, 32), (64, 64)))
    sum(map_.square().mean() for map_ in first.values()).backward()
    for name, parameter in model.backbone.named_parameters():
        scale = expected[name].abs().max()
        assert (parameter.grad - expected[name]).abs().max() <= 1e-4 * scale, name


def test_a_block_that_runs_again_sees_its_own_sizes_too():
    model = make_model("ignored").train()
    expected = gradients(model, DIFFERENT)
    model = make_model("ignored").train()
    for stage in model.backbone.bottom_up.stages:
        for i, block in enumerate(stage):
            stage[i] = Again(block)
    found = gradients(model, DIFFERENT)
    for name, gradient in found.items():
        original = expected[name.replace(".block", "")]
        assert (gradient - original).abs().max() <= 1e-4 * original.abs().max(), name


class Again(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Wrapped(nn.Module):
    """A backbone of a user's, who wants another type and memory format."""

    def __init__(self, backbone):
        super().__init__()
        self.inner = backbone.double()
        self.size_divisibility = backbone.size_divisibility
        self.padding_constraints = backbone.padding_constraints
        self.output_shape = backbone.output_shape

    def forward(self, x):
        maps = self.inner(x.double().contiguous(memory_format=torch.channels_last))
        return {name: map_.float() for name, map_ in maps.items()}


def test_a_wrapper_between_model_and_backbone():
    model = make_model()
    model.backbone = Wrapped(model.backbone)
    set_padding(model, "zeroed")
    compare(model, DIFFERENT)


def test_threads_see_their_own_images():
    model = make_model()
    batches = [images((40 + 8 * i, 64), (64, 96 - 8 * i)) for i in range(4)]
    found = [None] * len(batches)

    @torch.no_grad()
    def predict(i):
        for _ in range(3):
            found[i] = model(batches[i])

    threads = [threading.Thread(target=predict, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for batch, results in zip(batches, found):
            for actual, expected in zip(results, model(batch)):
                assert torch.equal(actual["instances"].scores, expected["instances"].scores)


def test_precise_statistics_are_of_the_images():
    model = make_model("ignored")
    layers = {n: v for n, v in calibrated_layers(model).items() if "res2.0.conv2" in n}
    ((name, (layer, _)),) = layers.items()
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad(), PooledMoments(layers) as pooled:
        backbone_maps(model.backbone, DIFFERENT)
        backbone_maps(model.backbone, DIFFERENT[:2])
    handle.remove()
    pixels = [
        map_[i, :, : -(-x["image"].shape[1] // 4), : -(-x["image"].shape[2] // 4)].flatten(1)
        for map_ in seen
        for i, x in zip(range(len(map_)), DIFFERENT)
    ]
    expected = torch.cat(pixels, dim=1).double()
    torch.testing.assert_close(pooled.result()[name].mean, expected.mean(dim=1))


def test_a_model_can_be_changed_copied_and_scripted():
    norms = [f"MODEL.{k}.NORM" for k in ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")]
    model = make_model("zeroed", SHAPES, *(word for key in norms for word in (key, "BN")))
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    assert hooks > 0
    compare(copy.deepcopy(model), DIFFERENT[:2])
    set_padding(model, "counted")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert {m.padding for m in model.modules() if isinstance(m, SwitchWhiten2d)} == {"counted"}
    with pytest.raises(ValueError, match="'none'"):
        set_padding(model, "none")

    set_padding(model, "zeroed")
    inputs = images((64, 96))
    with torch.no_grad():
        expected = model.inference(inputs, do_postprocess=False)[0]
    fields = {
        "proposal_boxes": Boxes,
        "objectness_logits": Tensor,
        "pred_boxes": Boxes,
        "scores": Tensor,
        "pred_classes": Tensor,
        "pred_masks": Tensor,
    }
    with pytest.warns(UserWarning, match="scripted, a model counts padding as pixels"):
        scripted = scripting_with_instances(model, fields)
    found = scripted.inference(inputs, do_postprocess=False)[0]
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", ["counted", "ignored"])
def test_a_trace_that_counts_padding_says_so(padding):
    backbone = make_model(padding).backbone.bottom_up
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.jit.trace(backbone, torch.randn(1, 3, 64, 64), strict=False, check_trace=False)
    said = any("traced, a model counts padding" in str(warning.message) for warning in caught)
    assert said == (padding != "counted")


def test_a_checkpoint_says_what_it_was_trained_with(tmp_path, caplog):
    cfg = load_config(SHAPES, [*SMALL, "MODEL.SW.PADDING", "ignored"])
    Checkpointer(build_model(cfg), str(tmp_path), cfg=cfg).save("model_final")
    other = load_config(SHAPES, SMALL)
    with caplog.at_level(logging.WARNING):
        Checkpointer(build_model(cfg), cfg=cfg).load(str(tmp_path / "model_final.pth"))
        assert "PADDING" not in caplog.text
        Checkpointer(build_model(other), cfg=other).load(str(tmp_path / "model_final.pth"))
    assert "MODEL.SW.PADDING is counted, but the weights were made for ignored" in caplog.text


@torch.no_grad()
def test_a_stem_may_have_convolutions_of_one_pixel():
    backbone = make_model().backbone
    backbone.bottom_up.stem.conv1 = nn.Conv2d(3, 64, 1, stride=2)  # whose bias fills the padding
    nn.init.ones_(backbone.bottom_up.stem.conv1.bias)
    set_padding(backbone, "zeroed")
    together = backbone_maps(backbone, DIFFERENT)
    for i, single in enumerate(DIFFERENT):
        for level, map_ in backbone_maps(backbone, [single]).items():
            h, w = map_.shape[2:]
            error = (together[level][i, :, :h, :w] - map_[0]).abs().max() / map_.abs().max()
            assert error < 1e-5, (level, i)
