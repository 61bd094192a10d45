"""Checkpoints load by whatever names they have, and say which config their weights need."""

import logging
import pickle
import re

import pytest
import torch
import torchvision
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone, build_model
from helpers.he_resnet import HeResNet
from torch import nn

from sw_detectron import UserError, add_sw_config
from sw_detectron.checkpoint import Checkpointer
from sw_detectron.checkpoint.convert import convert_checkpoint
from sw_detectron.checkpoint.facts import contradictions, facts_in, facts_of
from sw_detectron.checkpoint.model_facts import facts_of_model
from sw_detectron.checkpoint.writing import write_checkpoint
from sw_detectron.engine import load_config, load_model
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet

RGB = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
}
R18 = {"MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 64}


def make_cfg(**keys):
    """A config of the package with the R-50 of torchvision's weights, and overrides A__B=value."""
    cfg = get_cfg()
    add_sw_config(cfg)
    base = RGB | {
        "MODEL.BACKBONE.NAME": "build_sw_resnet_backbone",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.NORM": "BN",
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.RESNETS.OUT_FEATURES": ["res5"],
    }
    overrides = {key.replace("__", "."): value for key, value in keys.items()}
    cfg.merge_from_list([part for item in (base | overrides).items() for part in item])
    return cfg


def facts_of_cfg(**keys):
    return facts_of(make_cfg(**keys))


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(0)
    net = torchvision.models.resnet18()
    for name, tensor in net.state_dict().items():
        if "running" in name:
            tensor.uniform_(0.5, 1.5)
    return net.state_dict()


def saved(contents, path):
    torch.save(contents, path)
    return path


# Names


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"module.module.{name}",
        lambda name: re.sub(r"^layer2\.", "layer2._orig_mod.", name),  # one part was compiled
        lambda name: "module." + name.replace("layer2.0.", "layer2.0._orig_mod._orig_mod."),
    ],
)
def test_names_of_compiled_and_parallel_models_convert(tmp_path, resnet18, rename):
    plain = convert_checkpoint(saved(resnet18, tmp_path / "plain.pth"))
    state = {rename(name): tensor for name, tensor in resnet18.items()}
    found = convert_checkpoint(saved({"state_dict": state}, tmp_path / "wrapped.pth"))
    assert found.model.keys() == plain.model.keys() and found.config == plain.config
    assert all(torch.equal(tensor, plain.model[name]) for name, tensor in found.model.items())


def test_two_tensors_of_one_name_are_refused(tmp_path, resnet18):
    state = resnet18 | {"_orig_mod.conv1.weight": torch.zeros(64, 3, 7, 7)}
    with pytest.raises(UserError, match="two tensors.*would become conv1.weight"):
        convert_checkpoint(saved(state, tmp_path / "a.pth"))


@pytest.mark.parametrize("from_compiled", [True, False])
def test_compiled_models_load_plain_checkpoints_and_back(tmp_path, from_compiled):
    torch.manual_seed(0)
    plain, inner = nn.Linear(2, 3), nn.Linear(2, 3)
    compiled = nn.ModuleDict({"_orig_mod": inner})  # torch.compile's names
    source, target = (compiled, plain) if from_compiled else (plain, compiled)
    path = saved({"model": source.state_dict()}, tmp_path / "a.pth")
    Checkpointer(target).load(str(path))
    assert torch.equal(plain.weight, inner.weight)


