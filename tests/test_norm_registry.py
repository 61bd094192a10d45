"""The norms' names in Detectron2."""

import subprocess
import sys

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm, get_norm
from detectron2.modeling.backbone import fpn, resnet
from detectron2.modeling.roi_heads import box_head, mask_head
from torch import nn

import sw_detectron
from sw_detectron.layers import SwitchWhiten2d
from sw_detectron.modeling import norms, register_norm

NAMES = {
    "SW": ("bw", "iw"),
    "SWa": ("bw", "iw"),
    "SWb": ("bw", "iw", "bn", "in", "ln"),
    "SN": ("bn", "in", "ln"),
    "BW": ("bw",),
    "IW": ("iw",),
}


@pytest.fixture
def restore_registry():
    before = dict(norms._registered)
    yield
    norms._registered.clear()
    norms._registered.update(before)


@pytest.mark.parametrize("module", [None, fpn, resnet, box_head, mask_head], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_module_knows_every_name(module, name):
    layer = (get_norm if module is None else module.get_norm)(name, 64)
    assert type(layer) is SwitchWhiten2d
    assert layer.statistics == NAMES[name]
    assert layer.num_features == 64
    assert layer.num_pergroup == 16
    assert layer.sync


BEFORE_OR_AFTER = """
import sys
from detectron2.layers import get_norm as held_by_another_name
if sys.argv[1] == "before":
    import detectron2.modeling.backbone.regnet as late
import sw_detectron
import sw_detectron.modeling.norms as registry, importlib
importlib.reload(registry)
sw_detectron.detectron2_patches.apply_patches()
import detectron2.modeling.backbone.regnet as late
import detectron2.projects.deeplab.semantic_seg as project
def local():
    from detectron2.layers import get_norm
    return get_norm
for get_norm in (held_by_another_name, late.get_norm, project.get_norm, local()):
    assert type(get_norm("SW", 64)).__name__ == "SwitchWhiten2d"
    assert type(get_norm("BN", 64)).__name__ == "BatchNorm2d"
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_imported_before_and_after(when):
    subprocess.run([sys.executable, "-W", "ignore", "-c", BEFORE_OR_AFTER, when], check=True)


def test_built_in_names_are_as_before():
    assert type(get_norm("BN", 8)) is not SwitchWhiten2d
    assert isinstance(get_norm("BN", 8), nn.BatchNorm2d)
    assert type(get_norm("SyncBN", 8)) is nn.SyncBatchNorm
    assert type(get_norm("FrozenBN", 8)) is FrozenBatchNorm2d
    assert type(get_norm("naiveSyncBN", 8)) is NaiveSyncBatchNorm
    assert get_norm("naiveSyncBN_N", 8)._stats_mode == "N"
    assert get_norm("GN", 64).num_groups == 32
    assert get_norm("LN", 8) is not None
    assert get_norm("", 8) is None
    assert get_norm(None, 8) is None
    assert type(get_norm(nn.InstanceNorm2d, 8)) is nn.InstanceNorm2d
    with pytest.raises(KeyError, match="swish.*SWb"):
        get_norm("swish", 8)


@pytest.mark.usefixtures("restore_registry")
def test_users_register_variants():
    def mine(channels):
        return SwitchWhiten2d(channels, num_pergroup=8, statistics=("bw", "bn"))

    register_norm("MySW", mine)
    register_norm("MySW", mine)  # again: harmless
    assert resnet.get_norm("MySW", 24).num_pergroup == 8
    with pytest.raises(ValueError, match="MySW"):
        register_norm("MySW", nn.BatchNorm2d)
    for name in ("SW", "BN", "GN"):
        with pytest.raises(ValueError, match=name):
            register_norm(name, mine)
    register_norm("BN", mine, overwrite=True)
    assert type(fpn.get_norm("BN", 24)) is SwitchWhiten2d
    with pytest.raises(ValueError, match="needs a name"):
        register_norm("", mine)


def test_channels_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="40.*16"):
        get_norm("SW", 40)


def test_a_frozen_stage_of_detectron2s_own_resnet_freezes_its_sw():
    stem = resnet.BasicStem(norm="SW")
    stages = resnet.ResNet.make_default_stages(18, norm="SW")
    net = resnet.ResNet(stem, stages, out_features=["res3"], freeze_at=2).train()
    frozen = {n for n, m in net.named_modules() if isinstance(m, SwitchWhiten2d) and m.frozen}
    assert "stem.conv1.norm" in frozen
    assert "res2.1.conv2.norm" in frozen
    assert not any(name.startswith("res3") for name in frozen)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net(torch.randn(2, 3, 32, 32))["res3"].sum().backward()
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert all(k.startswith("res3") for k in changed), changed
    with_grad = {k for k, p in net.named_parameters() if p.grad is not None}
    assert with_grad
    assert all(k.startswith("res3") for k in with_grad), with_grad


NO_DETECTRON2 = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "detectron2":
            raise ModuleNotFoundError("No module named 'detectron2'", name="detectron2")
sys.meta_path.insert(0, Missing())
import sw_detectron
"""


def test_missing_detectron2_is_one_line_with_the_remedy():
    command = [sys.executable, "-c", NO_DETECTRON2]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0
    last = run.stderr.strip().splitlines()[-1]
    assert "needs Detectron2" in last
    assert "pip install" in last


def test_public_names():
    assert sw_detectron.SwitchWhiten2d is SwitchWhiten2d
    assert sw_detectron.register_norm is register_norm
