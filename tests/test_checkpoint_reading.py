"""Reading checkpoints runs nothing in them, and whatever is wrong with one is one clear line."""

import copy
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_resnet_backbone
from safetensors.torch import save as safetensors_bytes
from torch import nn

from sw_detectron import UserError
from sw_detectron.checkpoint import Checkpointer, read_checkpoint
from sw_detectron.checkpoint.convert import convert_checkpoint
from sw_detectron.checkpoint.reading import read_file
from sw_detectron.checkpoint.writing import check_destination, write_checkpoint

TOOL = Path(__file__).parents[1] / "tools/convert_checkpoint.py"


def tiny_weights():
    """A ResNet-50 with few channels, under torchvision's names: 260 kB."""
    cfg = get_cfg()
    resnets = cfg.MODEL.RESNETS
    resnets.STEM_OUT_CHANNELS = resnets.RES2_OUT_CHANNELS = 16
    resnets.WIDTH_PER_GROUP = 4
    resnets.NORM, cfg.MODEL.BACKBONE.FREEZE_AT, resnets.OUT_FEATURES = "BN", 0, ["res5"]
    torch.manual_seed(0)
    weights = {}
    for name, tensor in build_resnet_backbone(cfg, ShapeSpec(channels=3)).state_dict().items():
        name = name.replace("stem.conv1.norm", "bn1").replace("stem.", "")
        for k in (1, 2, 3):
            name = name.replace(f"conv{k}.norm", f"bn{k}")
        name = name.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")
        for k in (2, 3, 4, 5):
            name = name.replace(f"res{k}", f"layer{k - 1}")
        weights[name] = tensor
    return weights


def saved(weights, kind):
    """The bytes of a checkpoint file."""
    buffer = io.BytesIO()
    if kind == "safetensors":
        return safetensors_bytes(weights)
    if kind in ("pkl", "py2"):
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        return pickle.dumps({"model": arrays}, protocol=2 if kind == "py2" else 4)
    torch.save({"state_dict": weights}, buffer, _use_new_zipfile_serialization=kind == "zip")
    return buffer.getvalue()