@pytest.mark.parametrize("wrapper", ["state_dict", None])
def test_torchvisions_file_loads_as_it_is(tmp_path, caplog, resnet18, wrapper):
    contents = {wrapper: resnet18, "epoch": 3} if wrapper else resnet18
    path = saved(contents, tmp_path / "resnet18.pth")
    cfg = make_cfg(MODEL__SW__PLACEMENT="none", INPUT__FORMAT="BGR", **R18)
    model = nn.ModuleDict({"backbone": build_backbone(cfg, ShapeSpec(channels=3))})
    rest = Checkpointer(model, cfg=cfg).load(str(path))
    resnet = model["backbone"]
    assert "epoch" not in rest
    assert torch.equal(resnet.stem.conv1.weight, resnet18["conv1.weight"])
    assert torch.equal(resnet.res3[0].shortcut.norm.bias, resnet18["layer2.0.downsample.1.bias"])
    assert torch.equal(resnet.res5[1].conv2.norm.running_var, resnet18["layer4.1.bn2.running_var"])
    keys = [line.split(" is ")[0] for line in warned(caplog) if " is " in line]
    assert keys == ["INPUT.FORMAT"]


def test_a_cifar_networks_file_loads_as_it_is(tmp_path, caplog):
    torch.manual_seed(0)
    source = HeResNet(8)
    state = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    path = saved({"state_dict": state, "best_prec1": 91.0}, tmp_path / "resnet8.th")
    model = nn.ModuleDict({"backbone": make_cifar_resnet(8), "linear": nn.Linear(64, 10)})
    other = {"MODEL__PIXEL_STD": [1.0, 1.0, 1.0], "MODEL__RESNETS__DEPTH": 8}
    Checkpointer(model, cfg=make_cfg(**other)).load(str(path))
    assert torch.equal(model["linear"].weight, source.linear.weight)
    conv = model["backbone"].res4[0].conv2
    assert torch.equal(conv.weight, source.layer3[0].conv2.weight)
    assert torch.equal(conv.norm.running_mean, source.layer3[0].bn2.running_mean)
    assert [line.split(" is ")[0] for line in warned(caplog)] == ["MODEL.PIXEL_STD"]


@pytest.mark.parametrize(
    "contents",
    [
        {"state_dict": {"features.0.weight": torch.ones(64, 3, 3, 3)}},
        {"features.0.weight": torch.ones(64, 3, 3, 3)},
        {"model": {"head.weight": torch.ones(2)}, "optimizer": {}},
        {"state_dict": {}},
        {"teacher": {"a": torch.ones(2)}},
        {"model": torch.ones(2)},
    ],
    ids=["wrapped", "bare", "model", "empty", "nested", "tensor"],
)
def test_foreign_files_are_one_line(tmp_path, contents):
    path = saved(contents, tmp_path / "foreign.pth")
    with pytest.raises(UserError, match="foreign.pth") as error:
        Checkpointer(nn.Sequential(nn.Linear(2, 2))).load(str(path))
    assert "\n" not in str(error.value)


def test_what_is_not_there_or_does_not_answer_is_one_line(tmp_path):
    checkpointer = Checkpointer(nn.Linear(2, 2))
    for path in (str(tmp_path / "none.pth"), "http://127.0.0.1:9/weights.pth"):
        with pytest.raises(UserError, match="MODEL.WEIGHTS") as error:
            checkpointer.load(path)
        assert "\n" not in str(error.value) and path in str(error.value)
    # The same checkpointer can load another one then.
    checkpointer.load(str(saved(nn.Linear(2, 2).state_dict(), tmp_path / "a.pth")))


# What weights need


