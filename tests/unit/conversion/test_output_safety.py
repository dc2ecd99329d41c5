"""What a conversion may touch: nothing that it did not write, and nothing that came while it ran."""

import os
import shutil

import pytest

from conversion import output as output_module
from conversion.checkpoint import MANIFEST
from conversion.cli import main
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from conversion.output import OutputDirectory
from conversion.replaceable import REPLACED, left_behind
from tests.unit.conversion.directories import as_bytes, write_bf16
from tests.unit.conversion.test_damage import CONFIG, TP2

OVER = Target(kind="megatron", layout=ParallelLayout(tp=2), overwrite=True)
HF_OVER = Target(kind="hf", overwrite=True)


@pytest.fixture
def source(tmp_path):
    return write_bf16(tmp_path / "source", CONFIG)


@pytest.fixture
def sharded(source, tmp_path):
    convert(source, tmp_path / "sharded", TP2)
    return tmp_path / "sharded"


def tree(path):
    """Return every file below a path with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", [".m.old", ".m.partial"])
@pytest.mark.parametrize("target_stands", [False, True])
def test_a_foreign_directory_with_one_of_our_names_is_refused_and_kept(source, tmp_path, name, target_stands):
    if target_stands:
        convert(source, tmp_path / "m", TP2)
    foreign = tmp_path / name
    (foreign / "notes").mkdir(parents=True)
    (foreign / "notes" / "thesis.tex").write_text("x")
    (foreign / "journal.jsonl").write_text("dear diary\n")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} was not left by a conversion, so it is not touched, .*; move it away"):
        convert(source, tmp_path / "m", OVER)
    assert tree(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [name]


def test_a_link_with_the_name_of_the_partial_directory_is_not_followed(source, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".m.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"\.m\.partial was not left by a conversion"):
        convert(source, tmp_path / "m", TP2)


@pytest.mark.parametrize("target", [OVER, HF_OVER], ids=["with manifest", "without"])
def test_a_replacement_that_was_cut_is_undone_with_and_without_a_manifest(source, sharded, tmp_path, monkeypatch, target):
    write_bf16(tmp_path / "m", CONFIG, seed=1)
    if target is OVER:
        convert(source, tmp_path / "m", OVER)
    before = tree(tmp_path / "m")
    real = type(tmp_path).rename

    def rename(self, to):
        if self.name == ".m.partial":
            raise KeyboardInterrupt
        return real(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            convert(sharded, tmp_path / "m", HF_OVER)
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match="is not empty"):
        convert(sharded, tmp_path / "m", Target(kind="hf"))
    assert tree(tmp_path / "m") == before
    convert(sharded, tmp_path / "m", HF_OVER)
    assert as_bytes(tmp_path / "m") == as_bytes(source)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("mark", [MANIFEST, REPLACED])
def test_a_removal_that_was_cut_still_shows_that_the_directory_is_ours(source, sharded, tmp_path, monkeypatch, mark):
    write_bf16(tmp_path / "m", CONFIG)
    if mark == MANIFEST:
        convert(sharded, tmp_path / "m", HF_OVER)

    def cut(path):
        raise OSError("cut here")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut)
        with pytest.raises(OSError, match="cut here"):
            convert(sharded, tmp_path / "m", HF_OVER)
    assert [p.name for p in (tmp_path / ".m.old").iterdir()] == [mark] and left_behind(tmp_path / ".m.old")
    convert(sharded, tmp_path / "m", HF_OVER)
    assert not (tmp_path / ".m.old").exists()


def test_a_second_command_during_a_replacement_waits_its_turn(source, sharded, tmp_path, monkeypatch):
    """It comes after the new directory stands and before the old one is gone."""
    convert(source, tmp_path / "m", TP2)
    refused = []

    def remove_tree(path):
        with pytest.raises(ValueError, match="is being published by another process"):
            OutputDirectory(tmp_path / "m", {"a": 1}, overwrite=True)
        refused.append(path)

    monkeypatch.setattr(output_module, "remove_tree", remove_tree)
    convert(sharded, tmp_path / "m", HF_OVER)
    assert refused == [tmp_path / ".m.old"] and (tmp_path / ".m.old" / MANIFEST).is_file()


def test_a_second_command_between_the_renames_undoes_nothing(source, sharded, tmp_path, monkeypatch):
    convert(source, tmp_path / "m", TP2)
    real, refused = type(tmp_path).rename, []

    def rename(self, to):
        if self.name == ".m.partial":
            with pytest.raises(ValueError, match="is being written by another process"):
                OutputDirectory(tmp_path / "m", {"a": 1}, overwrite=True)
            refused.append(to)
        return real(self, to)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    convert(sharded, tmp_path / "m", HF_OVER)
    assert refused == [tmp_path / "m"] and as_bytes(tmp_path / "m") == as_bytes(source)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_appears_during_the_run_is_kept(source, tmp_path, monkeypatch, overwrite):
    real = OutputDirectory.carry

    def carry(self, *args):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "thesis.tex").write_text("x")
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(OutputDirectory, "carry", carry)
        with pytest.raises(ValueError, match=r"/m (is not empty|does not look like a checkpoint).*waits in .*\.m\.partial"):
            convert(source, tmp_path / "m", OVER if overwrite else TP2)
    assert tree(tmp_path / "m") == {"thesis.tex": b"x"}
    (tmp_path / "m" / "thesis.tex").unlink()
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / ".m.partial").glob("*.safetensors")}
    convert(source, tmp_path / "m", TP2)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m").glob("*.safetensors")} == times and times


def test_a_target_that_appears_before_the_lock_is_kept(source, tmp_path, monkeypatch):
    real = OutputDirectory._locked

    def locked(self):
        write_bf16(tmp_path / "m", CONFIG, seed=1)
        return real(self)

    monkeypatch.setattr(OutputDirectory, "_locked", locked)
    with pytest.raises(ValueError, match="is not empty"):
        convert(source, tmp_path / "m", TP2)
    assert not (tmp_path / ".m.partial").exists()


@pytest.mark.parametrize(
    "files, words",
    [
        (["config.json"], "does not look like a checkpoint"),
        (["config.json", "src/main.c"], "does not look like a checkpoint"),
        (["config.json", "model.safetensors", ".git/HEAD"], r"holds \.git beside a checkpoint"),
        (["config.json", "model.safetensors", "thesis.tex"], r"holds thesis\.tex beside a checkpoint"),
        (["config.json", "model.safetensors", "data/a.json"], "holds data beside a checkpoint"),
        ([MANIFEST, ".git/HEAD"], r"holds \.git beside a checkpoint"),
    ],
)
def test_only_a_checkpoint_and_nothing_else_is_replaced(source, tmp_path, files, words):
    for name in files:
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text("{}")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=words + r".*choose another target"):
        convert(source, tmp_path / "m", OVER)
    assert tree(tmp_path) == before


def test_a_downloaded_checkpoint_is_replaced(sharded, source, tmp_path):
    model = write_bf16(tmp_path / "m", CONFIG, seed=1)
    for name in ("README.md", "LICENSE", ".gitattributes", "tokenizer.model", "chat_template.jinja"):
        (model / name).write_text("x")
    convert(sharded, model, HF_OVER)
    assert as_bytes(model) == as_bytes(source)


@pytest.mark.parametrize("where", ["{config}", "{config}/inside", "{config}/.."])
def test_a_target_that_meets_the_config_directory_is_refused(source, tmp_path, where):
    convert(source, tmp_path / "td", Target(kind="torch_dist"))
    config = tmp_path / "other" / "config"
    (tmp_path / "td" / "hf").rename(tmp_path / "hf")
    config.parent.mkdir()
    (tmp_path / "hf").rename(config)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"and the config directory .* contain each other"):
        convert(tmp_path / "td", where.format(config=config), HF_OVER, hf_config=config)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["empty", "checkpoint", "dangling"])
def test_a_link_as_target_means_what_it_points_to(source, sharded, tmp_path, capsys, kind):
    place, link = tmp_path / "place" / "real", tmp_path / "link"
    place.parent.mkdir()
    if kind == "empty":
        place.mkdir()
    elif kind == "checkpoint":
        write_bf16(place, CONFIG, seed=1)
    link.symlink_to(place)
    assert main(["to-hf", str(sharded), str(link), "--overwrite", "--json"]) == 0, capsys.readouterr().err
    assert link.is_symlink() and as_bytes(place) == as_bytes(source)
    assert [p.name for p in place.parent.iterdir()] == ["real"]


def test_a_circle_of_links_is_refused(source, tmp_path):
    (tmp_path / "m").symlink_to(tmp_path / "n")
    (tmp_path / "n").symlink_to(tmp_path / "m")
    with pytest.raises(ValueError, match="cannot be followed to a place"):
        convert(source, tmp_path / "m", TP2)


def test_a_mount_point_is_refused_at_the_start(source, tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(tmp_path / "m"))
    with pytest.raises(ValueError, match=r"is a mount point, .*; give a directory inside it"):
        convert(source, tmp_path / "m", TP2)
    assert not (tmp_path / ".m.partial").exists()
    convert(source, tmp_path / "m" / "inside", TP2)


@pytest.mark.parametrize("target", [TP2, OVER], ids=["plain", "overwrite"])
def test_a_file_as_target_is_named_as_one(source, tmp_path, target):
    (tmp_path / "m").write_text("x")
    with pytest.raises(ValueError, match=r"/m is a file, .*; remove the file or choose another target"):
        convert(source, tmp_path / "m", target)
    assert (tmp_path / "m").read_text() == "x"
