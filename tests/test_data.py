"""The data sets: read from files that the tests write, refused when damaged, fetched from a server on this machine."""

import errno
import functools
import gzip
import hashlib
import http.server
import io
import itertools
import math
import os
import pickle
import re
import socket
import struct
import sys
import tarfile
import threading
import zipfile
import zlib

import jax
import numpy as np
import pytest
from PIL import Image

from fedbilevel.command import main
from fedbilevel.errors import InputError
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.options import RunOptions
from fedbilevel.tasks.data import cifar, datasets, glyphs, mini_imagenet, omniglot, pickles
from fedbilevel.tasks.data import fetch as fetching
from fedbilevel.tasks.data import idx as idx_format
from fedbilevel.tasks.data.fetch import FetchError, File, fetch


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """An empty cache folder, and nothing in the environment."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)
    return folder / "fedbilevel"


def refused(name, folder):
    with pytest.raises(InputError) as caught:
        datasets.load(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- IDX


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # training images of each digit


@functools.cache
def idx_files(first=0, per_class=tuple(MNIST)):
    """Empty images of the right number; labels for training begin with `first`."""
    labels = np.repeat(np.arange(10), per_class)
    labels = {"train": np.roll(labels, -labels.searchsorted(first)), "t10k": np.arange(10_000) % 10}
    return {
        f"{split}-{kind}-ubyte.gz": gzip.compress(idx(array), 1)
        for split, n in (("train", 60_000), ("t10k", 10_000))
        for kind, array in (
            ("images-idx3", np.zeros((n, 28, 28), np.uint8)),
            ("labels-idx1", labels[split].astype(np.uint8)),
        )
    }


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_mnist_is_read_from_gzip_or_plain_files(tmp_path):
    write(tmp_path / "mnist", idx_files())
    labels = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    labels.with_suffix("").write_bytes(gzip.decompress(labels.read_bytes()))
    labels.unlink()
    for folder in (tmp_path, tmp_path / "mnist"):
        loaded = datasets.load("mnist", folder)
        assert loaded.images.shape == (60_000, 28, 28) and loaded.images.dtype == np.uint8
        assert loaded.test_labels[13] == 3 and loaded.labels.dtype == loaded.test_labels.dtype == np.int32


def test_mnist_and_fashion_mnist_are_told_apart_by_their_labels(tmp_path, monkeypatch):
    files = {"mnist": idx_files(), "fashion-mnist": idx_files(1, (6000,) * 10)}
    for name, other in itertools.permutations(files):
        write(tmp_path / f"raw-{name}", files[name])
        problem = (
            f"train-labels-idx1-ubyte.gz: holds the labels of {name}, not of {other}: name the folder of {other} with --data"
        )
        assert refused(other, tmp_path / f"raw-{name}").endswith(problem)
        monkeypatch.chdir(write(tmp_path / "alone" / name, files[name]))
        assert refused(other, ".").endswith(problem)
        write(tmp_path / "both", files[name])
        for each in files:
            write(tmp_path / "both" / each, files[each])
        loaded = [datasets.load(each, tmp_path / "both") for each in files]
        assert [(source.labels[0], source.classes[9], len(source.classes)) for source in loaded] == [
            (0, "9", 10),
            (1, "ankle boot", 10),
        ]
    write(tmp_path / "neither", idx_files(0, (6001, 5999, *[6000] * 8)))
    assert "holds [6001, 5999, 6000," in refused("fashion-mnist", tmp_path / "neither")


TRUNCATED = gzip.compress(idx(np.random.default_rng(0).integers(0, 10, 10_000).astype(np.uint8)))[:-20]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (gzip.compress(b"not IDX"), "does not begin as an IDX file of 10000 bytes"),
        (gzip.compress(idx(np.zeros(100, np.uint8))), "does not begin as an IDX file of 10000 bytes"),
        (gzip.compress(idx(np.zeros(10_000, np.uint8))[:-1]), "is shorter than an IDX file"),
        (gzip.compress(idx(np.zeros(10_000, np.uint8)) + b"0"), "is longer than an IDX file"),
        (gzip.compress(idx(np.full(10_000, 10, np.uint8))), "holds the label 10"),
        (TRUNCATED, "is not a complete gzip file"),
        (TRUNCATED[:20] + b"garbled" + TRUNCATED[27:], "is not a complete gzip file"),
        (b"plain", "is not a complete gzip file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_damaged_idx_file_is_named_with_what_is_wrong(tmp_path, data, problem):
    write(tmp_path, idx_files())
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(data)
    message = refused("mnist", tmp_path)
    assert message.startswith(f"{tmp_path}/t10k-labels-idx1-ubyte.gz: {problem}") and message.endswith(": get the file again")


# ---- the search path


def test_a_missing_set_is_said_with_its_files_the_places_and_the_remedy(tmp_path, cache):
    message = refused("mnist", tmp_path)
    for part in (*(name.removesuffix(".gz") for name in idx_files()), str(tmp_path), f"{tmp_path}/mnist", f"{cache}/mnist"):
        assert part in message
    assert "get it with 'fedbilevel data fetch mnist', or name its folder with --data or in $FEDBILEVEL_DATA" in message
    assert "cifar-10-batches-py" in refused("cifar-10", "") and "images_background" in refused("omniglot", "")
    assert "mini-imagenet-cache-{train,val,test}.pkl" in refused("mini-imagenet", "") and "image-net.org" in refused(
        "mini-imagenet", ""
    )
    assert "no/such does not exist" in refused("mnist", "no/such")
    assert "there is no data set 'mnits'; did you mean mnist" in refused("mnits", "")


def test_the_given_folder_goes_before_the_environment_and_that_before_the_cache(tmp_path, cache, monkeypatch):
    def first():
        return datasets.load("mnist", tmp_path / "given").labels[0]

    (tmp_path / "given").mkdir()
    write(cache / "mnist", idx_files(1))
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "not made yet"))
    assert first() == 1
    write(tmp_path / "environment", {k: v for k, v in idx_files(2).items() if "images" in k})
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "environment"))
    assert first() == 1  # half a set is none
    write(tmp_path / "environment", idx_files(2))
    assert first() == 2
    write(tmp_path / "given" / "mnist", idx_files(3))
    assert first() == 3


def test_a_run_finds_its_data_again_whatever_the_environment_is_then(tmp_path, monkeypatch):
    write(tmp_path / "data" / "mnist", idx_files())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBILEVEL_DATA", "data")
    (tmp_path / "other").mkdir()
    knobs = {"dataset": "mnist", "clients": 2, "hidden": 2}
    configuration = Configuration.resolve("data-cleaning", knobs, "fedavg", {}, RunOptions(rounds=1), data="other")
    assert configuration.data == str(tmp_path / "data" / "mnist")
    monkeypatch.delenv("FEDBILEVEL_DATA")
    monkeypatch.chdir("/")
    rows = Configuration.read(configuration.plain()).experiment().task.population.lower.rows
    assert isinstance(rows.images, jax.Array) and rows.images.dtype == np.uint8  # on the device as they are
    assert Configuration.resolve("data-cleaning", {}, "fedavg", {}, RunOptions(rounds=1)).data == ""


# ---- pickles


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_arrays_are_read_and_anything_else_is_refused_unexecuted(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.int64(7),
    ]
    content = {"arrays": arrays, b"bytes": [1, "two", 3.0, None, (True,)]}
    loaded = pickles.load(io.BytesIO(pickle.dumps(content, protocol)), "file")
    for array, read in zip(arrays, loaded["arrays"], strict=True):
        np.testing.assert_array_equal(np.asarray(read), array)
    assert loaded[b"bytes"] == content[b"bytes"]
    bad = [Malicious(), np.array([Malicious()], dtype=object), {"data": print}, np.array(["text"])]
    for data in (*(pickle.dumps(thing, protocol) for thing in bad), pickle.dumps(content, protocol)[:-5], b""):
        with pytest.raises(InputError, match=r"^file") as caught:
            pickles.load(io.BytesIO(data), "file")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(InputError, match=r"file asks to run (posix|nt)\.mkdir, which no data set needs: do not trust"):
        pickles.load(io.BytesIO(pickle.dumps(Malicious(), protocol)), "file")


def test_pickles_cannot_ask_for_much_memory(tmp_path):
    laughs = functools.reduce(lambda thing, _: [thing] * 10, range(9), 0)  # 10⁹ numbers in a few hundred bytes
    for data in (b"]r\xff\xff\xff\x7f.", b"\x80\4]r\xff\xff\xff\xff.", b"]p2000000000\n.", b"cnumpy\nndarray\nr\0\0\0\x80."):
        with pytest.raises(InputError, match=r"file: is not a readable pickle \(it uses the memo index \d{10}\)"):
            pickles.load(io.BytesIO(data), "file")
    with pytest.raises(TypeError, match="neither an array nor a list of whole numbers"):
        pickles.array(pickles.load(io.BytesIO(pickle.dumps(laughs)), "file"))
    names = [str(k) for k in range(70_000)]  # numbered, with four bytes
    assert pickles.load(io.BytesIO(pickle.dumps(names, 2)), "file") == names
    assert pickles.array(pickles.load(io.BytesIO(pickle.dumps([1, np.int64(2)], 2)), "file")).tolist() == [1, 2]


def python_2_pickle(data, labels):
    """As Python 2 wrote the CIFAR-10 batches: byte strings for text, protocol 2."""

    def text(b):
        return b"T" + len(b).to_bytes(4, "little") + b

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text(b"b") + b"tR(K\1(M\x10\x27M\0\x0ct"
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"
    )
    return (
        b"\x80\2}(" + text(b"data") + array + text(data) + b"tb" + text(b"labels") + b"]("
        b"" + b"".join(b"K" + bytes([k]) for k in labels) + b"eu."
    )


# ---- CIFAR-10


@functools.cache
def batch(label):
    planes = np.zeros((10_000, 3, 1024), np.uint8)
    planes[:, 0, 33] = 200  # red, second row, second column
    return python_2_pickle(planes.tobytes(), [label] * 10_000)


BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def test_cifar_10_is_read_from_its_folder_and_from_its_archive(tmp_path):
    batches = {name: batch(k) for k, name in enumerate(BATCHES)}
    write(tmp_path / "a" / "cifar-10" / "cifar-10-batches-py", batches)
    archive = write(tmp_path / "b", {}) / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "a" / "cifar-10" / "cifar-10-batches-py", "cifar-10-batches-py")
    for folder in (tmp_path / "a", tmp_path / "a" / "cifar-10" / "cifar-10-batches-py", tmp_path / "b"):
        loaded = datasets.load("cifar-10", folder)
        assert loaded.images.shape == (50_000, 32, 32, 3) and loaded.test_images.shape == (10_000, 32, 32, 3)
        assert loaded.images[0, 1, 1].tolist() == [200, 0, 0] and loaded.images.sum(dtype=int) == 200 * 50_000
        assert loaded.labels[::10_000].tolist() == [0, 1, 2, 3, 4] and set(loaded.test_labels) == {5}
        assert len(loaded.classes) == 10 and (loaded.classes[0], loaded.classes[9]) == ("airplane", "truck")
    archive.write_bytes(archive.read_bytes()[:5000])
    assert "cifar-10-python.tar.gz" in refused("cifar-10", tmp_path / "b")

    broken = tmp_path / "a" / "cifar-10" / "cifar-10-batches-py" / "data_batch_1"
    for data, problem in (
        (python_2_pickle(bytes(30_720_000), [10] * 10_000), "must hold labels from 0 to 9"),
        (python_2_pickle(bytes(30_720_000), [1] * 9_999), "holds labels of int64 (9999,) for 10000 images"),
        (
            pickle.dumps({"data": np.zeros((5, 3072), np.uint8), "labels": [0] * 5}),
            "holds images of shape (5, 3072), not (10000,",
        ),
        (pickle.dumps([1, 2]), "does not hold 'data' and 'labels'"),
        (batch(0)[:-100], "is not a readable pickle"),
        (b"", "is not a readable pickle"),
    ):
        broken.write_bytes(data)
        message = refused("cifar-10", tmp_path / "a")
        assert message.startswith(f"{broken}: {problem}") and message.endswith("get the file again")


def test_cifar_10_is_read_from_an_npz_file_of_some_images(tmp_path):
    def save(**change):
        parts = dict(
            train_images=np.full((7, 32, 32, 3), 9, np.uint8),
            train_labels=np.arange(7),
            test_images=np.zeros((3, 32, 32, 3), np.uint8),
            test_labels=np.arange(3),
        )
        np.savez_compressed(tmp_path / "cifar10-subset.npz", **parts | change)

    save()
    loaded = datasets.load("cifar-10", tmp_path)
    assert loaded.images.shape == (7, 32, 32, 3) and loaded.test_labels.tolist() == [0, 1, 2]
    for change, problem in (
        ({"train_labels": np.arange(6)}, r"labels of int64 \(6,\) for 7 images"),
        ({"test_labels": np.array([0, 1, -1])}, "labels from 0 to 9"),
        ({"test_images": np.zeros((3, 32, 32, 3))}, "images of float64"),
        ({"test_images": np.zeros((3, 32, 32), np.uint8)}, r"images of uint8 \(3, 32, 32\)"),
        ({"train_labels": np.array([Malicious()] * 7, dtype=object)}, "is not an npz file"),
    ):
        save(**change)
        assert re.search(f"cifar10-subset.npz: .*{problem}", refused("cifar-10", tmp_path))
    save()
    path = tmp_path / "cifar10-subset.npz"
    whole, huge = path.read_bytes(), io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 32, 32, 3)})
    central = whole.index(b"PK\1\2")
    for data in (
        b"PK\3\4 and no more",
        b"\x93NUMPY\1\0and no more",
        whole[: central + 8] + b"\1" + whole[central + 9 :],  # said to be encrypted
        whole[: central + 10] + b"\x63" + whole[central + 11 :],  # an unknown compression
        whole.replace(whole[-6:-2], b"\xff\xff\xff\x7f"),  # an offset far beyond the end
    ):
        path.write_bytes(data)
        assert "is not an npz file" in refused("cifar-10", tmp_path)
    write_zip(path, {f"{part}_{kind}.npy": huge.getvalue() for part in ("train", "test") for kind in ("images", "labels")})
    assert "train_images.npy of uint8 (1099511627776, 32, 32, 3) in 128 bytes" in refused("cifar-10", tmp_path)


def test_parts_of_the_cifar_10_archive_that_are_too_large_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "LARGEST", 20_000)
    path = tmp_path / "cifar-10-python.tar.gz"
    for kind, problem in (
        (tarfile.REGTYPE, "has no file cifar-10-batches-py/data_batch_1 of at most 20000 bytes"),
        (tarfile.SYMTYPE, "has no file cifar-10-batches-py/data_batch_1 of at most 20000 bytes"),
        (tarfile.GNUTYPE_LONGNAME, "is not the complete archive (a part of 30208 bytes"),  # a name, which is read at once
    ):
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        member.size, member.type, member.linkname = 30_000, kind, "/etc/passwd"
        path.write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(40_960)))
        assert refused("cifar-10", tmp_path).startswith(f"{path}: {problem}")


# ---- Omniglot


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(out, "PNG")
    return out.getvalue()


BLANK = np.full((105, 105), 255, np.uint8)
DOT = BLANK.copy()
DOT[:15, :15] = 0  # exactly four by four pixels of 28 x 28


def drawings(part, characters, image):
    return {f"{part}/{name}/{k:04d}_{d:02d}.png": image for k, name in enumerate(characters) for d in range(1, 21)}


def write_zip(path, entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


def test_omniglot_drawings_become_bright_ink_by_area_and_duplicates_are_taken_once(tmp_path):
    junk = {"__MACOSX/x/character01/a.png": b"", "../../evil/character01/x.png": b"", "images_background_small1/read.me": b""}
    small = ["Greek/character02", "Greek/character01", "Balinese/character01"], ["Greek/character01", "Tagalog/character01"]
    write_zip(
        tmp_path / "omniglot" / "images_background_small1.zip", drawings("images_background_small1", small[0], png(DOT)) | junk
    )
    write_zip(
        tmp_path / "omniglot" / "images_background_small2.zip", drawings("images_background_small2", small[1], png(BLANK))
    )
    loaded = datasets.load("omniglot", tmp_path)
    assert loaded.groups == ("Balinese", "Greek", "Tagalog") and loaded.group.tolist() == [0, 1, 1, 2]
    assert loaded.labels.tolist() == [k for k in range(4) for _ in range(20)] and loaded.labels.dtype == np.int32
    wanted = np.zeros((28, 28), np.uint8)
    wanted[:4, :4] = 255
    assert (loaded.images[:60] == wanted).all() and not loaded.images[60:].any()
    rng = np.random.default_rng(0)
    pixels = rng.random((105, 105))
    repeated = pixels.repeat(4, 0).repeat(4, 1).reshape(28, 15, 28, 15).mean((1, 3))  # 420 = 28 · 15
    np.testing.assert_allclose(omniglot.AREA @ pixels @ omniglot.AREA.T, repeated, rtol=1e-5)


def test_the_whole_of_omniglot_must_be_there_in_zips_or_folders(tmp_path, monkeypatch):
    assert omniglot.CHARACTERS == {"images_background": 964, "images_evaluation": 659}  # an eightieth of it is quick to read
    monkeypatch.setattr(omniglot, "CHARACTERS", {"images_background": 12, "images_evaluation": 8})
    for part, n in omniglot.CHARACTERS.items():
        names = [f"{part[7]}{k % 7}/character{k:03d}" for k in range(n)]
        write_zip(tmp_path / f"{part}.zip", drawings(part, names, png(BLANK)))
    loaded = datasets.load("omniglot", tmp_path)
    assert loaded.images.shape == (20 * 20, 28, 28) and len(loaded.groups) == 14

    for name in ("Korean/character02", "Korean/character01"):
        write(tmp_path / "images_evaluation" / name, {f"{d:02d}.png": png(DOT) for d in range(20)})
    assert refused("omniglot", tmp_path).startswith(f"{tmp_path}/images_evaluation: holds 2 characters, not 8")
    large = tmp_path / "images_evaluation" / "Korean" / "character01" / "large.png"
    large.write_bytes(bytes(2_000_000))
    assert "holds Korean/character01/large.png of 2000000 bytes, too large for a drawing" in refused("omniglot", tmp_path)
    large.unlink()
    (tmp_path / "images_evaluation").rename(tmp_path / "some")
    loaded = omniglot.read([tmp_path / "some"])
    assert loaded.labels.tolist() == [0] * 20 + [1] * 20 and loaded.groups == ("Korean",) and loaded.images.max() == 255


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"G/character01/0000_21.png": png(DOT)}, "holds 21 drawings of G/character01, not 20"),
        ({"G/character01/0000_01.png": b"not a picture"}, "holds G/character01/0000_01.png, which is not a PNG image"),
        ({"G/character01/0000_01.png": png(DOT)[:60]}, "holds G/character01/0000_01.png, which is not a PNG image"),
        ({"G/character01/0000_01.png": png(DOT[:50])}, "of 105 x 50 pixels, not 105 x 105"),
        ({"G/character01/0000_01.png": bytes(2_000_000)}, "too large for a drawing"),
    ],
)
def test_damaged_drawings_are_named(tmp_path, change, problem):
    path = tmp_path / "images_background_small1.zip"
    part = "images_background_small1"
    write_zip(path, drawings(part, ["G/character01"], png(DOT)) | {f"{part}/{name}": data for name, data in change.items()})
    message = refused("omniglot", tmp_path)
    assert message.startswith(f"{path}: ") and problem in message
    path.write_bytes(path.read_bytes()[:500])
    assert "is not a complete zip file" in refused("omniglot", tmp_path)
    write_zip(path, {"another/file": b""})
    assert "holds 0 characters" in refused("omniglot", tmp_path)


# ---- MiniImageNet


def test_mini_imagenet_is_read_from_its_pickles(tmp_path, monkeypatch):
    images = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.ones((1, 84, 84, 3), np.uint8)
    contents = {
        "train": {"image_data": images, "class_dict": {"n02": list(np.array([0, 3])), "n01": [1, 2]}},
        "val": {"image_data": images[:2], "class_dict": {"n03": np.arange(2)}},
        "test": {"image_data": images[:2], "class_dict": {"n04": [0, 1]}},
    }
    write(tmp_path / "mini-imagenet", {f"mini-imagenet-cache-{k}.pkl": pickle.dumps(v) for k, v in contents.items()})
    problem = "mini-imagenet-cache-train.pkl: holds 2 classes of 2 to 2 images, not 64 of 600: get the file again"
    assert refused("mini-imagenet", tmp_path).endswith(problem)
    monkeypatch.setattr(mini_imagenet, "CLASSES", (2, 1, 1))
    monkeypatch.setattr(mini_imagenet, "PER_CLASS", 2)
    loaded = datasets.load("mini-imagenet", tmp_path)
    assert loaded.groups == ("train", "validation", "test") and loaded.group.tolist() == [0, 0, 1, 2]
    assert loaded.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert loaded.images[:, 5, 5, 1].tolist() == [1, 2, 0, 3, 0, 1, 0, 1]
    path = tmp_path / "mini-imagenet" / "mini-imagenet-cache-test.pkl"
    for bad, problem in (
        ({"image_data": images[:2], "class_dict": {"n04": [0, 2]}}, "must have each of its 2 images in one class"),
        ({"image_data": images[:2], "class_dict": {}}, "must have each of its 2 images in one class"),
        ({"image_data": images[:2, 1:], "class_dict": {"n04": [0, 1]}}, "holds images of uint8 (2, 83, 84, 3)"),
        ({"image_data": images[:2], "class_dict": {"n04": 0, "n05": "x"}}, "does not hold 'image_data' and 'class_dict'"),
        ({"image_data": images[:2], "class_dict": {"n04": [0], "n05": [1]}}, "holds 2 classes of 1 to 1 images, not 1 of 2"),
        ({"image_data": images[:3], "class_dict": {"n04": [0, 1, 2]}}, "holds 1 classes of 3 to 3 images, not 1 of 2"),
        ({"image_data": images}, "does not hold 'image_data' and 'class_dict'"),
        (Malicious(), "asks to run"),
    ):
        path.write_bytes(pickle.dumps(bad))
        assert problem in refused("mini-imagenet", tmp_path)


def test_mini_imagenet_is_read_from_class_folders(tmp_path):
    def photograph(path, colour, size=(100, 90)):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, colour).save(path)

    for split, name in (("train", "n02"), ("train", "n01"), ("val", "n03"), ("test", "n04")):
        photograph(tmp_path / "split" / split / name / "b.jpg", "red")
        photograph(tmp_path / "split" / split / name / "a.png", "blue", (84, 84))
        photograph(tmp_path / "flat" / name / "a.JPEG", "red")
    loaded = datasets.load("mini-imagenet", tmp_path / "split")
    assert loaded.images.shape == (8, 84, 84, 3) and loaded.images[0, 0, 0].tolist() == [0, 0, 255]
    assert loaded.images[1, 40, 40, 0] > 250 and loaded.group.tolist() == [0, 0, 1, 2]
    flat = datasets.load("mini-imagenet", tmp_path / "flat")
    assert flat.groups == ("all",) and flat.labels.tolist() == [0, 1, 2, 3] and flat.group.tolist() == [0] * 4
    (tmp_path / "flat" / "n01" / "a.JPEG").write_bytes(b"not a picture")
    assert "n01/a.JPEG: is not a JPEG or PNG image" in refused("mini-imagenet", tmp_path / "flat")
    for size, problem in (
        ((9_000, 9_000), "has 9000 x 9000 pixels, but at most 67108864"),
        ((60_000, 60_000), "is not a JPEG or PNG"),
    ):
        header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
        chunk = b"IHDR" + header
        bomb = (
            b"\x89PNG\r\n\x1a\n"
            + struct.pack(">I", 13)
            + chunk
            + struct.pack(">I", zlib.crc32(chunk))
            + bytes(4)
            + b"IDAT"
            + bytes(4)
        )
        (tmp_path / "flat" / "n01" / "a.JPEG").write_bytes(bomb)
        assert f"n01/a.JPEG: {problem}" in refused("mini-imagenet", tmp_path / "flat")
    (tmp_path / "flat" / "n01" / "a.JPEG").unlink()
    assert "n01 holds no .jpg or .png image" in refused("mini-imagenet", tmp_path / "flat")


# ---- damaged files of every format


def mutant(data, rng):
    """The data with one to three changes: a bit turned, a number made extreme, or bytes cut out, put in or moved."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at, other = (int(rng.integers(len(data))) for _ in range(2))
        match rng.integers(6):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\1\1\1\1"])
            case 2:
                del data[at + 1 :]
            case 3:
                del data[at : at + 5]
            case 4:
                data[at:at] = rng.bytes(5)
            case 5:
                data[at : at + 8] = data[other : other + 8]
        data = data or bytearray(b"0")
    return bytes(data)