CASES = [
    ({"INPUT__FORMAT": "BGR"}, "INPUT.FORMAT is BGR", "RGB"),
    ({"MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675]}, "MODEL.PIXEL_MEAN", "123.675, 116.28"),
    ({"MODEL__PIXEL_MEAN": [123.675, 116.779, 103.53]}, "MODEL.PIXEL_MEAN", "116.28"),
    ({"MODEL__PIXEL_STD": [1.0, 1.0, 1.0]}, "MODEL.PIXEL_STD", "58.395"),
    ({"MODEL__RESNETS__STRIDE_IN_1X1": True}, "MODEL.RESNETS.STRIDE_IN_1X1 is True", "False"),
    ({"MODEL__RESNETS__DEPTH": 101}, "MODEL.RESNETS.DEPTH is 101", "50"),
    ({"MODEL__SW__PLACEMENT": "segmentation"}, "MODEL.SW.PLACEMENT is segmentation", "imagenet"),
    ({"MODEL__SW__LAYERS": [1, 6]}, r"MODEL.SW.LAYERS is \[1, 6\]", "imagenet"),
    ({"MODEL__SW__NUM_PERGROUP": 8}, "MODEL.SW.NUM_PERGROUP is 8", "16"),
    ({"MODEL__SW__NORM": "SWb"}, r"MODEL.SW.NORM is SWb \(bw, iw, bn, in, ln\)", "bw, iw"),
    ({"MODEL__SW__NORM": "GN"}, "MODEL.SW.NORM is GN", "bw, iw"),
    ({"MODEL__SW__STATISTICS": ["bw", "ln"]}, "MODEL.SW.STATISTICS is .*ln", "iw"),
]


@pytest.fixture(scope="module")
def tiny_conversion(tmp_path_factory):
    """A converted torchvision ResNet-50 of the usual shape, as a file of either format."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("converted")
    path = saved(torchvision.models.resnet50().state_dict(), folder / "resnet50.pth")
    conversion = convert_checkpoint(path)
    for ending in ("pkl", "pth"):
        write_checkpoint(
            folder / f"sw.{ending}", conversion.model, ending, True, conversion.carried
        )
    return folder


@pytest.mark.parametrize("ending", ["pkl", "pth"])
def test_a_converted_checkpoint_says_what_it_needs(tiny_conversion, caplog, ending):
    path = str(tiny_conversion / f"sw.{ending}")
    cfg = make_cfg(INPUT__FORMAT="BGR", MODEL__RESNETS__STRIDE_IN_1X1=True)
    Checkpointer(build_backbone(cfg, ShapeSpec(channels=3)), cfg=cfg).load(path)
    assert [line.split(",")[0] for line in warned(caplog)] == [
        "INPUT.FORMAT is BGR",
        "MODEL.RESNETS.STRIDE_IN_1X1 is True",
    ]
    caplog.clear()
    cfg = make_cfg()
    Checkpointer(build_backbone(cfg, ShapeSpec(channels=3)), cfg=cfg).load(path)
    assert not warned(caplog)


@pytest.mark.parametrize("overrides, words, needed", CASES)
def test_every_contradiction_is_named_by_its_key(tiny_conversion, overrides, words, needed):
    facts = facts_in(torch.load(tiny_conversion / "sw.pth"))
    assert not contradictions(facts, facts_of_cfg())
    (line,) = contradictions(facts, facts_of_cfg(**overrides))
    assert re.match(words, line) and needed in line.split("made for")[1] and "\n" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        {"MODEL__SW__LAYERS": [36, 30, 24, 18, 12, 6, 1]},  # imagenet by number
        {"MODEL__SW__NORM": "SWb", "MODEL__SW__STATISTICS": ["iw", "bw"]},
        {"MODEL__PIXEL_MEAN": [123.6750001, 116.28, 103.53]},
        # Detectron2's own backbone does not read MODEL.SW.
        {"MODEL__BACKBONE__NAME": "build_resnet_backbone", "MODEL__SW__PLACEMENT": "cifar"},
    ],
)
def test_other_words_for_the_same_fit(tiny_conversion, overrides):
    facts = facts_in(torch.load(tiny_conversion / "sw.pth"))
    assert not contradictions(facts, facts_of_cfg(**overrides))


def test_layers_by_number_and_without_sw():
    facts = {"MODEL.SW.LAYERS": [1, 3]}
    assert not contradictions(facts, facts_of_cfg(MODEL__SW__LAYERS=[3, 1]))
    (line,) = contradictions(facts, facts_of_cfg())
    assert line.startswith("MODEL.SW.PLACEMENT is imagenet") and "[1, 3]" in line
    without = {"MODEL.SW.PLACEMENT": "none", "MODEL.SW.LAYERS": [], "MODEL.SW.NUM_PERGROUP": 4}
    assert not contradictions(without, facts_of_cfg(MODEL__SW__PLACEMENT="none"))
    for overrides in ({}, {"MODEL__SW__LAYERS": [1]}):
        (line,) = contradictions(without, facts_of_cfg(**overrides))
        assert "but the weights were made for none" in line


def test_the_stride_of_blocks_without_a_1x1_convolution_is_free():
    facts = {"MODEL.RESNETS.STRIDE_IN_1X1": False}
    assert not contradictions(facts, facts_of_cfg(MODEL__RESNETS__STRIDE_IN_1X1=True, **R18))


def test_torchvisions_weights_by_detectron2s_own_script():
    facts = facts_in({"model": {}, "__author__": "torchvision"})
    assert facts == RGB | {"MODEL.RESNETS.STRIDE_IN_1X1": False}
    assert facts_in({"model": {}, "__author__": "Caffe2"}) == {}


def test_a_run_says_what_its_weights_need(tmp_path, caplog):
    cfg = make_cfg(MODEL__SW__NORM="SWb")
    Checkpointer(nn.Linear(2, 2), str(tmp_path), cfg=cfg).save("model_final")
    path = str(tmp_path / "model_final.pth")
    assert facts_in(torch.load(path)) == facts_of(cfg)
    Checkpointer(nn.Linear(2, 2), cfg=cfg).load(path)
    assert not warned(caplog)
    other = make_cfg(MODEL__SW__NORM="SWb", MODEL__PIXEL_STD=[1.0, 1.0, 1.0])
    Checkpointer(nn.Linear(2, 2), cfg=other).load(path)
    assert [line.split(" is ")[0] for line in warned(caplog)] == ["MODEL.PIXEL_STD"]


SMALL_BLOCKS = {"MODEL__RESNETS__RES2_OUT_CHANNELS": 32, "MODEL__RESNETS__STEM_OUT_CHANNELS": 32}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"MODEL__RESNETS__STRIDE_IN_1X1": True, "MODEL__SW__NORM": "SWb"},
        {"MODEL__SW__NUM_PERGROUP": 8, "MODEL__SW__WHITENING": "eigh"},
        {"MODEL__SW__LAYERS": [1, 3], "MODEL__SW__TIE_WEIGHT": True},
        {"MODEL__SW__PLACEMENT": "none"},
    ],
)
def test_a_model_shows_what_its_config_says(overrides):
    cfg = make_cfg(**overrides, **SMALL_BLOCKS)
    shown = facts_of_model(build_backbone(cfg, ShapeSpec(channels=3)))
    assert not contradictions(shown, facts_of(cfg))
    assert not contradictions(facts_of(cfg), shown)
    name = "none" if "MODEL__SW__PLACEMENT" in overrides else "imagenet"
    assert shown.get("MODEL.SW.PLACEMENT") == (None if "MODEL__SW__LAYERS" in overrides else name)
    other = facts_of_cfg(MODEL__RESNETS__STRIDE_IN_1X1=not cfg.MODEL.RESNETS.STRIDE_IN_1X1)
    assert "STRIDE_IN_1X1" in contradictions(other, shown)[0]


def test_models_without_a_config_are_warned_of_too(tiny_conversion, tmp_path, caplog):
    """Such as those of Python configs."""
    backbone = build_backbone(make_cfg(MODEL__SW__NUM_PERGROUP=8), ShapeSpec(channels=3))
    backbone.input_format = "BGR"
    Checkpointer(backbone).load(str(tiny_conversion / "sw.pth"))
    assert [line.split(",")[0] for line in warned(caplog) if "made for" in line] == [
        "INPUT.FORMAT is BGR",
        "MODEL.SW.NUM_PERGROUP is 8",
    ]
    Checkpointer(backbone, str(tmp_path)).save("model_final")
    facts = facts_in(torch.load(tmp_path / "model_final.pth"))
    assert facts["MODEL.SW.LAYERS"] == [1, 6, 12, 18, 24, 30, 36]
    assert facts["MODEL.SW.STATISTICS"] == ["bw", "iw"]


@pytest.mark.parametrize(
    "carried",
    [
        None,
        [],
        {"config": [1]},
        {"config": {"MODEL.PIXEL_MEAN": ["a", "b", "c"], 3: 4}},
        {"config": {"MODEL.PIXEL_MEAN": [float("nan")] * 3, "MODEL.SW.NORM": ["SW"]}},
        {"config": {"MODEL.SW.LAYERS": ["a"], "MODEL.SW.STATISTICS": "bw", "SEED": 3}},
        {"config": {"MODEL.RESNETS.DEPTH": True, "INPUT.FORMAT": 7}},
    ],
)
def test_malformed_facts_are_none(carried):
    contents = pickle.loads(pickle.dumps({"model": {}, "sw_detectron": carried}))
    assert facts_in(contents) == {}


def test_converting_a_converted_checkpoint_knows_its_input(tmp_path, resnet18):
    first = convert_checkpoint(saved(resnet18, tmp_path / "a.pth"), placement="none")
    facts = first.carried["config"] | {"INPUT.FORMAT": "BGR", "MODEL.PIXEL_STD": [1.0, 1.0, 1.0]}
    write_checkpoint(tmp_path / "b.pth", first.model, "pth", True, {"config": facts})
    second = convert_checkpoint(tmp_path / "b.pth")
    assert second.source == "detectron2" and not any("INPUT" in note for note in second.notes)
    assert second.config["INPUT.FORMAT"] == "BGR"
    assert second.config["MODEL.PIXEL_STD"] == [1.0, 1.0, 1.0]
    assert second.config["MODEL.SW.PLACEMENT"] == "imagenet" and len(second.placed) == 3
    assert "sw_detectron" not in second.left_out


# An untrained network is no folded one


@pytest.mark.parametrize("author", [None, "torchvision"])
def test_an_untrained_network_of_torchvision(tmp_path, author):
    state = torchvision.models.resnet50().state_dict()
    assert not state["bn1.running_mean"].any() and (state["bn1.running_var"] == 1).all()
    contents = state
    if author:  # under Detectron2's names, as its own script writes it
        plain = convert_checkpoint(saved(state, tmp_path / "a.pth"), placement="none").model
        contents = {"model": plain, "__author__": author, "matching_heuristics": True}
    result = convert_checkpoint(saved(contents, tmp_path / "b.pth"))
    assert {key: result.config[key] for key in RGB} == RGB
    assert result.config["MODEL.RESNETS.STRIDE_IN_1X1"] is False
    assert not any("folded" in note for note in result.notes)


def test_every_tool_that_loads_weights_warns(tmp_path, caplog):
    cfg = load_config("classification_shapes_R18_SW.yaml", [])
    Checkpointer(build_model(cfg), str(tmp_path), cfg=cfg).save("model")
    weights = str(tmp_path / "model.pth")
    load_model("classification_shapes_R18_SW.yaml", weights, [])
    assert caplog.text.count("weights were made for") == 0
    load_model("classification_shapes_R18_SW.yaml", weights, ["MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"])
    assert caplog.text.count("weights were made for") == 1
    assert "MODEL.PIXEL_STD is [1.0, 1.0, 1.0]" in caplog.text


def test_only_what_training_continues_from_is_the_last_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    Checkpointer(model, str(tmp_path)).save("model_alone")
    assert [path.name for path in tmp_path.iterdir()] == ["model_alone.pth"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpointer(model, str(tmp_path), optimizer=optimizer).save("model_0")
    assert (tmp_path / "last_checkpoint").read_text() == "model_0.pth"
