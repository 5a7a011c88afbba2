"""What a model folder says about its model, read without torch: what all families share.

The files are those of transformers (``config.json``, ``*.safetensors``) and, where present, of sentence-transformers
(``modules.json`` and what it names). Anything that would change the vectors and is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from sie_core import ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._json import read_json, read_object
from sie_adapters_torch._options import LoadOptions, TextOptions
from sie_adapters_torch._st_files import TransformerFile, read_transformer

__all__ = [
    "ModelFiles",
    "Prompts",
    "inside",
    "limited",
    "positions_of",
    "read_model",
    "read_modules",
    "read_prompts",
    "read_weights",
]


@frozen(eq=False)
class ModelFiles:
    """A transformers model: the folder with its ``config.json``, that file, and where its weights are.

    ``weights`` lists the safetensors shards; ``pickled`` is set when there are only ``*.bin`` files. Neither: the
    weights are not on this machine yet.
    ``max_length``: tokens an input may have, as far as the files say.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    max_length: int | None
    transformer: TransformerFile | None = None
    """What sentence-transformers has to say of it; ``None``: its files are not that library's."""

    @property
    def lower_case(self) -> bool:
        """Whether texts are lowercased before the tokenizer's own steps."""
        return self.transformer is not None and self.transformer.lower_case

    @property
    def text_config(self) -> Mapping[str, Any]:
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def hidden_size(self) -> int:
        for key in ("hidden_size", "d_model", "dim", "n_embd"):
            if isinstance(self.text_config.get(key), int):
                return int(self.text_config[key])
        raise ModelSourceInvalid(f"{self.folder / 'config.json'} names no hidden_size")


@frozen
class Prompts:
    """Texts put before an input: ``named`` by name; ``query`` and ``document`` as resolved; ``default`` for requests
    that don't say what they hold, ``None``: that of documents."""

    named: Mapping[str, str]
    query: str
    document: str
    default: str | None = None

    def of(self, is_query: bool | None) -> str:
        """The one for a request without an instruction."""
        if is_query is None and self.default is not None:
            return self.default
        return self.query if is_query else self.document


def inside(folder: Path, name: object, file: Path) -> Path:
    """A path that a file of the model names, which may not lead out of the model's folder: ModelSourceInvalid."""
    path = Path(str(name))
    if not isinstance(name, str) or path.is_absolute() or ".." in path.parts:
        raise ModelSourceInvalid(f"{file} names {name!r}, which is not inside the model's folder")
    return folder / path


LORA_CONFIG = "adapter_config.json"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 2000  # making them comes before reading them, and would fill the memory


# --- the transformers part -------------------------------------------------------------------------


def read_model(folder: Path, options: LoadOptions, *, weights_needed: bool = True) -> ModelFiles:
    """Read a transformers model's folder. Raises ModelSourceInvalid, UnsafeSource."""
    config = read_object(folder / "config.json")
    if config is None:
        raise ModelSourceInvalid(f"{folder} holds no config.json: it is no transformers model")
    if not isinstance(config.get("model_type"), str):
        # Some releases of transformers would then guess from the folder's name.
        raise ModelSourceInvalid(f"{folder / 'config.json'} names no model_type")
    for key in _LAYERS:
        if isinstance(config.get(key), int) and config[key] > _MOST_LAYERS:
            raise ModelSourceInvalid(f"{folder / 'config.json'}: {key} is {config[key]}, which no model has")
    weights, pickled = read_weights(folder, options, needed=weights_needed)
    transformer = read_transformer(folder)
    return ModelFiles(folder, config, weights, pickled, _max_length(folder, config, transformer), transformer)


def read_weights(folder: Path, options: LoadOptions, *, needed: bool) -> tuple[tuple[Path, ...], bool]:
    """The shards of the weights, and whether they are pickled instead. Raises ModelSourceInvalid, UnsafeSource."""
    if (folder / LORA_CONFIG).exists():
        # transformers would put it into the model where peft is installed, and say nothing.
        raise ModelSourceInvalid(
            f"{folder} holds {LORA_CONFIG}, a LoRA adapter among the model's own files: move it to a folder of its own "
            "and name that under lora, or delete it"
        )
    weights, pickled = _weights(folder, needed=needed)
    if pickled and not options.allow_pickle:
        raise UnsafeSource(
            f"{folder} has only pickled weights (*.bin), which can run code when read: use a safetensors "
            "version of the model, or set allow_pickle: true"
        )
    return weights, pickled