KINDS = {"zip": "pth", "legacy": "pth", "pkl": "pkl", "py2": "pkl", "safetensors": "safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_tensors(tmp_path, kind):
    weights = tiny_weights()
    path = tmp_path / f"file.{KINDS[kind]}"
    path.write_bytes(saved(weights, kind))
    found = read_checkpoint(path)
    assert list(found) == list(weights) if kind != "safetensors" else set(found) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
    result = convert_checkpoint(path, num_pergroup=4)
    assert [row.number for row in result.placed] == [1, 6, 12, 18, 24, 30, 36]


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_numpy(tmp_path, protocol):
    contents = OrderedDict(
        fortran=np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
        big=np.arange(5, dtype=">f8"),
        half=np.ones((2, 0, 3), np.float16),
        flags=np.array([True, False]),
        scalar=np.float64(2.5),
        nested={"text": "ä", "list": [1, 2.5, None, (3,)]},
        same=None,
    )
    contents["same"] = contents["big"]
    for core in (b"numpy._core", b"numpy.core"):
        data = pickle.dumps(contents, protocol=protocol)
        if core == b"numpy.core" and protocol < 4:  # numpy 1; later protocols state the length
            data = data.replace(b"numpy._core", core)
        (tmp_path / "file.pkl").write_bytes(data)
        found = read_file(tmp_path / "file.pkl")
        assert list(found) == list(contents)
        expected = pickle.loads(pickle.dumps(contents, protocol=protocol))
        for name in ("fortran", "big", "half", "flags", "scalar"):
            assert np.array_equal(found[name], contents[name])
            assert found[name].dtype == expected[name].dtype
            assert type(found[name]) is type(contents[name])
        assert found["nested"] == contents["nested"]
        assert torch.equal(
            read_checkpoint(tmp_path / "file.pkl")["big"], torch.arange(5.0).double()
        )


def test_pickles_of_python_2(tmp_path):
    """To Python 2 an array's bytes are a text; this is such a pickle, opcode by opcode."""
    raw = np.array([1.5, -2.0], "<f4").tobytes()
    data = (
        b"\x80\x02}U\x01wcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R"
        b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"U" + bytes([len(raw)]) + raw + b"tbs."
    )
    assert np.array_equal(pickle.loads(data, encoding="latin1")["w"], [1.5, -2.0])
    (tmp_path / "file.pkl").write_bytes(data)
    assert torch.equal(read_checkpoint(tmp_path / "file.pkl")["w"], torch.tensor([1.5, -2.0]))


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pkl"])
def test_code_is_not_run(tmp_path, kind):
    marker = tmp_path / "marker"
    contents = {"model": {"w": torch.ones(2)}, "extra": Payload(marker)}
    path = tmp_path / f"file.{KINDS[kind]}"
    if kind == "pkl":
        path.write_bytes(pickle.dumps(contents))
    else:
        torch.save(contents, path, _use_new_zipfile_serialization=kind == "zip")
    for read in (
        read_checkpoint,
        convert_checkpoint,
        lambda path: Checkpointer(nn.Linear(2, 2)).load(str(path)),
    ):
        with pytest.raises(UserError, match="run code"):
            read(path)
    assert not marker.exists()
    if kind == "pkl":
        pickle.loads(path.read_bytes())  # the payload works
        assert marker.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nmkdir\n(S'MARKER'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x06MARKER\x85R.",  # STACK_GLOBAL
        b"(S'MARKER'\nios\nmkdir\n.",  # INST
        b"\x80\x02cbuiltins\neval\nX\x05\x00\x00\x001 + 1\x85R.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",  # an array without a size
        b"\x80\x02}X\x01\x00\x00\x00wcnumpy\nndarray\nK\x02\x85\x85\x81s.",  # and one of whatever
        b"\x80\x02}X\x01\x00\x00\x00wcnumpy\nndarray\nK\x02\x85\x85Rs.",  # memory holds
        b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",  # a class's attributes
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8K\x00K\x01\x87R.",  # arrays of objects
        b"\x80\x02cnumpy\ndtype\nX\x0b\x00\x00\x00V1000000000K\x00K\x01\x87R.",
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of 2^31 entries
        b"\x80\x05\x96\x00\x00\x00\x00\x02\x00\x00\x00.",  # 8 GB of bytes
        b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",  # deep lists
        b"\x80\x02P1\n.",  # a reference outside of the file
        b"\x80\x02Q.",
        b"\x80\x02\x82\x01.",  # copyreg's extensions
        b"\x80\x07N.",
    ],
)
def test_hostile_pickles(tmp_path, program):
    marker = tmp_path / "mkdir"
    path = tmp_path / "file.pkl"
    path.write_bytes(program.replace(b"MARKER", b"marker"))
    before = set(Path.cwd().iterdir())
    with pytest.raises(UserError) as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)
    assert set(Path.cwd().iterdir()) == before and not marker.exists()


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
@pytest.mark.parametrize("name", [b"bytearray", b"getattr", b"list", b"complex"])
def test_builtins_are_not_called(tmp_path, module, name):
    """Not even those that do no harm by themselves, such as 1 GB of bytearray."""
    path = tmp_path / "file.pkl"
    path.write_bytes(b"\x80\x02c" + module + b"\n" + name + b"\nJ\x00\x00\x00\x40\x85R.")
    with pytest.raises(UserError, match=rf"Python object \({(module + b'.' + name).decode()}\)"):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_tensors_may_share_storage_eight_times_but_not_nine(tmp_path, kind):
    storage = torch.arange(100_000.0)
    for count in (8, 9):
        path = tmp_path / f"{count}.pth"
        path.write_bytes(saved({f"w{i}": storage for i in range(count)}, kind))
        assert 4e5 < path.stat().st_size < 4.4e5
    found = read_checkpoint(tmp_path / "8.pth")
    assert len(found) == 8 and torch.equal(found["w7"], storage)
    with pytest.raises(UserError, match="more than the file can hold"):
        read_checkpoint(tmp_path / "9.pth")


