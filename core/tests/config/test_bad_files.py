"""Every kind of mistake that a file can hold, with the place and the words that its author gets to see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from sie_core.config import load_config
from sie_core.errors import ConfigError

Write = Callable[[str], Path]

MODEL = "models:\n- {name: a, adapter: x, %s}\n"

BAD = [
    # --- no YAML, or not one document with keys
    ("", ["1:1: the file is empty"]),
    ("# only a remark\n\n", ["1:1: the file is empty"]),
    ("- a\n- b\n", ["1:1: expected a mapping with keys such as models:, found a list"]),
    ("just a text\n", ["1:1: expected a mapping with keys such as models:, found the text 'just a text'"]),
    ("server:\n\tport: 1\n", ["2:1: not valid YAML: found character that cannot start any token (is line 2 indented"]),
    ("server: {}\n---\nserver: {}\n", ["2:1: a second document starts here"]),
    ("server: {port: 1\n", ["2:1: not valid YAML: did not find expected"]),
    ("a: b: c\n", ["1:5: not valid YAML: mapping values are not allowed"]),
    ("server: *nowhere\n", ["1:9: not valid YAML: this alias (*name) has no anchor"]),
    ("server: {host: 'a\x07b'}\n", ["1:18: the character 0x0007 is not allowed"]),
    ("models: &a [*a]\n", ["1:9: this alias contains itself"]),
    ("models: " + "[" * 200 + "]" * 200 + "\n", ["1:108: is nested more than 100 levels deep"]),
    ("models: " + "[" * 100_000 + "\n", ["not valid YAML: exceeded maximum nesting depth"]),
    # --- keys
    ("memroy: {}\n", ["1:1: memroy: unknown key 'memroy', did you mean memory?"]),
    ("port: 80\n", ["1:1: port: unknown key 'port', did you mean server.port?"]),
    ("zzz: 1\n", ["1:1: zzz: unknown key 'zzz'; there is server, memory"]),
    ("server: {prot: 80}\n", ["1:10: server.prot: unknown key 'prot', did you mean port?"]),
    ("server:\n  port: 1\n  port: 2\n", ["3:3: server.port: the key 'port' stands here twice (first in line 2)"]),
    ("server: {}\nserver: {}\n", ["2:1: server: the key 'server' stands here twice"]),
    ("on: 1\n", ["1:1: a key must be text, and this is a boolean (on is one in YAML): put it"]),
    ("2024-01-01: 1\n", ["1:1: a key must be text, and this is 2024-01-01, which YAML takes for a date: put it in q"]),
    ("0x10: 1\n", ["1:1: a key must be text, and this is 0x10, which YAML takes for a number (octal or another base"]),
    ("? [a]\n: 1\n", ["1:3: a key must be text, and this is a list"]),
    ("server:\n  <<: 7\n", ["2:3: server: << merges mappings"]),
    ("server: {}\nserver: {}\n1: x\n", ["2:1: server: the key", "3:1: a key must be text, and this is the number 1"]),
    # --- types
    ("server: {port: '80'}\n", ["1:10: server.port: expected a whole number or null, found the text '80'; remove the"]),
    ("server: {port: 80.5}\n", ["1:10: server.port: expected a whole number or null, found the number 80.5"]),
    ("server: {port: true}\n", ["1:10: server.port: expected a whole number or null, found the boolean true"]),
    (
        "server: {port: 010}\n",
        ["1:10: server.port: expected a whole number or null, found 010, which YAML takes for a"],
    ),
    (
        "server: {port: 0x50}\n",
        ["1:10: server.port: expected a whole number or null, found 0x50, which YAML takes for"],
    ),
    (
        "server: {port: 12:30:00}\n",
        ["1:10: server.port: expected a whole number or null, found 12:30:00, which YAML ta"],
    ),
    ("server: {port: 99999}\n", ["1:10: server.port: must be from 0 to 65535, and is 99999"]),
    ("server: {port: -1}\n", ["1:10: server.port: must be from 0 to 65535, and is -1"]),
    ("server: {port: [80]}\n", ["1:10: server.port: expected a whole number or null, found a list"]),
    (
        "server: {port: !!python/name:os.system 1}\n",
        ["1:10: server.port: expected a whole number or null, found the YA"],
    ),
    (
        "models: !mine [a]\n",
        ["1:1: models: expected a list of models, found the YAML tag '!mine', which means nothing"],
    ),
    ("server: {host: =}\n", ["1:10: server.host: expected text, found =, which has a meaning of its own in YAML"]),
    ("server: !mine {port: 1}\n", ["1:1: server: expected a mapping (keys with values), found the YAML tag '!mine'"]),
    ("server: {host: 12:30:00}\n", ["1:10: server.host: expected text, found 12:30:00, which YAML takes for a number"]),
    (
        "server: {host: 2024-01-01}\n",
        ["1:10: server.host: expected text, found 2024-01-01, which YAML takes for a dat"],
    ),
    ("server: {host: 7}\n", ["1:10: server.host: expected text, found the number 7; put it in quotes"]),
    ("server: {host: }\n", ["1:10: server.host: expected text, found nothing (null)"]),
    ("server: {host: ''}\n", ["1:10: server.host: must be an address or a host name"]),
    ("server: {max_items: 0}\n", ["1:10: server.max_items: must be at least 1, and is 0"]),
    (
        "server: {allow_insecure_bind: 1}\n",
        ["1:10: server.allow_insecure_bind: expected true or false, found the numb"],
    ),
    ("server: {allow_insecure_bind: 'true'}\n", ["expected true or false, found the text 'true'; write true or false"]),
    ("server: {drain_s: .nan}\n", ["1:10: server.drain_s: must be a finite number, and is nan"]),
    ("server: {drain_s: .inf}\n", ["1:10: server.drain_s: must be a finite number, and is inf"]),
    ("server: {drain_s: 1e999}\n", ["1:10: server.drain_s: must be a finite number, and is inf"]),
    ("server: {drain_s: -1}\n", ["1:10: server.drain_s: must be from 0 to 86400, and is -1"]),
    ("server: {drain_s: ten}\n", ["1:10: server.drain_s: expected a number, found the text 'ten'"]),
    ("server: 7\n", ["1:1: server: expected a mapping (keys with values), found the number 7"]),
    (
        "server: {api_keys_file: ~nobody-here/keys}\n",
        ["1:10: server.api_keys_file: Could not determine home directory"],
    ),
    ("server: {api_keys_file: 7}\n", ["1:10: server.api_keys_file: expected a path or null, found the number 7"]),
    ("memory: {host_cache_bytes: 8G}\n", ["1:10: memory.host_cache_bytes: '8G' is read both ways: write 8GiB"]),
    ("memory: {host_cache_bytes: atuo}\n", ["'atuo' is not a size", "did you mean auto?"]),
    ("memory: {host_cache_bytes: 1.5}\n", ["expected 'auto' or a size such as 8GiB, found the number 1.5"]),
    (
        "memory: {host_cache_bytes: off}\n",
        ["1:10: memory.host_cache_bytes: expected 'auto' or a size", "off is one in YA"],
    ),
    ("memory: {host_floor: -1}\n", ["1:10: memory.host_floor: a size can't be negative, and this is -1"]),
    ("memory: {idle_evict_s: 0}\n", ["1:10: memory.idle_evict_s: must be more than 0 s, and is 0: write null"]),
    ("memory: {run_permits: on}\n", ["expected a whole number, found a boolean (on is one in YAML"]),
    (
        "telemetry: {log_level: warn}\n",
        ["1:13: telemetry.log_level: expected one of debug, info, warning, error, found th"],
    ),
    ("telemetry: {log_level: warn}\n", ["did you mean warning?"]),
    (
        "telemetry: {otlp_endpoint: 7}\n",
        ["1:13: telemetry.otlp_endpoint: expected text or null, found the number 7; put it"],
    ),
    ("telemetry: {otlp_endpoint: localhost}\n", ["1:13: telemetry.otlp_endpoint: must be an address such as http"]),
    (
        "telemetry: {prometheus: maybe}\n",
        ["1:13: telemetry.prometheus: expected true or false, found the text 'maybe'"],
    ),
    # --- models
    ("models: {}\n", ["1:1: models: expected a list of models, found a mapping"]),
    ("models:\n", ["1:1: models: expected a list of models, found nothing (null); write [] for none"]),
    ("models: [a]\n", ["1:10: models[0]: expected a model (name, adapter, source, ...), found the text 'a'"]),
    ("models:\n- {adapter: x}\n", ["2:3: models[0].name: is missing; expected text"]),
    ("models:\n- name: a\n", ["2:3: models[0].adapter: is missing; expected text"]),
    (
        "models:\n- {name: 1.5, adapter: x}\n",
        ["2:4: models[0].name: expected text, found the number 1.5; put it in quo"],
    ),
    (
        "models:\n- {name: no, adapter: x}\n",
        ["2:4: models[0].name: expected text, found a boolean (no is one in YAML); put it"],
    ),
    ("models:\n- {name: '', adapter: x}\n", ["2:4: models[0].name: a model needs a name"]),
    ("models:\n- {name: a b, adapter: x}\n", ["2:4: models[0].name: the name 'a b' holds ' '"]),
    ("models:\n- {name: größe, adapter: x}\n", ["2:4: models[0].name: the name 'größe' holds 'ö'"]),
    ("models:\n- {name: /a, adapter: x}\n", ["starts or ends with a slash"]),
    ("models:\n- {name: a/, adapter: x}\n", ["starts or ends with a slash"]),
    # C5: park, wake and pin of such a model would go to a LoRA adapter of another
    ("models:\n- {name: m/loras/x, adapter: x}\n", ["has a part 'loras'", "addresses of LoRA adapters"]),
    ("models:\n- {name: m/loras, adapter: x}\n", ["has a part 'loras'"]),
    ("models:\n- {name: m, adapter: x, lora: {a/loras/b: 'path:/x'}}\n", ["has a part 'loras'"]),
    ("models:\n- {name: a//b, adapter: x}\n", ["starts or ends with a slash, or has two in a row"]),
    ("models:\n- {name: a/../b, adapter: x}\n", ["has a part that is . or .."]),
    ("models:\n- {name: %s, adapter: x}\n" % ("n" * 256), ["a name has 255 characters at most, and this has 256"]),
    (
        "models:\n- {name: a, adapter: x}\n- {name: a, adapter: x}\n",
        ["3:4: models[1].name: the model 'a' stands here twi"],
    ),
    (
        "models:\n- {name: a/b, adapter: x}\n- {name: a__b, adapter: x}\n",
        ["3:4: models[1].name: the names 'a/b' and 'a_"],
    ),
    (
        MODEL % "dtype: float16",
        ["2:25: models[0].dtype: unknown key 'dtype'; settings of the adapter stand under options"],
    ),
    (MODEL % "pined: true", ["2:25: models[0].pined: unknown key 'pined', did you mean pinned?"]),
    (MODEL % "adapter: y", ["2:25: models[0].adapter: the key 'adapter' stands here twice (first in line 2)"]),
    (MODEL % "source: bge-m3", ["2:25: models[0].source: 'bge-m3' is not a model source"]),
    (MODEL % "source: 7", ["2:25: models[0].source: expected text or null, found the number 7"]),
    (MODEL % "source: 'package:x/../y'", ["2:25: models[0].source: 'package:x/../y' would leave its package"]),
    # E5: few bytes are a unit that was forgotten, and amounts do not carry their unit in their names
    (
        MODEL % "runtime_headroom: 4",
        ["2:25: models[0].runtime_headroom: must be 0 or at least 1MiB, and is 4 bytes: did you mean 4GiB?"],
    ),
    (MODEL % "runtime_headroom: 512KiB", ["2:25: models[0].runtime_headroom: must be 0 or at least 1MiB"]),
    (MODEL % "runtime_headroom_gib: 4", ["2:25: models[0].runtime_headroom_gib: unknown key 'runtime_headroom_gib': "]),
    (MODEL % "runtime_headroom_gib: 4", ["write runtime_headroom: 4GiB"]),
    ("memory: {host_floor: 2}\n", ["1:10: memory.host_floor: must be 0 or at least 1MiB, and is 2 bytes"]),
    ("memory: {host_cache_bytes: 16}\n", ["memory.host_cache_bytes: ", "did you mean 16GiB?"]),
    ("memory: {device_reserve: 1}\n", ["memory.device_reserve: ", "did you mean 1GiB?"]),
    ("memory: {emulate_device: 24}\n", ["memory.emulate_device: ", "did you mean 24GiB?"]),
    (
        "memory: {host_cache_gb: 8}\n",
        ["memory.host_cache_gb: unknown key 'host_cache_gb', did you mean host_cache_bytes?"],
    ),
    ("compute: {device: gpu}\n", ["compute.device: 'gpu' is not a device: write cpu, cuda:N or emulated:N"]),
    (MODEL % "device: gpu", ["2:25: models[0].device: 'gpu' is not a device: write cpu, cuda:N or emulated:N"]),
    (MODEL % "device: cuda", ["2:25: models[0].device: 'cuda' is not a device (did you mean cuda:0?)"]),
    (MODEL % "device: 'cuda:01'", ["2:25: models[0].device: 'cuda:01' is not a device"]),
    (
        MODEL % "wake_check: allways",
        ["2:25: models[0].wake_check: expected one of auto, first, always, never", "mean always?"],
    ),
    (MODEL % "idle_evict_s: 0", ["2:25: models[0].idle_evict_s: must be more than 0 s"]),
    (MODEL % "min_resident_s: -1", ["2:25: models[0].min_resident_s: must be at least 0 s"]),
    (MODEL % "queue: 0", ["2:25: models[0].queue: must be at least 1"]),
    (MODEL % "deadline_s: 0", ["2:25: models[0].deadline_s: must be more than 0 s"]),
    (MODEL % "batch_tokens: 0", ["2:25: models[0].batch_tokens: must be at least 1"]),
    (MODEL % "runtime_headroom: lots", ["2:25: models[0].runtime_headroom: 'lots' is not a size"]),
    (MODEL % "host_offload: 'no'", ["2:25: models[0].host_offload: expected true or false, found the text 'no'"]),
    (MODEL % "lora: [a]", ["2:25: models[0].lora: expected a mapping (keys with values), found a list"]),
    (MODEL % "lora: {a b: 'path:x', c: y, d: 1}", ["2:32: models[0].lora.a b: the name 'a b' holds"]),
    (MODEL % "lora: {a b: 'path:x', c: y, d: 1}", ["2:47: models[0].lora.c: 'y' is not a model source"]),
    (MODEL % "lora: {a b: 'path:x', c: y, d: 1}", ["2:53: models[0].lora.d: expected text, found the number 1"]),
    (MODEL % "options: 7", ["2:25: models[0].options: expected a mapping (keys with values), found the number 7"]),
    (MODEL % "options: {a: 1, a: 2}", ["2:41: models[0].options.a: the key 'a' stands here twice"]),
    (
        MODEL % "options: {when: [2024-01-01]}",
        ["2:42: models[0].options.when[0]: found 2024-01-01, which YAML takes for"],
    ),
    (MODEL % "options: {1: a}", ["2:35: models[0].options: a key must be text, and this is the number 1"]),
]


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[text[:60] for text, _ in BAD])
def test_a_bad_file(text: str, expected: list[str], write: Write) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    message = str(caught.value)
    for part in expected:
        assert part in message
        if part[:1].isdigit():
            assert f"sie.yaml:{part}" in message


@pytest.mark.parametrize("key", ["2024-01-01", "0x10", "12:30:00", "7", "yes", "="])
def test_what_to_do_about_a_key_is_said_once(key: str, write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(f"{key}: 1\n"), environ={})
    assert str(caught.value).count("put it in quotes") == 1


@pytest.mark.parametrize(("text", "expected"), [entry for entry in BAD if "[[[" not in entry[0]][::4])
def test_a_bad_file_without_the_fast_parser(
    text: str, expected: list[str], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyYAML may come without libyaml; its own parser words syntax errors otherwise, and knows the same places."""
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), environ={})
    message = str(caught.value)
    for part in expected:
        if "not valid YAML" not in part:
            assert part in message


