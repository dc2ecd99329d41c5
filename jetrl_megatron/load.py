"""From a recipe file and `key=value` words to the frozen `Recipe`, or an error that says what to write instead.

Enters: a YAML path and overrides. Leaves: a `Recipe` (tuples as tuples, every rule of `config.py` checked) and, by `dump_recipe`, the
fully resolved YAML. Order, later wins: the dataclass defaults, the chain of parents named by `defaults:` (root first), the recipe, the
overrides. Each value remembers which of these set it, and errors name that place.

`???` marks a value that a child or an override must give. Values are literal: `${...}` is refused, so that no environment variable can
reach a dumped recipe. Left out: rules that need the model's dimensions.
"""

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jetrl_megatron.config import Arm, Recipe

MISSING = "???"
_Leaves = dict[str, tuple[Any, str]]
"""Dotted key -> (value, who set it)."""


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe with its parents and overrides.

    path: the YAML file. overrides: words `section.key=value`; a value of a text key is taken as it is (unless quoted), any other is YAML.
    Raises ValueError naming key, value, what is allowed, the file and the way out; FileNotFoundError where the file does not exist.
    An empty `run.dir` becomes `runs/<stem>` with what the overrides changed, see `default_run_dir`.
    """
    recipe_path = Path(path)
    words = list(overrides or [])
    leaves: _Leaves = {}
    for file, tree in _chain(recipe_path):
        leaves |= _flatten(tree, str(file), skip=("defaults",))
    command_line: _Leaves = {}
    for word in words:
        command_line |= _parse_override(word)
    leaves |= command_line
    _refuse_missing(leaves)
    recipe = _build(leaves, recipe_path)
    if recipe.run.dir:
        return recipe
    changed = {key: value for key, (value, _) in command_line.items()}
    directory = default_run_dir(recipe_path.stem, recipe.precision.arm, changed)
    return replace(recipe, run=replace(recipe.run, dir=directory))


def dump_recipe(recipe: Recipe) -> str:
    """Give the recipe as YAML with every key; `load_recipe` reads it back to an equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def flat_recipe(recipe: Recipe) -> dict[str, Any]:
    """Give the recipe as dotted key -> plain value (enums by name, tuples as lists), for comparing two runs."""
    flat: dict[str, Any] = {}
    for key in schema():
        value = functools.reduce(getattr, key.split("."), recipe)
        flat[key] = value.name if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
    return flat


@functools.cache
def schema() -> Mapping[str, Any]:
    """Give every legal dotted key with its type annotation, in the order of the dataclasses."""
    return types.MappingProxyType(dict(_schema_of(Recipe, "")))


def default_run_dir(stem: str, arm: Arm, changed: dict[str, Any]) -> str:
    """Name the run directory of a recipe that sets none, so that two different runs never share one.

    stem: the recipe file's, whose trailing arm is replaced by `arm`. changed: overrides, appended unless they only lengthen or log the run.
    """
    for other in Arm:
        if stem.endswith("-" + other.value):
            stem = stem.removesuffix("-" + other.value) + "-" + arm.value
    parts = [f"{key}={_plain(value)}" for key, value in sorted(changed.items()) if not may_change(key) and key != "precision.arm"]
    name = "+".join([stem, *parts])
    return "runs/" + "".join(c if c.isalnum() or c in "._=+-," else "_" for c in name)[:200]


def may_change(key: str) -> bool:
    """Say whether a key may differ between two starts of one run: it sets how long, how often saved, where and what logged."""
    free = ("dir", "steps", "eval_every", "save_every", "keep_last", "export_hf", "tensorboard", "wandb", "grace_s")
    return key in {f"run.{name}" for name in free}


