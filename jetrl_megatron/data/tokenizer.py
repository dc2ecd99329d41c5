"""Tokenizers: loading one, every id that ends a sequence, and a small character tokenizer for models that start from nothing.

Enters: a Hugging Face directory. Leaves: a `transformers` tokenizer and its stop ids. Only end-of-sequence ids are taken from the
generation config: sampling fields in it (repetition penalty, top-k) are not this project's defaults.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHAR_SPECIALS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
"""Ids 0 to 5 of a character tokenizer."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
"""Globs of what a Hugging Face directory keeps of its tokenizer, of every kind that the families have had."""
_MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError)
"""What the library raises on files of another shape; anything else is no fault of the files."""
CHAR_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory; ValueError when the directory is missing or holds none."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model.tokenizer (or model.path) is {str(path)!r}, which is no directory; give a Hugging Face model directory")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_object(folder / name)
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        # Its parser in Rust raises plain Exception, its Python code whatever a value of another type than it expects leads to.
        if type(error) is not Exception and not isinstance(error, _MALFORMED):
            raise
        if isinstance(error, StrictDataclassError):  # of a config class; the tokenizer's class is looked up in the model's config
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder / 'config.json'} cannot be read: {reason}; mend it, or take it from the model's source") from error
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {type(error).__name__}: {error}") from error


def stop_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every end-of-sequence id, without repeats: those of generation_config.json, of config.json, then the tokenizer's.

    path: the Hugging Face directory of the model; files that are missing are passed over. Raises ValueError when nothing names one, and
    for a file that holds no JSON object.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            value = _read_object(file).get("eos_token_id")
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        found.append(int(tokenizer.eos_token_id))
    if not found:
        raise ValueError(f"{path}: neither generation_config.json, config.json nor the tokenizer names an eos_token_id; add one")
    return tuple(dict.fromkeys(found))


def replace_tokenizer(hf_dir: Path, tokenizer_dir: Path) -> None:
    """Put the tokenizer of `tokenizer_dir` into `hf_dir`, file by file, in the place of whatever tokenizer it holds."""
    for path in _tokenizer_files(hf_dir):
        path.unlink()
    for path in _tokenizer_files(tokenizer_dir):
        target = hf_dir / path.relative_to(tokenizer_dir)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every tokenizer file of a Hugging Face directory, by its path there."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in _tokenizer_files(folder)}


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; raises ValueError naming the file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); mend it, or take it from the model's source again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; it must be a JSON object")
    return found


def build_char_tokenizer(out_dir: str | Path, alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a character and save it as a Hugging Face directory.

    out_dir: made when missing; tokenizer files in it are replaced. alphabet: the characters, ids 6 and up in the order given; any other
    character becomes `<unk>`. `<eos>` ends a sequence, `<pad>` is id 0, and the chat template marks roles by one token each.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"the alphabet is {alphabet!r}; it must name at least one character and none twice")
    vocabulary = {token: index for index, token in enumerate((*CHAR_SPECIALS, *alphabet))}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(CHAR_SPECIALS[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAR_CHAT_TEMPLATE
    tokenizer.save_pretrained(str(out_dir))
    return tokenizer
