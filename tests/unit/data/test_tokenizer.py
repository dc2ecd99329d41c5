import json
from pathlib import Path

import pytest

from jetrl_megatron.data.tokenizer import (
    CHAR_SPECIALS,
    build_char_tokenizer,
    load_tokenizer,
    replace_tokenizer,
    stop_token_ids,
    tokenizer_digests,
)

ALPHABET = "0123456789+= \nab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(path, ALPHABET)
    return path


def test_one_token_a_character_and_back(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "37+58=\n a  b"
    ids = tokenizer.encode(text)
    assert ids == [len(CHAR_SPECIALS) + ALPHABET.index(char) for char in text]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(CHAR_SPECIALS) + len(ALPHABET)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.encode("z")) == (0, 1, [2])


def test_the_chat_template_marks_roles(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "1+1="}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<system>a<user>1+1=<assistant>"
    assert tokenizer.encode(text)[:3] == [3, 6 + ALPHABET.index("a"), 4]
    answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "2"}], tokenize=False)
    assert answered.endswith("<assistant>2<eos>") and tokenizer.encode(answered)[-1] == 1


def test_the_alphabet_is_checked(tmp_path: Path) -> None:
    for alphabet in ("", "aba"):
        with pytest.raises(ValueError, match="none twice"):
            build_char_tokenizer(tmp_path, alphabet)


def test_every_stop_id_counts_and_once(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(tmp_path, tokenizer) == (1,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 1], "top_k": 20}))
    assert stop_token_ids(tmp_path, tokenizer) == (7, 8, 1, 9)
    tokenizer.eos_token = None
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="eos_token_id"):
        stop_token_ids(tmp_path, tokenizer)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("text", "message"), [('{"eos_token_id": 1,', "is not JSON .*mend it"), ("[1]", "holds a list; it must be a JSON object")]
)
def test_a_config_that_is_no_json_object_is_named(folder: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / name} {message}"):
        stop_token_ids(tmp_path, load_tokenizer(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_no_json_is_named(tmp_path: Path, name: str) -> None:
    build_char_tokenizer(tmp_path, ALPHABET)
    (tmp_path / name).write_bytes(b"{\xff")
    with pytest.raises(ValueError, match=f"{tmp_path / name} is not JSON"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_shape_is_named(tmp_path: Path) -> None:
    build_char_tokenizer(tmp_path, ALPHABET)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=f"{tmp_path} holds no tokenizer that can be loaded: KeyError"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("tokenizer.json", "model", 1), ("tokenizer.json", "added_tokens", 3), ("tokenizer_config.json", "tokenizer_class", 7)],
)
def test_a_tokenizer_with_a_value_of_another_type_is_named(tmp_path: Path, name: str, key: str, value: int) -> None:
    build_char_tokenizer(tmp_path, ALPHABET)
    (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"{tmp_path} holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("out of threads"), ImportError("no sentencepiece"), MemoryError()])
def test_a_failure_that_is_not_the_files_stays_what_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(path: str) -> None:
        raise error

    monkeypatch.setattr("jetrl_megatron.data.tokenizer.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(type(error)) as caught:
        load_tokenizer(folder)
    assert caught.value is error


def test_a_tokenizer_is_replaced_whole(folder: Path, tmp_path: Path) -> None:
    """Nothing of the old one is left that the library would read beside the new one, and other files stay."""
    build_char_tokenizer(tmp_path, "xyz")
    for name in ("merges.txt", "vocab.json", "tokenizer.model", "added_tokens.json", "config.json"):
        (tmp_path / name).write_text("{}")
    replace_tokenizer(tmp_path, folder)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()} | {
        "config.json": b"{}"
    }
    assert load_tokenizer(tmp_path).encode("37+58=") == load_tokenizer(folder).encode("37+58=")


def test_digests_are_of_the_tokenizers_files_alone_and_see_a_change_of_the_text_of_a_token(tmp_path: Path) -> None:
    build_char_tokenizer(tmp_path, "xyz")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool.jinja").write_text("")
    (tmp_path / "model.safetensors").write_text("weights")
    before = tokenizer_digests(tmp_path)
    assert before["additional_chat_templates/tool.jinja"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert {"tokenizer.json", "tokenizer_config.json"} < before.keys() and "model.safetensors" not in before
    ids = load_tokenizer(tmp_path).encode("xy")
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"z"', '"w"'))
    assert load_tokenizer(tmp_path).encode("xy") == ids, "prompts do not show it"
    after = tokenizer_digests(tmp_path)
    assert [name for name in before if after[name] != before[name]] == ["tokenizer.json"] and after.keys() == before.keys()


def test_missing_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no directory"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}, "num_hidden_layers.*layer_types"),
        ({"rope_scaling": "linear"}, "'rope_parameters' with value 'linear'"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' expected float"),
    ],
)
def test_a_config_that_the_library_refuses_is_named(tmp_path: Path, change: dict, words: str) -> None:
    build_char_tokenizer(tmp_path, ALPHABET)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **change}))
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json cannot be read: .*{words}.*; mend it"):
        load_tokenizer(tmp_path)