def _plain(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _schema_of(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _schema_of(hint, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", hint


def _chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Files from the root parent to `path`, each with its content."""
    chain = [(path, _read(path))]
    while True:
        child, tree = chain[0]
        parent = tree.get("defaults")
        if parent is None:
            return chain
        if not isinstance(parent, str):
            raise ValueError(f"{child}: defaults is {parent!r}; it must be the name of one recipe, for example `defaults: _base`")
        file = child.parent / (parent if parent.endswith(".yaml") else parent + ".yaml")
        if not file.is_file():
            raise ValueError(f"{child}: defaults names {parent!r}, but {file} does not exist; name a recipe beside this one")
        if file.resolve() in [known.resolve() for known, _ in chain]:
            names = " -> ".join([*(known.name for known, _ in reversed(chain)), file.name])
            raise ValueError(f"{child}: defaults names {parent!r}, which closes a circle ({names}); remove one of these lines")
        chain.insert(0, (file, _read(file)))


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.yaml"))
        name = "recipe.yaml" if "recipe.yaml" in inside else inside[0] if inside else "NAME.yaml"
        raise ValueError(f"recipe {path} is a directory; name a YAML file, for example {path / name}")
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"recipe {path} is a link to {path.readlink()}, which does not exist; mend the link")
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=3, cutoff=0.3)
        hint = f"; did you mean {', '.join(str(path.parent / n) for n in near)}?" if near else ""
        raise FileNotFoundError(f"recipe {path} does not exist{hint}")
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a recipe that can") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if plain == {}:
        raise ValueError(
            f"{path} is empty; a recipe says at least `defaults: _base`. If it is the recipe.yaml of a run, put its content back, "
            "or remove that run directory and start over"
        )
    if not isinstance(plain, dict):
        raise ValueError(f"{path} holds a {type(plain).__name__}; a recipe is a mapping such as `run: {{steps: 10}}`")
    return {str(key): value for key, value in plain.items()}


def _flatten(tree: dict[str, Any], source: str, skip: tuple[str, ...] = (), prefix: str = "") -> _Leaves:
    """Turn nested keys into dotted ones and refuse keys that no dataclass has."""
    leaves: _Leaves = {}
    known = schema()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in skip:
            continue
        section = any(k.startswith(key + ".") for k in known)
        if key not in known and not section:
            raise ValueError(f"{source}: unknown key {key!r} (value {value!r}); {_nearest(key, known)}")
        if not section:
            leaves[key] = (value, source)
        elif isinstance(value, dict):
            leaves |= _flatten(value, source, skip, key + ".")
        else:
            inside = ", ".join(k for k in known if k.startswith(key + "."))
            raise ValueError(f"{source}: {key} is a section, but its value is {value!r}; set one of its keys: {inside}")
    return leaves


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, list(known), n=3, cutoff=0.6)
    leaf = key.rsplit(".", 1)[-1]
    near += [k for k in known if k.rsplit(".", 1)[-1] == leaf and k not in near]
    if near:
        return f"did you mean {' or '.join(near)}?"
    section = key.split(".", 1)[0]
    inside = [k for k in known if k.startswith(section + ".")]
    if inside:
        return f"{section} has: {', '.join(inside)}"
    return f"sections are: {', '.join(dict.fromkeys(k.split('.', 1)[0] for k in known))}; recipes/_base.yaml lists every key"


def _parse_override(word: str) -> _Leaves:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ValueError(f"command line: {word!r} is not key=value; write for example run.steps=10")
    source = f"command line ({word})"
    value: Any = text
    if schema().get(key) is not str or text[:1] in ('"', "'"):
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
        except (YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{source}: the value {text!r} is not valid YAML: {error}") from error
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return _flatten(tree, source)


def _refuse_missing(leaves: _Leaves) -> None:
    for key, (value, source) in leaves.items():
        if value == MISSING or (isinstance(value, list) and MISSING in value):
            example = "[NAME_OR_FILE]" if "tuple" in str(schema()[key]) else "VALUE"
            raise ValueError(f"{source}: {key} has no value ({MISSING}: it must be given); add {key}={example} or set it in the recipe")


def _build(leaves: _Leaves, path: Path) -> Recipe:
    for key, (value, source) in leaves.items():
        if "${" in str(value):
            raise ValueError(f"{source}: {key} is {value!r}; ${{...}} is not expanded in recipes: write the value itself")
        hint = schema()[key]
        no_list = isinstance(value, dict) and typing.get_origin(hint) is tuple
        if no_list or (isinstance(value, list) and not all(isinstance(item, str) for item in value)):
            raise ValueError(f"{source}: {key} is {value!r}; it must be {_allowed(key, hint)}")
    tree: dict[str, Any] = {}
    for key, (value, _) in leaves.items():
        section, name = tree, key
        while "." in name:
            head, name = name.split(".", 1)
            section = section.setdefault(head, {})
        section[name] = value
    try:
        recipe = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), tree))
    except OmegaConfBaseException as error:
        key = str(error.full_key).split("[", 1)[0]
        assert key in leaves, (key, str(error))
        value, source = leaves[key]
        message = f"{source}: {key} is {value!r} ({type(value).__name__}); it must be {_allowed(key, schema()[key])}"
        raise ValueError(message) from error
    except ValueError as error:
        named = [source for key, (_, source) in leaves.items() if key in str(error)]
        raise ValueError(f"{', '.join(dict.fromkeys(named)) or path}: {error}") from error
    assert isinstance(recipe, Recipe)
    return recipe


def _allowed(key: str, hint: Any) -> str:
    """Say in words what a key takes, with an example."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if isinstance(hint, types.UnionType):
        return " or ".join("null" if part is type(None) else _allowed(key, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of text; write {key}=[a,b] on the command line"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words[hint]
