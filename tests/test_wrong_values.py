"""Config values that cannot work: one line that names the key, before anything is written."""

import http.server
import os
import re
import socket
import threading

import pytest
import torch
from detectron2.data import Metadata
from helpers.runs import SHAPES, TINY, refuse
from torch import nn

from sw_detectron import UserError
from sw_detectron.checkpoint import reading
from sw_detectron.engine import load_config
from sw_detectron.engine.carried import carried_metadata
from sw_detectron.engine.prediction import Predictor
from sw_detectron.engine.values import (
    CHOICES,
    LOWEST,
    LOWEST_ALWAYS,
    check_values,
    named_by_key,
    of_tasks,
)

RETINANET = """
    MODEL.META_ARCHITECTURE RetinaNet MODEL.BACKBONE.NAME build_retinanet_resnet_fpn_backbone
    MODEL.RESNETS.OUT_FEATURES ['res3','res4','res5'] MODEL.FPN.IN_FEATURES ['res3','res4','res5']
""".split()
CLASSIFIER = "classification_shapes_R18_SW.yaml"

NUMBERS = [
    (key, value)
    for key, low in (LOWEST | of_tasks("lowest") | LOWEST_ALWAYS).items()
    if key not in ("SOLVER.STEPS", "SOLVER.STEP_EPOCHS", "INPUT.MIN_SIZE_TRAIN")
    for value in (low - 1,)
]
OTHERS = [
    ("SOLVER.STEPS", "(5,3)"),
    ("SOLVER.STEPS", "(-5,)"),
    ("SOLVER.STEPS", "(0,)"),
    ("SOLVER.STEPS", "(3,3)"),
    ("INPUT.MIN_SIZE_TRAIN", "(-1,)"),
    ("SOLVER.BASE_LR", "float('nan')"),
    ("SOLVER.WEIGHT_DECAY_BIAS", "'1e-4'"),
    ("SOLVER.WEIGHT_DECAY_NORM", "few"),
    ("SOLVER.LR_SCHEDULER_NAME", "Warmup"),
    ("SOLVER.WARMUP_METHOD", "square"),
    ("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "both"),
    ("INPUT.FORMAT", "GBR"),
    ("INPUT.RANDOM_FLIP", "both"),
    ("INPUT.MASK_FORMAT", "png"),
    ("TEST.EXPECTED_RESULTS", "[['bbox','AP']]"),
    ("MODEL.DEVICE", "gpu"),
    ("MODEL.META_ARCHITECTURE", "MaskRCNN"),
    ("MODEL.BACKBONE.NAME", "resnet"),
    ("MODEL.PROPOSAL_GENERATOR.NAME", "rpn"),
    ("MODEL.RPN.HEAD_NAME", "rpnhead"),
    ("MODEL.ANCHOR_GENERATOR.NAME", "anchors"),
    ("MODEL.ROI_HEADS.NAME", "heads"),
    ("MODEL.ROI_BOX_HEAD.NAME", "box"),
    ("MODEL.ROI_MASK_HEAD.NAME", "mask"),
    ("MODEL.FPN.NORM", "XN"),
    ("MODEL.RESNETS.NORM", "XN"),
    ("MODEL.SW.NORM", "XN"),
    ("MODEL.ROI_HEADS.IN_FEATURES", "['p9']"),
    ("MODEL.RPN.IN_FEATURES", "['p9']"),
    ("MODEL.ROI_BOX_HEAD.POOLER_TYPE", "Pool"),
    ("MODEL.WEIGHTS", "foo://weights.pth"),
]


@pytest.mark.parametrize("key, value", [*NUMBERS, *OTHERS], ids=str)
def test_a_value_that_cannot_work_is_one_line_that_names_its_key(capsys, tmp_path, key, value):
    if value == "float('nan')":
        value = "1e400"  # Python reads it as infinity
    extra = ["SOLVER.CLIP_GRADIENTS.ENABLED", "True"] if "CLIP" in key else []
    folder = tmp_path / "run"
    message = refuse(
        capsys,
        *["--config", SHAPES, *TINY, "MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "4", *extra],
        *["OUTPUT_DIR", str(folder), key, str(value)],
    )
    assert key in message, message
    assert not list(folder.glob("*.pth")) and not (folder / "metrics.json").exists()


def test_a_wrong_value_that_its_error_does_not_name_is_one_line_too(capsys, tmp_path):
    override = ["MODEL.RESNETS.OUT_FEATURES", "['res7']", "OUTPUT_DIR", str(tmp_path)]
    assert "the config cannot be built" in refuse(capsys, "--config", SHAPES, *override)


@pytest.mark.parametrize("steps", [(2, 6), (4, 3), (3, 3)])
def test_a_rate_falls_before_the_end_and_in_order(capsys, tmp_path, steps):
    overrides = ["SOLVER.MAX_ITER", "6", "SOLVER.STEPS", str(steps), "OUTPUT_DIR", str(tmp_path)]
    message = refuse(capsys, "--config", SHAPES, *TINY, "MODEL.DEVICE", "cpu", *overrides)
    assert f"SOLVER.STEPS {steps} must ascend to less than SOLVER.MAX_ITER, 6" in message


def test_all_keys_that_may_be_meant_are_named():
    cfg = load_config(SHAPES, ["MODEL.RESNETS.NORM", "XN", "MODEL.FPN.NORM", "XN"])
    with pytest.raises(UserError, match="NORM or MODEL.*NORM cannot be right"), named_by_key(cfg):
        raise KeyError("'XN' is not known")


@pytest.mark.parametrize("folder", ["a", "norm"])
def test_the_folder_of_a_run_is_not_blamed_for_being_a_word(folder):
    cfg = load_config(SHAPES, ["OUTPUT_DIR", folder, "MODEL.SW.NUM_PERGROUP", "7"])
    with pytest.raises(UserError, match="^the norm of a layer does not fit$"), named_by_key(cfg):
        raise UserError("the norm of a layer does not fit")


def test_the_values_of_all_configs_are_in_their_ranges():
    cfg = load_config(SHAPES, [])
    check_values(cfg, training=True)
    all_choices = CHOICES | of_tasks("choices")
    assert "MODEL.DA.STATISTICS" in all_choices
    assert all(cfg_value(cfg, key) in choices for key, choices in all_choices.items())


def cfg_value(cfg, key):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def test_evaluation_does_not_mind_what_only_training_reads():
    check_values(load_config(SHAPES, ["SOLVER.MAX_ITER", "0"]), training=False)
    with pytest.raises(UserError, match=r"SOLVER\.MAX_ITER 0"):
        check_values(load_config(SHAPES, ["SOLVER.MAX_ITER", "0"]), training=True)


def test_keys_in_epochs_replace_a_wrong_one_in_iterations():
    check_values(load_config(SHAPES, ["SOLVER.MAX_ITER", "0", "SOLVER.EPOCHS", "2"]), training=True)


@pytest.mark.parametrize(
    "config, overrides",
    [
        (SHAPES, RETINANET),
        (SHAPES, ["MODEL.META_ARCHITECTURE", "PanopticFPN"]),
        (SHAPES, ["MODEL.META_ARCHITECTURE", "ProposalNetwork"]),
        (SHAPES, ["MODEL.LOAD_PROPOSALS", "True"]),
        (CLASSIFIER, []),
    ],
    ids=lambda value: value[1] if isinstance(value, list) and value else None,
)
@pytest.mark.parametrize("evaluation", [False, True])
def test_test_time_augmentation_that_a_model_lacks_is_refused_before_training(
    capsys, tmp_path, config, overrides, evaluation, monkeypatch
):
    monkeypatch.setattr("sw_detectron.engine.trainer.build_resumable_train_loader", None)
    weights = tmp_path / "w.pth"
    torch.save({"model": nn.Linear(1, 1).state_dict()}, weights)
    arguments = ["--eval-only", "MODEL.WEIGHTS", str(weights)] if evaluation else []
    flags = [a for a in arguments if a.startswith("--")]
    message = refuse(
        capsys,
        *["--config", config, *flags, *arguments[len(flags) :], *overrides],
        *["TEST.AUG.ENABLED", "True", "OUTPUT_DIR", str(tmp_path / "run")],
    )
    assert "TEST.AUG.ENABLED" in message


def test_what_fails_for_another_reason_says_so_and_keeps_its_cause():
    cfg = load_config(SHAPES, [])
    told = pytest.raises(UserError, match="cannot be built: ZeroDivisionError: division")
    with told as caught, named_by_key(cfg):
        1 / 0  # noqa: B018
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# ---- the network and the file system


@pytest.fixture
def url():
    """Of a server that answers nothing but 404."""
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), {"log_message": print})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/weights.pth"
    server.shutdown()
    server.server_close()


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def silent():
    """A server that accepts and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/weights.pth"


@pytest.mark.parametrize("kind", ["closed", "missing", "silent"])
def test_weights_behind_a_url_that_does_not_answer(
    capsys, tmp_path, monkeypatch, url, silent, kind
):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(reading, "URL_TIMEOUT", 0.5)
    address = {
        "closed": f"http://127.0.0.1:{closed_port()}/weights.pth",
        "missing": url,
        "silent": silent,
    }[kind]
    folder = tmp_path / "run"
    arguments = ["--config", SHAPES, "OUTPUT_DIR", str(folder), "MODEL.WEIGHTS", address]
    message = refuse(capsys, *arguments)
    assert "MODEL.WEIGHTS" in message and address in message, message
    assert not folder.exists()
    for use in (
        lambda: carried_metadata(address),
        lambda: Predictor(load_config(SHAPES, []), Metadata(name="")).load(address),
    ):
        with pytest.raises(UserError, match=re.escape(f"{address}' cannot be fetched")):
            use()
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "link to a file"])
def test_an_output_folder_that_cannot_be(capsys, tmp_path, kind):
    file = tmp_path / "file"
    file.write_text("mine")
    path = {
        "file": file,
        "below a file": file / "run",
        "dangling link": tmp_path / "dangling",
        "link to a file": tmp_path / "link",
    }[kind]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(file)
    message = refuse(capsys, "--config", SHAPES, "OUTPUT_DIR", str(path))
    assert "OUTPUT_DIR" in message and str(path) in message
    assert file.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "link"]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_output_folder_that_is_read_only(capsys, tmp_path):
    (tmp_path / "run").mkdir(mode=0o500)
    assert "OUTPUT_DIR" in refuse(capsys, "--config", SHAPES, "OUTPUT_DIR", str(tmp_path / "run"))