def _weights(folder: Path, *, needed: bool) -> tuple[tuple[Path, ...], bool]:
    single = folder / "model.safetensors"
    if single.exists():
        return (single,), False
    index_file = folder / "model.safetensors.index.json"
    index = read_object(index_file)
    if index is not None:
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelSourceInvalid(f"{index_file} has no weight_map")
        shards = tuple(inside(folder, name, index_file) for name in sorted(set(names.values()), key=str))
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing and not needed:
            return (), False
        if missing:
            raise ModelSourceInvalid(f"{folder} lacks {len(missing)} of {len(shards)} weight files: {missing[0]}, …")
        return shards, False
    pickles = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if any((folder / name).exists() for name in pickles):
        return (), True
    if not needed:
        return (), False
    raise ModelSourceInvalid(f"{folder} holds no model.safetensors")


def _max_length(folder: Path, config: Mapping[str, Any], transformer: TransformerFile) -> int | None:
    """As sentence-transformers does: its own file, else the smaller of the tokenizer's and the model's limit."""
    if transformer.max_length is not None:
        return min(transformer.max_length, _rows(config) or transformer.max_length)
    tokenizer = read_object(folder / "tokenizer_config.json") or {}
    limits = [tokenizer.get("model_max_length"), positions_of(config)]
    # Tokenizers without a limit write 1e30.
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 10**9]
    return min(known) if known else None


_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer")


_TABLES = ("bert", "distilbert", "electra", "albert", *_OFFSET_POSITIONS)


def _rows(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model with a table of positions has rows for: a longer text would fail, whatever else files say."""
    return positions_of(config) if config.get("model_type") in _TABLES else None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model has positions for, as far as its files tell: loading it shows whether there are fewer."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:
        return None
    if config.get("model_type") in _OFFSET_POSITIONS and isinstance(config.get("pad_token_id"), int):
        return positions - int(config["pad_token_id"]) - 1
    return positions


def read_prompts(folder: Path, options: TextOptions) -> tuple[Prompts, Mapping[str, Any]]:
    """Prompts, the options' over the files', and the rest of sentence-transformers' own configuration."""
    file = folder / "config_sentence_transformers.json"
    about = read_object(file) or {}
    in_files = about.get("prompts") or {}
    if not isinstance(in_files, dict) or not all(isinstance(text, str | None) for text in in_files.values()):
        raise ModelSourceInvalid(f"{file}: prompts must map names to texts")
    named = {str(name): text or "" for name, text in in_files.items()} | dict(options.prompts)
    chosen = about.get("default_prompt_name")
    if chosen is not None and chosen not in named:
        raise ModelSourceInvalid(f"{file}: default_prompt_name is {chosen!r}, and the prompts are {sorted(named)}")
    default = named.get(chosen or "", "")

    def first(*names: str) -> str:
        # An empty prompt counts as set: it keeps the default one away, as in sentence-transformers.
        return next((named[name] for name in names if name in named), default)

    query = options.query_prompt if options.query_prompt is not None else first("query")
    document = options.document_prompt
    if document is None:
        document = first("document", "passage", "corpus")
    # As in sentence-transformers, whose encode() takes the default prompt and encode_document() the documents' own.
    plain = default if chosen is not None and options.document_prompt is None else None
    return Prompts(named, query, document, plain), about


def limited(model: ModelFiles, max_length: int | None) -> ModelFiles:
    """The model with the limit that the options set, if they do. Raises ModelSourceInvalid."""
    if not max_length:
        return model
    positions = positions_of(model.text_config)
    if positions is not None and positions < max_length:
        raise ModelSourceInvalid(f"max_length is {max_length}, and the model has {positions} positions")
    return evolve(model, max_length=max_length)


# --- modules of sentence-transformers ----------------------------------------------------------------


def read_modules(
    folder: Path, known: Sequence[str], *, adapter: str, libraries: Sequence[str] = ("sentence_transformers",)
) -> list[tuple[str, Path]] | None:
    """The names and folders of the steps in ``modules.json``; ``None`` without one. The first is the encoder.

    Raises ModelSourceInvalid, and UnsafeSource for classes that are not those libraries' own.
    """
    file = folder / "modules.json"
    modules = read_json(file)
    if modules is None:
        return None
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise ModelSourceInvalid(f"{file} lists no modules")
    steps = []
    for module in modules:
        kind, path = str(module.get("type", "")), module.get("path", "")
        if kind.partition(".")[0] not in libraries or "." not in kind:
            raise UnsafeSource(f"{file} asks for {kind!r}, code of the model's own; {adapter} can't run it")
        name = kind.rpartition(".")[2]
        if name not in known:
            raise ModelSourceInvalid(f"{file} asks for a {name} module; {adapter} knows {', '.join(known)}")
        steps.append((name, inside(folder, path, file)))
    return steps
