"""Calibration: exact statistics against numpy, over batches, sizes and ranks; what it leaves alone;
images of a folder; and precise statistics in training."""

import logging
import shutil
from argparse import Namespace

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils.env import seed_all_rng
from helpers.ranks import spawn
from helpers.runs import SHAPES, TINY, same
from PIL import Image
from torch import nn

from sw_detectron.data import register_shapes
from sw_detectron.data.images import ImageFolder, image_batches
from sw_detectron.engine import Trainer, load_config
from sw_detectron.engine.hooks import PreciseStats
from sw_detectron.errors import UserError
from sw_detectron.layers import SwitchWhiten2d
from sw_detectron.modeling import calibrate, input_moments, replace_norms, unfuse
from sw_detectron.modeling.cifar_resnet import make_cifar_resnet
from sw_detectron.tasks.classification.model import ImageClassifier

# N, H, W: sizes differ, and the last batch is smaller.
SIZES = [(3, 9, 8), (2, 7, 13), (1, 12, 5)]
GROUP = 8


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        SwitchWhiten2d(16, GROUP),  # 1
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        SwitchWhiten2d(16, GROUP, ("bn", "in", "ln")),  # 4
        nn.ReLU(),
        nn.Dropout2d(),
        nn.Conv2d(16, 8, 1),
        nn.BatchNorm2d(8),  # 8
        SwitchWhiten2d(8, GROUP, ("bw",)).freeze(),  # 9
        SwitchWhiten2d(8, GROUP, ("iw",)),  # 10
    ).double()
    for module in net:
        if hasattr(module, "running_mean"):
            module.running_mean.normal_(std=0.1)
    return net


