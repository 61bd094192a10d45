"""Detectron2's and PyTorch's ways to export and compile a model work with SW as with BN."""

import onnxruntime
import pytest
import torch
from detectron2.export import TracingAdapter, scripting_with_instances
from detectron2.modeling import GeneralizedRCNNWithTTA, build_model
from detectron2.structures import Boxes
from torch import Tensor, nn

from sw_detectron import SwitchWhiten2d
from sw_detectron.engine import load_config

# Float32 throughout: sums are taken in another order, so results agree to some 1e-5 of the
# largest value; boxes in pixels of a 100-pixel image to 1e-3.
TOLERANCE = 1e-5
BOX_TOLERANCE = 1e-3

TINY = """
    MODEL.DEVICE cpu INPUT.MIN_SIZE_TEST 64 MODEL.RPN.POST_NMS_TOPK_TEST 10
    MODEL.ROI_BOX_HEAD.FC_DIM 32 MODEL.ROI_MASK_HEAD.CONV_DIM 16
    MODEL.ROI_HEADS.SCORE_THRESH_TEST 0.0
    MODEL.RESNETS.NORM BN MODEL.FPN.NORM BN MODEL.ROI_BOX_HEAD.NORM BN MODEL.ROI_MASK_HEAD.NORM BN
""".split()  # torch.jit.script takes BN but not SyncBN


@pytest.fixture(scope="module")
def cfg():
    return load_config("shapes_mask_rcnn_R18_FPN_SW.yaml", TINY)


@pytest.fixture
def model(cfg):
    """In evaluation, with running values and importance weights as after some training."""
    torch.manual_seed(0)
    model = build_model(cfg)
    model.train().backbone(torch.randn(4, 3, 64, 64))
    for layer in sw_layers(model):
        nn.init.normal_(layer.sw_mean_weight)
        nn.init.normal_(layer.sw_var_weight)
    return model.eval()


def sw_layers(model: nn.Module) -> list[SwitchWhiten2d]:
    return [m for m in model.modules() if isinstance(m, SwitchWhiten2d)]


def image(height: int, width: int) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(1)) * 255


def largest_deviation(values, expected) -> float:
    """Of feature maps, relative to each map's largest value."""
    deviations = [(a - b).abs().max() / b.abs().max() for a, b in zip(values, expected)]
    assert len(deviations) == len(values) == len(expected) > 0
    return max(deviations).item()


@torch.no_grad()
def test_a_traced_mask_rcnn_equals_the_model_at_another_size(model):
    def inference(model, inputs):
        return [{"instances": model.inference(inputs, do_postprocess=False)[0]}]

    adapter = TracingAdapter(model, [{"image": image(64, 64)}], inference)
    traced = torch.jit.trace(adapter, adapter.flattened_inputs, check_trace=False)
    other = image(64, 96)
    found = adapter.outputs_schema(traced(other))[0]["instances"]
    expected = model.inference([{"image": other}], do_postprocess=False)[0]
    assert len(found) == len(expected) > 0
    deviation = found.pred_boxes.tensor - expected.pred_boxes.tensor
    assert deviation.abs().max() < BOX_TOLERANCE
    assert (found.pred_masks - expected.pred_masks).abs().max() < TOLERANCE


@torch.no_grad()
def test_a_scripted_mask_rcnn_equals_the_model_at_another_size(model):
    other = image(64, 96)
    expected = model.inference([{"image": other}], do_postprocess=False)[0]
    tensors = ("objectness_logits", "scores", "pred_classes", "pred_masks")
    fields = {"proposal_boxes": Boxes, "pred_boxes": Boxes} | dict.fromkeys(tensors, Tensor)
    scripted = scripting_with_instances(model, fields)
    found = scripted.inference([{"image": other}], do_postprocess=False)[0]
    deviation = found.pred_boxes.tensor - expected.pred_boxes.tensor
    assert len(expected) > 0
    assert deviation.abs().max() < BOX_TOLERANCE
    assert (found.pred_masks - expected.pred_masks).abs().max() < TOLERANCE


def test_scripting_is_refused_in_training_unless_frozen():
    layer = SwitchWhiten2d(16, num_pergroup=8)
    with pytest.raises(RuntimeError, match="evaluation"):
        torch.jit.script(nn.Sequential(layer))
    nn.init.normal_(layer.running_mean)
    x = torch.randn(3, 16, 7, 5)
    scripted = torch.jit.script(nn.Sequential(layer.freeze()))
    torch.testing.assert_close(scripted(x), layer(x), rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def test_test_time_augmentation_without_augmentation_finds_what_the_model_finds(cfg, model):
    """One size, no flip: the merged predictions are the model's own."""
    cfg = cfg.clone()
    cfg.TEST.AUG.MIN_SIZES, cfg.TEST.AUG.FLIP = (64,), False
    inputs = [{"image": image(64, 64).byte(), "height": 64, "width": 64}]
    (found,), (expected,) = GeneralizedRCNNWithTTA(cfg, model)(inputs), model(inputs)
    found, expected = found["instances"], expected["instances"]
    best = slice(0, 5)
    torch.testing.assert_close(found.scores[best], expected.scores[best])
    deviation = found.pred_boxes.tensor[best] - expected.pred_boxes.tensor[best]
    assert deviation.abs().max() < BOX_TOLERANCE
    cfg.TEST.AUG.MIN_SIZES, cfg.TEST.AUG.FLIP = (64, 96), True
    (augmented,) = GeneralizedRCNNWithTTA(cfg, model)(inputs)
    assert len(augmented["instances"]) > 0
    assert not torch.equal(augmented["instances"].scores[best], found.scores[best])


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_backbone_has_no_graph_break_and_equals_the_backbone(model):
    torch.compiler.reset()
    # aot_eager: no code generation, which wants a C++ compiler. fullgraph: a break is an error.
    compiled = torch.compile(model.backbone, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 64, 64)
    values, expected = compiled(x), model.backbone(x)
    assert largest_deviation(values.values(), expected.values()) < TOLERANCE


@pytest.mark.slow
def test_the_backbone_as_onnx_equals_the_backbone_at_other_sizes(model, tmp_path):
    class FeatureMaps(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = model.backbone

        def forward(self, images):
            return tuple(self.backbone(images).values())

    feature_maps = FeatureMaps().eval().requires_grad_(False)
    dynamic = {"images": dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)}
    path = str(tmp_path / "backbone.onnx")
    torch.onnx.export(
        feature_maps, (torch.randn(1, 3, 64, 64),), path, dynamo=True, dynamic_shapes=dynamic
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = [value.name for value in session.get_inputs()]
    for shape in ((1, 3, 64, 64), (2, 3, 96, 160)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        values = [torch.from_numpy(value) for value in session.run(None, {name: x.numpy()})]
        assert largest_deviation(values, feature_maps(x)) < TOLERANCE