def test_deep_nesting_without_the_fast_parser(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    path = write("models: " + "[" * 20_000 + "]" * 20_000 + "\n")
    with pytest.raises(ConfigError, match=r"sie\.yaml: is nested too deeply"):
        load_config(path, environ={})


def test_all_problems_come_at_once_and_in_the_order_of_the_file(write: Write) -> None:
    path = write(
        """\
        server: {port: x, prot: 1, max_items: 0}
        nonsense: 1
        memory: {run_permits: 0}
        models:
        - name: a
          adapter: x
          queue: 0
          idle_evict_s: -1
          source: nowhere
        - adapter: x
        - name: a
          adapter: x
          pinned: 1
          pinned: 2
        """
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={"SIE_DRAIN_S": "soon"}, flags={"--log-level": "loud"})
    found = [(p.file, p.line, p.column, p.path) for p in caught.value.problems]
    assert found == [
        ("sie.yaml", 1, 10, "server.port"),
        ("sie.yaml", 1, 19, "server.prot"),
        ("sie.yaml", 1, 28, "server.max_items"),
        ("sie.yaml", 2, 1, "nonsense"),
        ("sie.yaml", 3, 10, "memory.run_permits"),
        ("sie.yaml", 7, 3, "models[0].queue"),
        ("sie.yaml", 8, 3, "models[0].idle_evict_s"),
        ("sie.yaml", 9, 3, "models[0].source"),
        ("sie.yaml", 10, 3, "models[1].name"),
        ("sie.yaml", 11, 3, "models[2].name"),
        ("sie.yaml", 13, 3, "models[2].pinned"),
        ("sie.yaml", 14, 3, "models[2].pinned"),
        ("--log-level", None, None, "telemetry.log_level"),
        ("SIE_DRAIN_S", None, None, "server.drain_s"),
    ]


def test_aliases_that_unfold_to_billions_of_values_are_refused_at_once(write: Write) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = write("models: []\n" + "\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"sie.yaml:7:\d+: holds more than 250000 values"):
        load_config(path, environ={})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"server:\n  host: \xff\xfe\n", "sie.yaml:2:9: byte 0xff is not UTF-8"),
        ("server: {}\n".encode("utf-16"), "sie.yaml:1:1: byte 0xff is not UTF-8"),
        ("# größe\nserver: {host: grö".encode() + b"\xe4}\n", "sie.yaml:2:19: byte 0xe4 is not UTF-8"),
    ],
)
def test_files_that_are_no_utf8(raw: bytes, expected: str, write: Write) -> None:
    path = write("")
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    assert expected in str(caught.value)


