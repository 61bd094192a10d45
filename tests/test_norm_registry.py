"""The norms' names in Detectron2."""

import functools
import subprocess
import sys

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, NaiveSyncBatchNorm, batch_norm, get_norm
from detectron2.modeling.backbone import fpn, resnet
from detectron2.modeling.roi_heads import box_head, mask_head
from torch import nn

import sw_detectron
from sw_detectron.detectron2_patches import apply_patches
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
@pytest.mark.slow
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


@pytest.mark.parametrize(
    "name, words",
    [
        ("SWc", ["'SWc'", "did you mean SW", "SyncBN"]),
        ("SyncBn", ["SyncBN"]),
        ("sw", ["'sw'", "there are BN", "SWb"]),
        (" BN", ["' BN'", "BN"]),
        ("xyz", ["'xyz'", "there are BN, SyncBN"]),
    ],
)
def test_an_unknown_name_is_one_clear_line_for_users_and_a_key_error_for_detectron2(name, words):
    for kind in (KeyError, sw_detectron.UserError):
        with pytest.raises(kind) as error:
            fpn.get_norm(name, 64)
    text = str(error.value)
    assert all(word in text for word in words), text
    assert "\n" not in text and not text.startswith(('"', "'"))


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.usefixtures("restore_registry")
def test_a_key_error_inside_of_a_factory_keeps_its_cause(registered):
    def mine(channels):
        return {64: nn.BatchNorm2d}[channels](channels)

    register_norm("Mine", mine)
    with pytest.raises(KeyError) as error:
        resnet.get_norm("Mine" if registered else mine, 32)
    assert error.value.args == (32,)
    assert error.traceback[-1].name == "mine"
    assert isinstance(fpn.get_norm("Mine", 64), nn.BatchNorm2d)


def wrap(original):
    own = {"Theirs": nn.InstanceNorm2d}

    def get_norm(norm, out_channels):
        return own[norm](out_channels) if norm in own else original(norm, out_channels)

    return get_norm


def wrap_arguments(original):
    @functools.wraps(original)
    def get_norm(*args, **kwargs):
        return nn.InstanceNorm2d(args[1]) if args[0] == "Theirs" else original(*args, **kwargs)

    return get_norm


def wrap_with_defaults(original):
    def get_norm(norm, out_channels, eps=None, *, flag=False):
        assert eps is None and flag is False
        return wrap(original)(norm, out_channels)

    return get_norm


class Plugin:
    def __init__(self, original):
        self.wrapped = wrap(original)

    def __call__(self, norm, out_channels):
        return self.wrapped(norm, out_channels)


def method(original):
    return Plugin(original).__call__


def partial(original):
    return functools.partial(lambda get_norm, norm, c: get_norm(norm, c), wrap(original))


def closed(original):
    return {"BN": nn.BatchNorm2d, "Theirs": nn.InstanceNorm2d}.__getitem__


def install(monkeypatch, wrapper, everywhere=True):
    old, new = batch_norm.get_norm, wrapper(batch_norm.get_norm)
    monkeypatch.setattr(batch_norm, "get_norm", new)
    for name, module in list(sys.modules.items()) if everywhere else []:
        if name.startswith("detectron2") and getattr(module, "get_norm", None) is old:
            monkeypatch.setattr(module, "get_norm", new)


def check_names():
    assert type(batch_norm.get_norm("Theirs", 64)) is nn.InstanceNorm2d
    for module in (fpn, batch_norm, sys.modules["detectron2.layers"]):
        assert type(module.get_norm("SW", 64)) is SwitchWhiten2d
        assert type(module.get_norm("BN", 64)) is nn.BatchNorm2d
        assert type(module.get_norm(nn.BatchNorm2d, 64)) is nn.BatchNorm2d
        with pytest.raises(KeyError, match="unknown norm 'SWc'"):
            module.get_norm("SWc", 64)


@pytest.fixture
def unpatched():
    """Detectron2's function is as it was before the package was imported."""
    extended = get_norm.__code__
    get_norm.__code__ = batch_norm.built_in_get_norm.__code__
    with pytest.raises(KeyError):
        get_norm("SW", 64)
    yield
    get_norm.__code__ = extended


WRAPPERS = [wrap, wrap_arguments, wrap_with_defaults, method, partial, Plugin]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_plugin_wrapped_it_before(wrapper, everywhere, unpatched, monkeypatch, caplog):
    install(monkeypatch, wrapper, everywhere)
    apply_patches()
    check_names()
    apply_patches()
    check_names()
    assert not caplog.records


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_plugin_wraps_it_afterwards(wrapper, monkeypatch):
    install(monkeypatch, wrapper)
    apply_patches()
    check_names()


def test_a_plugin_that_hands_on_no_name_is_told_once(unpatched, monkeypatch, caplog):
    install(monkeypatch, closed)
    apply_patches()
    apply_patches()
    (record,) = caplog.records
    assert "refuses SW" in record.message and "\n" not in record.message


WRAPPED_IN_A_CLOSURE = """
from detectron2.layers import batch_norm
import detectron2.layers
def wrap(original, calls):
    def get_norm(norm, out_channels):
        calls.append(norm)
        return original(norm, out_channels)
    return get_norm
calls = []
detectron2.layers.get_norm = batch_norm.get_norm = wrap(batch_norm.get_norm, calls)
import sw_detectron
from detectron2.modeling.backbone.fpn import get_norm
assert type(get_norm("SW", 64)).__name__ == "SwitchWhiten2d"
assert type(get_norm("BN", 64)).__name__ == "BatchNorm2d"
assert calls[-2:] == ["SW", "BN"]
"""


@pytest.mark.slow
def test_a_plugin_that_is_imported_before_the_models_and_the_package():
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRAPPED_IN_A_CLOSURE], check=True)


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
    with pytest.raises(sw_detectron.UserError, match="norm 'SWb' does not fit"):
        fpn.get_norm("SWb", 40)


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