def saved(write, *arguments, **more):
    out = io.BytesIO()
    write(out, *arguments, **more)
    return out.getvalue()


def small_tar(out):
    data = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]})
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in BATCHES:
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def small_zip(out):
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in drawings("images_background_small1", ["G/character01"], png(DOT)).items():
            archive.writestr(name, data)


SUBSET = {
    f"{part}_{kind}": array
    for part in ("train", "test")
    for kind, array in (("images", np.zeros((2, 32, 32, 3), np.uint8)), ("labels", np.arange(2)))
}
PHOTOGRAPH = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3)).astype(np.uint8))
FORMATS = {  # a set, one of its files, and that file's content
    "idx": ("mnist", "t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.arange(10, dtype=np.uint8)))),
    "npz": ("cifar-10", "cifar10-subset.npz", saved(np.savez, **SUBSET)),
    "compressed-npz": ("cifar-10", "cifar10-subset.npz", saved(np.savez_compressed, **SUBSET)),
    "tar": ("cifar-10", "cifar-10-python.tar.gz", saved(small_tar)),
    "zip": ("omniglot", "images_background_small1.zip", saved(small_zip)),
    "jpeg": ("mini-imagenet", "n01/photograph.jpg", saved(PHOTOGRAPH.save, "JPEG")),
    "png": ("mini-imagenet", "n01/photograph.png", saved(PHOTOGRAPH.save, "PNG")),
}


def refused_mutants(path, data, read):
    """How many of sixty mutants of a file are refused."""
    path.write_bytes(data)
    read()
    rng, refusals = np.random.default_rng(0), 0
    for _ in range(60):
        path.write_bytes(mutant(data, rng))
        try:
            read()
        except InputError as error:
            refusals += 1
            assert str(path) in str(error) and "\n" not in str(error)
    return refusals


@pytest.mark.parametrize("name", FORMATS)
def test_mutants_are_read_or_refused_in_one_line(name, tmp_path, monkeypatch):
    source, file, data = FORMATS[name]
    monkeypatch.setattr(cifar, "PER_BATCH", 2)
    monkeypatch.setattr(idx_format, "SHAPES", {stem: (10, *shape[1:]) for stem, shape in idx_format.SHAPES.items()})
    monkeypatch.setitem(idx_format.PER_CLASS, "mnist", [1] * 10)
    if source == "mnist":
        for stem, shape in idx_format.SHAPES.items():
            (tmp_path / stem).write_bytes(idx(np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)))
    (tmp_path / file).parent.mkdir(exist_ok=True)
    assert refused_mutants(tmp_path / file, data, lambda: datasets.load(source, tmp_path)) > 5


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_mutants_of_pickles_are_read_or_refused_in_one_line(protocol, tmp_path):
    path = tmp_path / "a.pkl"

    def read():
        with path.open("rb") as file:
            return pickles.load(file, path)

    assert refused_mutants(path, pickle.dumps({"a": np.arange(6), "b": [1, "t"]}, protocol), read) > 5


