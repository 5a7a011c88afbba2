"""What the files of sentence-transformers say of their modules: honoured, without effect on vectors, or refused.

The sets below name every key that its releases read; a test walks the keys of the release that is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sie_core import ModelSourceInvalid

from sie_adapters_torch._json import read_object

__all__ = ["TransformerFile", "check_keys", "check_place", "read_transformer"]

_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")

_READ = frozenset(("max_seq_length", "do_lower_case", "query_length", "document_length", "query_expansion"))
_ABOUT_OUTPUT = frozenset(("transformer_task", "modality_config", "module_output_name"))
_NO_EFFECT = frozenset(("unpad_inputs", "backend"))
# Arguments of transformers, by the old and the new name; what is listed changes no vector, or is read. Precision and
# attention are the options' business.
_MODEL = frozenset(
    "attn_implementation torch_dtype dtype device_map low_cpu_mem_usage use_safetensors add_pooling_layer use_cache "
    "trust_remote_code revision code_revision".split()
)
_TOKENIZER = frozenset("model_max_length padding_side use_fast trust_remote_code revision".split())
_CONFIG = frozenset("use_cache trust_remote_code revision".split())
_ARGUMENTS = {
    "model_args": _MODEL, "model_kwargs": _MODEL, "tokenizer_args": _TOKENIZER, "processor_kwargs": _TOKENIZER,
    "config_args": _CONFIG, "config_kwargs": _CONFIG,
}  # fmt: skip
_OTHER_INPUTS = frozenset(("image", "audio", "video", "chat_template"))
"""Parts of ``processing_kwargs`` that are not about plain text."""


class TransformerFile:
    """``sentence_bert_config.json``, or what it is called for other models.

    ``max_length``: tokens an input may have, ``None``: not said. ``lower_case``: texts are lowercased first.
    """

    def __init__(self, file: Path, content: Mapping[str, Any]) -> None:
        self.file = file
        self.content = content
        _check_transformer(file, content)
        given = [content.get("max_seq_length")]
        given += [(content.get(name) or {}).get("model_max_length") for name in ("tokenizer_args", "processor_kwargs")]
        # The tokenizer's own argument wins.
        self.max_length = next((n for n in reversed(given) if isinstance(n, int) and not isinstance(n, bool)), None)
        self.lower_case = content.get("do_lower_case") is True

    def check(self, task: str, gives: str, output: str, *, lengths: bool = False, adapter: str) -> None:
        """Refuse a Transformer that does something else than ``task``, ``gives`` from a ``output`` of transformers.

        ``lengths``: whether the family reads lengths of queries and documents. Raises ModelSourceInvalid.
        """
        said = self.content
        if said.get("transformer_task", "feature-extraction") != task:
            raise self._refused("transformer_task", adapter)
        modalities = said.get("modality_config")
        if modalities is not None:
            text = modalities.get("text") if isinstance(modalities, dict) else None
            if text != {"method": "forward", "method_output_name": output}:
                raise self._refused("modality_config", adapter)
        if said.get("module_output_name") not in (None, gives):
            raise self._refused("module_output_name", adapter)
        for key in () if lengths else ("query_length", "document_length", "query_expansion"):
            if said.get(key) is not None:
                raise self._refused(key, adapter)

    def _refused(self, key: str, adapter: str) -> ModelSourceInvalid:
        return ModelSourceInvalid(f"{self.file}: {key} is {self.content.get(key)!r}, which {adapter} does not support")


def read_transformer(folder: Path) -> TransformerFile:
    """The first of these files that says something. Raises ModelSourceInvalid."""
    for kind in _KINDS:
        file = folder / f"sentence_{kind}_config.json"
        if content := read_object(file):
            return TransformerFile(file, content)
    return TransformerFile(folder / "sentence_bert_config.json", {})


def _check_transformer(file: Path, content: Mapping[str, Any]) -> None:
    check_keys(file, content, (*_READ, *_ABOUT_OUTPUT, *_NO_EFFECT, *_ARGUMENTS), empty=True)
    for name, harmless in _ARGUMENTS.items():
        check_keys(file, _object(file, name, content.get(name)), harmless, inside=f"{name}.")
    given = _object(file, "processing_kwargs", content.get("processing_kwargs"))
    check_keys(file, given, _OTHER_INPUTS, inside="processing_kwargs.", empty=True)


def check_keys(
    file: Path, content: Mapping[str, Any], known: Iterable[str], *, inside: str = "", empty: bool = False
) -> None:
    """Refuse keys of a file that are not ``known``. ``empty``: unless their value says nothing. ModelSourceInvalid."""
    unknown = content.keys() - frozenset(known)
    for key in sorted(unknown):
        if not (empty and content[key] in (None, {}, [])):
            raise ModelSourceInvalid(f"{file}: {inside}{key} is {content[key]!r}, which is not supported")


def check_place(file: Path, content: Mapping[str, Any], works_on: str, adapter: str) -> None:
    """Refuse a module that reads or writes something else than ``works_on``. Raises ModelSourceInvalid."""
    places = (content.get("module_input_name"), content.get("module_output_name"))
    if any(place not in (None, works_on) for place in places):
        raise ModelSourceInvalid(
            f"{file}: module_input_name and module_output_name are {places}; {adapter} supports {works_on} only"
        )


def _object(file: Path, name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ModelSourceInvalid(f"{file}: {name} must be a JSON object, not {value!r}")
    return value or {}