def zip_of(entries, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def overlapping_zip():
    """An archive that lists one part under two names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", b"}.")
        archive.writestr("a/data/0", bytes(10_000))
        twin = copy.copy(archive.getinfo("a/data/0"))
        twin.filename = "a/data/1"
        archive.filelist.append(twin)
    return buffer.getvalue()


def tar_of(name, data):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def scripted():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), buffer)
    return buffer.getvalue()


def whole_module():
    buffer = io.BytesIO()
    torch.save(nn.Linear(2, 2), buffer)
    return buffer.getvalue()


def of_torch(contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


WRONG_FILES = {
    "empty": (lambda: b"", "is empty"),
    "web page": (lambda: b"\n<!DOCTYPE html><html>404</html>", "is a web page.*download"),
    "LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    "text": (lambda: b"hello", "is not a checkpoint"),
    "tar": (lambda: tar_of("storages", b"x"), "tar archive"),
    "other zip": (lambda: zip_of({"word/document.xml": b"x"}), "cut off or damaged"),
    "zip bomb": (lambda: zip_of({"a/data.pkl": bytes(10**7)}, zipfile.ZIP_DEFLATED), "compressed"),
    "overlapping zip": (overlapping_zip, "its parts overlap"),
    "cut off zip": (lambda: of_torch({"w": torch.ones(500)})[:1500], "cut off or damaged"),
    "cut off legacy": (lambda: saved({"w": torch.ones(500)}, "legacy")[:900], "cut off"),
    "TorchScript": (scripted, "TorchScript"),
    "whole module": (whole_module, "Python object"),
    "a tensor": (lambda: of_torch(torch.ones(2)), "holds a Tensor"),
    "no tensors": (lambda: of_torch({"a": 1}), "holds no tensors"),
    "numbers as names": (lambda: of_torch({0: torch.ones(2)}), "no name of a tensor"),
    "line feed in a name": (lambda: of_torch({"a\nb": torch.ones(2)}), "no name of a tensor"),
    "surrogate in a name": (lambda: of_torch({"\ud800": torch.ones(2)}), "no name of a tensor"),
    "sparse": (lambda: of_torch({"a": torch.eye(2).to_sparse()}), "not a plain tensor"),
    "expanded": (lambda: of_torch({"a": torch.ones(1).expand(10**12)}), "more than the file"),
    "VGG": (lambda: of_torch({"features.0.weight": torch.ones(64, 3, 3, 3)}), "no checkpoint of a"),
    "ViT": (lambda: of_torch({"cls_token": torch.ones(1, 1, 8)}), "no checkpoint of a ResNet"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files_are_one_clear_line(tmp_path, name):
    make, words = WRONG_FILES[name]
    path = tmp_path / "file.pth"
    path.write_bytes(make())
    with pytest.raises(UserError, match=words) as error:
        convert_checkpoint(path)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pth")
    with pytest.raises(UserError, match="not a file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name, force, words",
    [
        ("old.pkl", False, "exists.*--force"),
        ("new.bin", False, "--output-format"),
        ("none/new.pkl", False, "does not exist"),
        ("folder.pkl", True, "is a folder"),
        (".", True, "is a folder"),
        ("n" * 252 + ".pkl", False, "name too long"),
    ],
)
def test_destinations_are_refused_before_the_work(tmp_path, name, force, words):
    (tmp_path / "old.pkl").write_text("old")
    (tmp_path / "folder.pkl").mkdir()
    with pytest.raises(UserError, match=words):
        check_destination(tmp_path / name, None, force)
    assert check_destination(tmp_path / "old.pkl", "pth", force=True) == "pth"


@pytest.mark.parametrize("output_format", ["pkl", "pth"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, output_format):
    path = tmp_path / "out"
    path.write_text("old")

    def fill_disk(data, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", fill_disk)
    monkeypatch.setattr(torch, "save", fill_disk)
    with pytest.raises(UserError, match="No space left"):
        write_checkpoint(path, {"w": torch.ones(2)}, output_format, True)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


def test_pkl_cannot_hold_bfloat16(tmp_path):
    with pytest.raises(UserError, match="bfloat16.*head.weight.*pth"):
        write_checkpoint(tmp_path / "a.pkl", {"head.weight": torch.ones(2).bfloat16()}, "pkl", True)
    assert not list(tmp_path.iterdir())


def mutate_weights(rng, weights):
    """Rename, drop, reshape, repeat or spoil some tensors."""
    names = list(weights)
    for _ in range(rng.choice([1, 1, 2, 5])):
        name = rng.choice(names)
        tensor = weights.get(name)
        if tensor is None:
            continue
        change = rng.randrange(9)
        if change == 0:
            del weights[name]
        elif change == 1:
            weights[rng.choice(["", "x.", "module.", "stem.", "layer1.0."]) + name[::-1]] = (
                tensor.clone()
            )
        elif change == 2:
            weights[name.replace("layer", rng.choice(["res", "layer9", "a"]))] = weights.pop(name)
        elif change == 3:
            weights[name] = tensor.reshape(-1)
        elif change == 4:
            weights[name] = tensor[None, None].contiguous()
        elif change == 5:
            weights[name] = torch.zeros(rng.choice([0, 1, 10**5]))
        elif change == 6:
            weights[name] = torch.full_like(
                tensor.float(), rng.choice([float("nan"), float("inf"), -1])
            )
        elif change == 7:
            weights[name] = tensor.to(rng.choice([torch.int8, torch.float16, torch.float64]))
        else:
            weights[name.replace("bn", "sw").replace("var", "cov")] = weights.pop(name)
    return weights


def mutate_bytes(rng, data, sensitive):
    """Flip bits, cut off or overwrite; mostly where the structure is rather than the numbers."""
    data = bytearray(data)
    change = rng.randrange(6)
    if change == 0:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.choice(sensitive) if rng.random() < 0.8 else rng.randrange(len(data))
        if change == 1:
            data[at : at + 4] = struct.pack("<i", rng.choice([-1, 0, 2**31 - 1, 2**24]))
        elif change == 2:
            del data[at : at + rng.randrange(1, 50)]
            break
        else:
            data[at % len(data)] ^= 1 << rng.randrange(8)
    return bytes(data)


def structure(data):
    """The positions in a file that are not within long runs of tensors' numbers."""
    return [*range(min(len(data), 40_000)), *range(max(0, len(data) - 40_000), len(data))]


def fuzz(folder, count, seed):
    """Convert mutated checkpoints; returns how many were converted nevertheless."""
    rng = random.Random(seed)
    weights = tiny_weights()
    originals = {kind: saved(weights, kind) for kind in KINDS}
    sensitive = {kind: structure(data) for kind, data in originals.items()}
    out = folder / "out.pkl"
    converted = 0
    for i in range(count):
        kind = rng.choice(list(KINDS))
        if rng.random() < 0.3:
            mutated = mutate_weights(rng, dict(weights))
            data = saved(mutated, kind)
        else:
            data = mutate_bytes(rng, originals[kind], sensitive[kind])
        path = folder / f"file.{KINDS[kind]}"
        path.write_bytes(data)
        try:
            result = convert_checkpoint(path, num_pergroup=4)
            write_checkpoint(out, result.model, "pkl", True)
            message = ""
        except UserError as error:
            message = str(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, mutation {i}, {kind}") from error
        if not message:
            assert read_checkpoint(out).keys() == result.model.keys()
            out.unlink()
            converted += 1
        assert message.isprintable(), (seed, i, kind)
        path.unlink()
        assert not list(folder.iterdir()), (seed, i, kind)
    return converted


@pytest.mark.slow
def test_mutated_checkpoints(tmp_path):
    converted = fuzz(tmp_path, 100, seed=1)
    assert 0 < converted < 70  # flipped bits in the numbers remain a checkpoint


@pytest.mark.slow
def test_many_mutated_checkpoints(tmp_path):
    converted = fuzz(tmp_path, 500, seed=2)
    assert 0 < converted < 350


def run_tool(*args):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(TOOL.parents[1])},
    )


@pytest.mark.parametrize("name", ["web page", "whole module"])
@pytest.mark.slow
def test_the_command_fails_with_one_line(tmp_path, name):
    path = tmp_path / "file.pth"
    path.write_bytes(WRONG_FILES[name][0]())
    result = run_tool(path, tmp_path / "out.pkl")
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.count("\n") == 1 and "error: " in result.stderr, result.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_command_converts(tmp_path):
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(saved(tiny_weights(), "safetensors"))
    result = run_tool(path, tmp_path / "out.pth", "--num-pergroup", "4", "--placement", "1,2,36")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "SW {bw, iw} 4 x 4" in result.stdout
    assert "MODEL.SW.LAYERS '[1, 2, 36]'" in result.stdout
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.pth", "tiny.safetensors"]
    again = run_tool(path, tmp_path / "out.pth")
    assert again.returncode == 1 and "--force" in again.stderr