def test_a_byte_order_mark_is_no_mistake(write: Write) -> None:
    path = write("")
    path.write_bytes(b"\xef\xbb\xbfserver: {port: 81}\r\n")
    assert load_config(path, environ={}).server.port == 81


@pytest.mark.usefixtures("write")
def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        load_config(Path("nowhere.yaml"), environ={})
    with pytest.raises(ConfigError, match="this is a folder"):
        load_config(tmp_path, environ={})
    with pytest.raises(ConfigError, match="no such file"):
        load_config(None, environ={"SIE_CONFIG": "nowhere.yaml"})
    with pytest.raises(ConfigError, match="can't be read: File name too long"):
        load_config(Path("x" * 5000), environ={})


def test_a_default_file_that_is_a_link_to_nowhere_is_not_passed_over(write: Write) -> None:
    path = write("")
    path.unlink()
    path.symlink_to("elsewhere.yaml")
    with pytest.raises(ConfigError, match=r"sie\.yaml: there is no such file"):
        load_config(environ={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(write: Write) -> None:
    path = write("server: {}\n")
    path.chmod(0)
    with pytest.raises(ConfigError, match="can't be read: Permission denied"):
        load_config(path, environ={})


def test_a_file_without_end_is_given_up(tmp_path: Path) -> None:
    with (tmp_path / "sie.yaml").open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        load_config(tmp_path / "sie.yaml", environ={})
    with pytest.raises(ConfigError, match="not a regular file"):
        load_config(Path("/dev/zero"), environ={})