def make_batches(seed=1):
    """Three batches of float64 images whose mean is about as large as their deviation."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, 3, h, w, generator=generator, dtype=torch.float64) + i
        for i, (n, h, w) in enumerate(SIZES)
    ]


def sw_and_bn(net):
    return {"1": (net[1], GROUP), "4": (net[4], GROUP), "8": (net[8], 4)}


def numpy_moments(net, name, batches, num_pergroup):
    """By numpy, from the inputs of a layer of the Sequential, one group after the other."""
    pixels = []
    handle = net[int(name)].register_forward_pre_hook(
        lambda _, x: pixels.append(x[0].transpose(0, 1).flatten(1).numpy())
    )
    with torch.no_grad():
        for batch in batches:
            net(batch)
    handle.remove()
    pixels = np.concatenate(pixels, axis=1, dtype=np.float64)
    groups = np.split(pixels, len(pixels) // num_pergroup)
    return pixels.mean(axis=1), np.stack([np.cov(group, bias=True) for group in groups])


def check(actual, expected, tolerance=1e-10):
    """Equal to `tolerance` of the largest expected value; 1e-10 is thousands of roundings."""
    np.testing.assert_allclose(
        torch.as_tensor(actual).numpy().reshape(np.shape(expected)),
        expected,
        rtol=0,
        atol=tolerance * max(1, np.abs(expected).max()),
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_moments_of_one_batch_equal_numpy(size):
    net = make_net().eval()
    batches = [make_batches()[SIZES.index(size)]]
    moments = input_moments(net, sw_and_bn(net), batches, 100)
    assert list(moments) == ["1", "4", "8"]
    for name, (_, num_pergroup) in sw_and_bn(net).items():
        mean, cov = numpy_moments(net, name, batches, num_pergroup)
        assert moments[name].mean.dtype == torch.float64
        check(moments[name].mean, mean)
        check(moments[name].cov, cov)


@pytest.mark.parametrize("num_images", [6, 5, 4, 1])
def test_moments_of_several_batches_weigh_pixels(num_images):
    """4 and 1 images cut a batch in the middle."""
    net = make_net().eval()
    images = [image[None] for batch in make_batches() for image in batch]
    moments = input_moments(net, sw_and_bn(net), make_batches(), num_images)
    for name, (_, num_pergroup) in sw_and_bn(net).items():
        mean, cov = numpy_moments(net, name, images[:num_images], num_pergroup)
        check(moments[name].mean, mean)
        check(moments[name].cov, cov)


def test_moments_of_a_float32_network_with_a_large_mean():
    net = nn.Sequential(nn.BatchNorm2d(8)).eval().to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    batches = [torch.randn(3, 8, 20, 30) + 1e4, torch.randn(2, 8, 30, 20) - 1e4]
    batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    mean, cov = numpy_moments(net, "0", batches, GROUP)
    moments = input_moments(net, {"bn": (net[0], GROUP)}, batches, 5)
    check(moments["bn"].mean, mean)
    check(moments["bn"].cov, cov)
    # Within one batch the covariance is 1e-8 of the squared mean: what centring has to keep.
    _, cov = numpy_moments(net, "0", batches[:1], GROUP)
    check(input_moments(net, {"bn": (net[0], GROUP)}, batches, 3)["bn"].cov, cov)


def test_a_layer_that_is_called_twice_has_both_inputs_pooled():
    norm = nn.BatchNorm2d(4).double().eval()
    model = nn.Sequential(norm, norm)
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        pixels = torch.cat([x, norm(x)]).transpose(0, 1).flatten(1).numpy()
    moments = input_moments(model, {"norm": (norm, 2)}, [x + 0], 2)["norm"]
    check(moments.mean, pixels.mean(axis=1))
    check(moments.cov, np.stack([np.cov(p, bias=True) for p in (pixels[:2], pixels[2:])]))


def test_too_few_images_are_told_and_none_is_an_error(caplog):
    net = make_net().eval()
    with caplog.at_level(logging.WARNING):
        input_moments(net, sw_and_bn(net), make_batches(), 7)
    assert "of 6 images; 7 were" in caplog.text
    for function in (
        lambda b: input_moments(net, sw_and_bn(net), b, 7),
        lambda b: calibrate(net, b, 7),
    ):
        with pytest.raises(UserError, match="no image"):
            function([])


def test_layers_that_nothing_reached_are_left_out_and_named(caplog):
    net = make_net().eval()
    layers = sw_and_bn(net) | {"unused": (nn.BatchNorm2d(4), 2)}
    with caplog.at_level(logging.WARNING):
        assert list(input_moments(net, layers, make_batches(), 6)) == ["1", "4", "8"]
    assert "No pixel reached unused" in caplog.text


def in_calibration(net):
    """The modes in which `calibrate` is to run the network."""
    net.eval()
    net[1].train(), net[4].train()
    return net


def test_calibration_sets_running_values_and_nothing_else():
    net = make_net()
    net.train()
    net[3].eval(), net[4].eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    random = torch.get_rng_state()
    calibrate(net, make_batches(), 6)
    assert torch.equal(torch.get_rng_state(), random)  # nothing was dropped out
    assert [module.training for module in net.modules()] == modes
    assert all(p.grad is None for p in net.parameters())
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {f"{i}.running_{kind}" for i in (1, 4) for kind in ("mean", "cov")}

    original = make_net()
    for name in ("1", "4"):
        mean, cov = numpy_moments(in_calibration(original), name, make_batches(), GROUP)
        if name == "4":  # {bn, in, ln} keeps only the diagonal up to date
            eye = np.eye(GROUP)
            cov = cov * eye + before["4.running_cov"].numpy() * (1 - eye)
        check(net[int(name)].running_mean, mean)
        check(net[int(name)].running_cov, cov)


def test_calibrated_layers_off_the_diagonal_stay_for_diagonal_sets():
    net = make_net()
    net[4].running_cov.fill_(7)
    calibrate(net, make_batches(), 6)
    off = ~torch.eye(GROUP, dtype=torch.bool)
    assert (net[4].running_cov[:, off] == 7).all()
    assert (net[4].running_cov[:, ~off] != 7).all()


def test_a_failing_calibration_leaves_everything_as_it_was():
    net = make_net()
    net.train()
    net[0].eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    modes = [module.training for module in net.modules()]

    def batches():
        yield make_batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        calibrate(net, batches(), 6)
    assert [module.training for module in net.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


# How many batches, of two images each, the two ranks have.
SHARES = {"equal": (3, 3), "unequal": (5, 1), "none": (6, 0)}


def make_equal_batches(rank, number):
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(number, 2, 3, 8, 9, generator=generator, dtype=torch.float64) + rank)


def on_ranks(rank, world_size):
    results = {}
    for case, shares in SHARES.items():
        net = make_net()
        moments = input_moments(
            net.eval(), sw_and_bn(net), make_equal_batches(rank, shares[rank]), 100
        )
        calibrate(net, make_equal_batches(rank, shares[rank]), 100)
        results[case] = moments, net.state_dict()
    with pytest.raises(UserError, match="equally many"):
        calibrate(net, [[{"image": 0}]] * rank, 100)
    return results


@pytest.mark.slow
def test_ranks_equal_one_process(tmp_path):
    results = spawn(on_ranks, 2, tmp_path)
    for case, shares in SHARES.items():
        net = make_net().eval()
        ranks = [make_equal_batches(rank, number) for rank, number in enumerate(shares)]
        for name, (_, num_pergroup) in sw_and_bn(net).items():
            mean, cov = numpy_moments(net, name, ranks[0] + ranks[1], num_pergroup)
            for moments, _ in (result[case] for result in results):
                check(moments[name][0], mean)
                check(moments[name][1], cov)
        # Whitened by the statistics of what all ranks have in the same step.
        steps = [
            torch.cat([batches[i] for batches in ranks if i < len(batches)])
            for i in range(max(shares))
        ]
        for i in (1, 4):
            mean, cov = numpy_moments(in_calibration(make_net()), i, steps, GROUP)
            cov = cov if i == 1 else cov * np.eye(GROUP)
            for _, state in (result[case] for result in results):
                check(state[f"{i}.running_mean"], mean)
                check(state[f"{i}.running_cov"], cov)
        first, second = (result[case] for result in results)
        same(dict(first[1]), dict(second[1]))
        for name in first[0]:
            assert all(torch.equal(a, b) for a, b in zip(first[0][name], second[0][name]))


def test_a_classifier_is_calibrated_with_what_its_loader_gives():
    def make_classifier():
        torch.manual_seed(0)
        resnet = make_cifar_resnet(8)
        replace_norms(resnet, "cifar")
        mean, std = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)
        return ImageClassifier(backbone=resnet, num_classes=2, pixel_mean=mean, pixel_std=std)

    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    batches = [{"image": part, "label": torch.zeros(len(part))} for part in images.split(2)]
    model, alone = make_classifier(), make_classifier()
    calibrate(model, batches, 3)  # of the second batch one image
    normalized = (images[:3] - alone.pixel_mean) / alone.pixel_std
    calibrate(alone.backbone, [normalized[:2], normalized[2:]], 3)
    running = {k: v for k, v in model.state_dict().items() if "running_cov" in k}
    assert len(running) == 2
    for name, value in running.items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="ImageClassifier takes what its data loader gives"):
        calibrate(model, [normalized], 3)


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "not folded"])
@pytest.mark.parametrize("frozen", [True, False], ids=["FrozenBN", "BN"])
def test_unfusing_finds_the_statistics_and_computes_the_same(frozen, folded):
    norm = FrozenBatchNorm2d if frozen else nn.BatchNorm2d
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), norm(16), nn.ReLU(), nn.Conv2d(16, 8, 3), norm(8), nn.ReLU()
    )
    with torch.no_grad():
        for layer in (net[1], net[4]):
            layer.weight.normal_()
            layer.bias.normal_()
            if not folded:
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
    batches = [batch.float() for batch in make_batches()]
    net.train()
    probe = torch.randn(4, 3, 20, 21)
    before = net.eval()(probe).detach()
    net.train()
    expected = {name: numpy_moments(net.eval(), name, batches, 4) for name in ("1", "4")}
    net.train()
    moments = unfuse(net, {"1": (net[1], 4), "4": (net[4], 4)}, batches, 6)
    assert all(module.training for module in net.modules())
    # float32: two layers of up to 144 products each
    assert (net.eval()(probe) - before).abs().max() <= 1e-5 * before.abs().max()
    for name, (mean, cov) in expected.items():
        check(moments[name].mean, mean)
        check(moments[name].cov, cov)
        layer = net[int(name)]
        check(layer.running_mean, mean, 1e-6)
        check(layer.running_var, cov.diagonal(axis1=1, axis2=2).reshape(-1), 1e-6)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_image_folder_reads_all_images_sorted_and_upright(tmp_path):
    pixels = [noise(8, 6, seed) for seed in range(3)]
    save(tmp_path / "b" / "1.PNG", pixels[0])
    save(tmp_path / "a.bmp", pixels[1])
    exif = Image.Exif()
    exif[274] = 6  # to be shown rotated by 90 degrees clockwise
    save(tmp_path / "b" / "c" / "0.webp", pixels[2], lossless=True, exif=exif)
    save(tmp_path / "d.jpg", pixels[0][:, :, 0])  # grey
    save(tmp_path / "e.Jpeg", pixels[0])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "f.png").mkdir()
    folder = ImageFolder(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in folder.files]
    assert names == ["a.bmp", "b/1.PNG", "b/c/0.webp", "d.jpg", "e.Jpeg"]
    assert len(folder) == 5
    images = list(folder)
    assert np.array_equal(images[0], pixels[1])
    assert np.array_equal(images[1], pixels[0])
    assert np.array_equal(images[2], np.rot90(pixels[2], -1))
    assert images[3].shape == (8, 6, 3)
    assert all(image.dtype == np.uint8 for image in images)


@pytest.mark.parametrize("content", [b"", b"no image", "cut"], ids=str)
def test_corrupt_images_are_named_and_skipped(tmp_path, caplog, content):
    save(tmp_path / "good.png", noise(40, 40))
    if content == "cut":
        content = (tmp_path / "good.png").read_bytes()[:2000]
    (tmp_path / "bad.png").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert len(list(ImageFolder(tmp_path))) == 1
        batches = list(image_batches(tmp_path, 2, 40, 2, [0] * 3, [1] * 3))
    assert [len(batch) for batch in batches] == [1]
    assert "bad.png" in caplog.text
    (tmp_path / "good.png").unlink()
    with pytest.raises(UserError, match="none of the images"):
        list(image_batches(tmp_path, 2, 40, 2, [0] * 3, [1] * 3))


def test_folders_without_images_are_one_clear_line(tmp_path):
    for folder, words in ((tmp_path, "no image below"), (tmp_path / "x", "not a directory")):
        with pytest.raises(UserError, match=words) as error:
            ImageFolder(folder)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)


def test_batches_are_normalized_squares(tmp_path):
    pixels = [noise(16, 16, 0), noise(16, 30, 1), noise(21, 16, 2), noise(64, 32, 3)]
    for i, image in enumerate(pixels):
        save(tmp_path / f"{i}.png", image)
    mean, std = (100.0, 110.0, 120.0), (50.0, 60.0, 70.0)
    batches = list(image_batches(tmp_path, 10, 16, 3, mean, std, "RGB"))
    assert [tuple(batch.shape) for batch in batches] == [(3, 3, 16, 16), (1, 3, 16, 16)]
    assert batches[0].dtype == torch.float32
    crops = [pixels[0], pixels[1][:, 7:23], pixels[2][2:18]]  # torchvision rounds 2.5 to 2
    expected = (np.stack(crops) - np.array(mean)) / np.array(std)
    check(batches[0].permute(0, 2, 3, 1), expected, 1e-6)
    # Halved by Pillow's bilinear filter, the weighted mean of a few pixels around each.
    resized = np.asarray(Image.fromarray(pixels[3]).resize((16, 32), Image.Resampling.BILINEAR))
    check(batches[1][0].permute(1, 2, 0), (resized[8:24] - np.array(mean)) / np.array(std), 1e-6)
    blue_first = next(image_batches(tmp_path, 1, 16, 3, mean[::-1], std[::-1], "BGR"))
    assert torch.equal(blue_first[0].flip(0), batches[0][0])


SCHEDULE = """
    SOLVER.MAX_ITER 4 SOLVER.CHECKPOINT_PERIOD 2 SOLVER.STEPS () TEST.EVAL_PERIOD 2
    TEST.PRECISE_BN.ENABLED True TEST.PRECISE_BN.NUM_ITER 3 DATASETS.TEST ()
