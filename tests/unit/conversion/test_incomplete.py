"""`verify DIR` on directories from which something is missing: refused by name, whatever the kind."""

import json
import shutil

import pytest

from conversion.checkpoint import MANIFEST, open_checkpoint
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from conversion.verify import check_manifest
from tests.unit.conversion.directories import write_bf16
from tests.unit.conversion.test_damage import CONFIG

RANK = "pp000-tp001-vp000.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    write_bf16(root / "source", CONFIG)
    convert(root / "source", root / "ranks", Target(kind="megatron", layout=ParallelLayout(tp=2)))
    convert(root / "source", root / "torch_dist", Target(kind="torch_dist"))
    convert(root / "ranks", root / "hf", Target(kind="hf", max_shard_bytes=1_000_000))
    return root


@pytest.fixture
def copied(whole, tmp_path):
    return lambda kind: shutil.copytree(whole / kind, tmp_path / kind)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def edit_manifest(path, change):
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", ["ranks", "torch_dist", "hf"])
def test_a_whole_directory_is_equal(whole, kind):
    checked, difference = check_manifest(whole / kind)
    assert difference is None and checked == len(open_checkpoint(whole / kind).tensors) > 10


@pytest.mark.parametrize(
    "kind, name, words",
    [
        ("torch_dist", "__0_0.distcp", "__0_0.distcp does not exist"),
        ("torch_dist", "__0_1.distcp", "__0_1.distcp is missing or has fewer than"),
        ("torch_dist", "common.pt", "common.pt is missing or empty"),
        ("torch_dist", "metadata.json", "metadata.json is missing or empty"),
        ("torch_dist", ".metadata", ".metadata does not exist"),
        ("torch_dist", "hf", "without hf/config.json"),
        ("ranks", RANK, f"{RANK} does not exist"),
        ("ranks", "hf", "config.json"),
        ("ranks", MANIFEST, f"has no {MANIFEST}"),
        ("hf", "config.json", "config.json"),
        ("hf", "model.safetensors.index.json", r"holds \d files and no|holds \d \*.safetensors files and no"),
        ("hf", "model-00002-of-00003.safetensors", "model-00002-of-00003.safetensors does not exist"),
    ],
)
def test_a_missing_file_is_named(copied, kind, name, words):
    path = copied(kind)
    remove(path / name)
    with pytest.raises(ValueError, match=words):
        check_manifest(path)


@pytest.mark.parametrize("kind", ["ranks", "torch_dist", "hf"])
@pytest.mark.parametrize("change", [dict.clear, dict.popitem], ids=["no files", "a file struck out"])
def test_a_manifest_that_lists_less_than_the_model(copied, kind, change):
    path = copied(kind)
    edit_manifest(path, lambda manifest: change(manifest["files"]))
    with pytest.raises(ValueError, match=rf"{MANIFEST} lists \d+ tensors, the model has \d+; they differ in"):
        check_manifest(path)


@pytest.mark.parametrize("kind, name", [("ranks", "pp001-tp000-vp000.safetensors"), ("torch_dist", "__1_0.distcp")])
def test_a_spare_file_is_named(copied, kind, name):
    path = copied(kind)
    (path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"{name} is missing, or belongs to another checkpoint"):
        check_manifest(path)


def test_a_cut_file_of_objects(copied):
    path = copied("torch_dist")
    data = (path / "__0_1.distcp").read_bytes()
    (path / "__0_1.distcp").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"__0_1\.distcp is missing or has fewer than"):
        check_manifest(path)


def test_ranks_without_their_manifest_and_other_versions(copied):
    path = copied("ranks")
    (path / MANIFEST).rename(path / "kept")
    with pytest.raises(ValueError, match=f"a shard of Megatron ranks, but no {MANIFEST}, which names their layout"):
        open_checkpoint(path)
    (path / "kept").rename(path / MANIFEST)
    edit_manifest(path, lambda manifest: manifest.update(format_version=2))
    with pytest.raises(ValueError, match="format_version is 2; this version reads 1"):
        open_checkpoint(path)