def test_errors_of_the_file_system_are_not_taken_for_damage(tmp_path):
    for error in (PermissionError(errno.EACCES, "no"), FileNotFoundError(errno.ENOENT, "no"), OSError(errno.EIO, "no")):
        with pytest.raises(OSError) as caught, datasets.parsing("file", "is not a file"):
            raise error
        assert caught.value is error
    for error in (OSError(errno.EINVAL, "Invalid argument"), gzip.BadGzipFile("bad"), RuntimeError("odd"), KeyError("k")):
        with (
            pytest.raises(InputError, match=r"^file: is not a file \(.+\): get the file again$"),
            datasets.parsing("file", "is not a file"),
        ):
            raise error


# ---- bundled


def test_glyphs_are_the_same_always_and_can_be_told_apart_but_not_by_pixels_alone():
    loaded = datasets.load("glyphs")
    assert loaded.images.shape == (960, 28, 28) and loaded.images.dtype == np.uint8 and loaded.images.max() == 255
    assert loaded.group.tolist() == [k for k in range(6) for _ in range(8)] and len(loaded.groups) == 6
    np.testing.assert_array_equal(loaded.images, glyphs.make().images)
    assert len({image.tobytes() for image in loaded.images}) == 960
    flat = loaded.images.reshape(48, 20, -1) / 255
    rng = np.random.default_rng(0)
    right = []
    for _ in range(200):  # 5 ways, 1 shot: the nearest of five drawings
        shots = flat[rng.choice(48, 5, replace=False)]
        apart = ((shots[:, 1:, None] - shots[:, 0]) ** 2).sum(-1)
        right.append((apart.argmin(-1) == np.arange(5)[:, None]).mean())
    assert 0.4 < np.mean(right) < 0.7