""".split()


@pytest.fixture(scope="module")
def shapes(datasets):
    register_shapes(datasets / "shapes")
    yield
    register_shapes()


def make_trainer(folder, *overrides):
    cfg = load_config(SHAPES, [*TINY, *SCHEDULE, "OUTPUT_DIR", str(folder), *overrides])
    folder.mkdir(exist_ok=True)
    cfg.freeze()
    seed_all_rng(1)
    return Trainer(cfg)


def train(folder, *overrides):
    trainer = make_trainer(folder, *overrides)
    trainer.resume_or_load(resume=True)
    trainer.train()
    return trainer


def check_running_values(cfg: CfgNode, path):
    """The running values in a checkpoint are those of its weights over the first batches.

    Nothing in the data loader is random but the order, which is the seed's.
    """
    weights = torch.load(path)["model"]
    model = Trainer.build_model(cfg).train()
    model.load_state_dict(weights)
    batches = [batch for batch, _ in zip(Trainer.build_train_loader(cfg), range(3))]
    layers = {n: m for n, m in model.backbone.named_modules() if hasattr(m, "running_mean")}
    inputs = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(
            lambda _, x, name=name: inputs[name].append(x[0].transpose(0, 1).flatten(1).numpy())
        )
    with torch.no_grad():
        for batch in batches:
            model.backbone(model.preprocess_image(batch).tensor)
    for name, layer in layers.items():
        pixels = np.concatenate(inputs[name], axis=1, dtype=np.float64)
        # Stored as float32, and fvcore averages float32 moments of BN over three batches.
        check(weights[f"backbone.{name}.running_mean"], pixels.mean(axis=1), 1e-5)
        if isinstance(layer, SwitchWhiten2d):
            groups = np.split(pixels, len(pixels) // 16)
            cov = np.stack([np.cov(group, bias=True) for group in groups])
            check(weights[f"backbone.{name}.running_cov"], cov, 1e-5)
        else:
            check(weights[f"backbone.{name}.running_var"], pixels.var(axis=1), 1e-5)
    return sum(isinstance(layer, SwitchWhiten2d) for layer in layers.values()), len(layers)


@pytest.mark.slow
def test_precise_statistics_of_sw_and_bn_are_in_the_checkpoints(shapes, tmp_path):
    trainer = train(tmp_path, "INPUT.RANDOM_FLIP", "none")
    for name in ("model_0000001.pth", "model_final.pth"):
        # 17 convolutions and 3 shortcuts of the ResNet, 8 of the FPN
        assert check_running_values(trainer.cfg, tmp_path / name) == (5, 28)


def test_precise_statistics_are_found_in_each_period_and_at_the_end(monkeypatch):
    hook = PreciseStats(2, None, [], 1)
    found = []
    monkeypatch.setattr(hook, "_update", lambda: found.append(hook.trainer.iter + 1))
    for period, expected in ((2, [2, 4, 5]), (0, [5])):
        found.clear()
        hook._period = period
        for iteration in range(5):
            hook.trainer = Namespace(iter=iteration, max_iter=5)
            hook.after_step()
        assert found == expected


@pytest.mark.slow
def test_a_resumed_run_finds_the_same_precise_statistics(shapes, tmp_path):
    """With augmentation, which draws from the same random numbers as the proposals."""
    (tmp_path / "cut").mkdir()
    train(tmp_path / "whole")
    shutil.copy(tmp_path / "whole/model_0000001.pth", tmp_path / "cut")
    (tmp_path / "cut/last_checkpoint").write_text("model_0000001.pth")
    assert train(tmp_path / "cut").start_iter == 2
    final = [torch.load(tmp_path / run / "model_final.pth") for run in ("whole", "cut")]
    same(*final)


def test_precise_statistics_without_batch_norm(shapes, tmp_path):
    keys = [f"MODEL.{k}.NORM" for k in ("RESNETS", "FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")]
    overrides = [word for key in keys for word in (key, "GN")]
    overrides += ["MODEL.ROI_MASK_HEAD.CONV_DIM", "32", "INPUT.RANDOM_FLIP", "none"]  # 32 groups
    trainer = train(tmp_path / "run", *overrides, "SOLVER.MAX_ITER", "1")
    assert check_running_values(trainer.cfg, tmp_path / "run/model_final.pth") == (5, 5)

    trainers = [
        make_trainer(tmp_path / "nothing", *overrides, "MODEL.SW.NORM", "IW"),
        make_trainer(tmp_path / "off", "TEST.PRECISE_BN.ENABLED", "False"),
    ]
    assert not any(isinstance(hook, PreciseStats) for t in trainers for hook in t._hooks)