def test_the_tables_name_every_set_once_and_all_that_can_be_fetched():
    assert list(datasets.IMAGES) == ["digits", "mnist", "fashion-mnist", "cifar-10"]
    assert list(datasets.CLASSES) == ["glyphs", "omniglot", "mini-imagenet"]
    assert {n for n, s in datasets.SETS.items() if s.get == f"fedbilevel data fetch {n}"} == set(fetching.FILES)
    for file in itertools.chain(*fetching.FILES.values()):
        assert re.fullmatch("[0-9a-f]{64}", file.sha256) and all(a.endswith(f"/{file.name}") for a in file.addresses)
    for name, problem in (("digits", "bundled"), ("mini-imagenet", "image-net.org"), ("mnits", "did you mean mnist")):
        with pytest.raises(InputError, match=problem):
            fetch(name)


# ---- fetching


CONTENT = np.random.default_rng(0).bytes(300_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves `CONTENT` at every path; keeps what was asked for and how many bytes it sent."""

    def __init__(self):
        self.asked, self.sent = [], []
        self.content, self.ranges, self.break_after, self.missing = CONTENT, True, [], ()
        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}/{path}/file.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append((self.path.split("/")[1], wanted))
        if self.path.split("/")[1] in server.missing:
            return self.send_error(404)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        self.send_header("Content-Length", str(len(server.content) - start))
        self.end_headers()
        body = server.content[start:]
        body = body[: server.break_after.pop(0)] if server.break_after else body
        server.sent.append(len(body))
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def file(*addresses, content=CONTENT):
    return File("file.bin", hashlib.sha256(content).hexdigest(), len(content), addresses)


def closed_port():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return closed.getsockname()[1]


def test_a_right_file_is_fetched_once_with_progress(server, tmp_path, cache):
    seen = []
    (path,) = fetch("mnist", tmp_path, lambda file, done: seen.append(done), [file(server.url("a"))])
    assert path == tmp_path / "mnist" / "file.bin" and path.read_bytes() == CONTENT
    assert seen[0] == 0 and seen[-1] == len(CONTENT) and seen == sorted(seen) and len(seen) > 3
    assert fetch("mnist", tmp_path, files=[file(server.url("a"))]) == [] and server.asked == [("a", None)]
    (path.parent / ".lock").unlink()
    assert (
        fetch("mnist", tmp_path, files=[file(server.url("a"))]) == [] and not (path.parent / ".lock").exists()
    )  # nor written to
    path.write_bytes(b"damaged")
    assert fetch("mnist", tmp_path, files=[file(server.url("a"))]) == [path] and path.read_bytes() == CONTENT
    assert fetch("mnist", files=[file(server.url("a"))]) == [cache / "mnist" / "file.bin"]
    assert {p.name for p in path.parent.iterdir()} == {"file.bin", ".lock"}


def test_a_file_with_the_wrong_hash_is_not_kept_and_the_next_mirror_tried(server, tmp_path):
    wrong = file(server.url("a"), server.url("b"), content=bytes(len(CONTENT)))
    with pytest.raises(FetchError, match=r"file.bin: no mirror worked \(.*SHA-256 is wrong; .*SHA-256 is wrong\)") as caught:
        fetch("mnist", tmp_path, files=[wrong])
    assert "\n" not in str(caught.value) and server.asked == [("a", None), ("b", None)]
    assert [p.name for p in (tmp_path / "mnist").iterdir()] == [".lock"]
    with pytest.raises(FetchError, match="sent more than the file's 10 bytes"):
        fetch("mnist", tmp_path, files=[file(server.url("a"), content=CONTENT[:10])])
    server.content = CONTENT[:10]
    with pytest.raises(FetchError, match="broke off after 10 of 300000 bytes"):
        fetch("mnist", tmp_path, files=[file(server.url("a"))])


def test_a_download_that_breaks_off_goes_on_where_it_was(server, tmp_path):
    server.break_after = [100_000, 50_000]
    (path,) = fetch("mnist", tmp_path, files=[file(server.url("a"))])
    assert path.read_bytes() == CONTENT
    assert server.asked == [("a", None), ("a", "bytes=100000-"), ("a", "bytes=150000-")]
    assert server.sent == [100_000, 50_000, 150_000]


def test_a_fetch_that_was_given_up_is_taken_up_by_the_next(server, tmp_path):
    server.break_after = [100_000, 0]
    with pytest.raises(FetchError, match=r"broke off after 100000 of 300000 bytes.*; 100000 of 300000 bytes are kept"):
        fetch("mnist", tmp_path, files=[file(server.url("a"))])
    (path,) = fetch("mnist", tmp_path, files=[file(server.url("b"))])
    assert path.read_bytes() == CONTENT and server.asked[-1] == ("b", "bytes=100000-") and server.sent[-1] == 200_000


def test_damaged_leftovers_are_begun_again(server, tmp_path):
    for leftover in (b"damaged", bytes(len(CONTENT)), bytes(len(CONTENT) + 1)):
        write(tmp_path / "mnist", {"file.bin.part": leftover})
        (path,) = fetch("mnist", tmp_path, files=[file(server.url("a"))])
        assert path.read_bytes() == CONTENT
        path.unlink()


def test_a_server_that_ignores_ranges_is_read_from_the_start(server, tmp_path):
    server.ranges, server.break_after = False, [100_000]
    (path,) = fetch("mnist", tmp_path, files=[file(server.url("a"))])
    assert path.read_bytes() == CONTENT
    assert server.asked == [("a", None), ("a", "bytes=100000-")] and server.sent == [100_000, 300_000]


def test_the_second_mirror_serves_where_the_first_has_no_such_file(server, tmp_path):
    server.missing = ("a",)
    (path,) = fetch("mnist", tmp_path, files=[file(server.url("a"), server.url("b"))])
    assert path.read_bytes() == CONTENT and server.asked == [("a", None), ("b", None)]
    with pytest.raises(FetchError, match=rf"\(127.0.0.1:{server.server_port}: 404 Not Found\); check the network"):
        fetch("fashion-mnist", tmp_path, files=[file(server.url("a"))])


def test_two_fetches_at_once_do_not_meet(server, tmp_path):
    def again(file_, done):
        with pytest.raises(InputError, match="another process is fetching to"):
            fetch("mnist", tmp_path, files=[file(server.url("a"))])

    (path,) = fetch("mnist", tmp_path, again, [file(server.url("a"))])
    assert path.read_bytes() == CONTENT


def test_the_command_shows_progress_and_says_in_one_line_that_there_is_no_network(server, tmp_path, monkeypatch, capsys):
    def run(files):
        monkeypatch.setitem(fetching.FILES, "mnist", files)
        monkeypatch.setattr(sys, "argv", ["fedbilevel", "data", "fetch", "mnist", "--to", str(tmp_path)])
        try:
            main.main()
            code = 0
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    down = [f"http://127.0.0.1:{closed_port()}/file.bin" for _ in range(2)]
    code, out, err = run([file(*down)])
    assert code == 1 and out == "" and err.count("\n") == 1
    assert err.startswith("fedbilevel: file.bin: no mirror worked (127.0.0.1:") and err.count("Connection refused") == 2
    assert f"check the network, or put the file into {tmp_path}/mnist" in err
    code, out, err = run([file(server.url("a"))])
    assert (code, err) == (0, "") and "file.bin: 0.3 of 0.3 MB\n" in out
    assert out.endswith(f"mnist: fetched and checked: {tmp_path}/mnist\n")
    assert run([file(server.url("a"))]) == (0, f"mnist: already there, and intact: {tmp_path}/mnist\n", "")
