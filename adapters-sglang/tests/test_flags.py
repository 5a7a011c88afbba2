"""Command lines: valid for every supported version, and what is wrong with one is said before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from sie_adapters_sglang._argv import Place, command_line
from sie_adapters_sglang._errors import BadOptions
from sie_adapters_sglang._flags import flags_for, supported_versions, version_key
from sie_adapters_sglang._options import EmbeddingOptions, EngineOptions, GenerationOptions, HiCacheOptions

VERSIONS = supported_versions()
FULL = GenerationOptions(
    dtype="bfloat16",
    tp_size=2,
    context_length=4096,
    mem_fraction_static=0.7,
    max_total_tokens=10_000,
    max_running_requests=8,
    attention_backend="torch_native",
    load_format="dummy",
    quantization="fp8",
    trust_remote_code=True,
    warmup=False,
    max_loras=2,
    chat_template="chatml",
    tool_call_parser="qwen25",
    reasoning_parser="qwen3",
    grammar_backend="xgrammar",
    kv_cache_dtype="fp8_e5m2",
    chunked_prefill_size=2048,
    extra_args=("--enable-metrics", "--random-seed", "7", "--schedule-policy=fcfs"),
)
HICACHE = HiCacheOptions(
    hicache_write_policy="write_through",
    hicache_io_backend="kernel",
    hicache_mem_layout="layer_first",
    hicache_storage_backend="file",
)
CASES = [GenerationOptions(), FULL, HICACHE, EmbeddingOptions(), EmbeddingOptions(matryoshka=(2, 4), tp_size=4)]


def place(**more: Any) -> Place:
    sizing = ("--mem-fraction-static", "0.710", "--max-total-tokens", "10000")
    settings = {"model": "/m", "config": "/c.yaml", "port": 1, "nccl_port": 2, "device": "cuda", "sizing": sizing}
    return Place(**settings | more)


def argv_of(options: EngineOptions, version: str) -> list[str]:
    flag = "--cuda-graph-backend-prefill"
    extra = [flag, "disabled"] if flags_for(version).has(flag) else []
    return command_line(options, place(saver=True, revision="main", extra=extra), flags_for(version))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", CASES)
def test_every_command_line_is_one_that_the_version_takes(options: EngineOptions, version: str) -> None:
    argv = argv_of(options, version)
    assert argv[argv.index("--nccl-port") + 1] == "2"
    assert "--enable-memory-saver" in argv
    assert "--sleep-on-idle" in argv
    assert ("--is-embedding" in argv) is isinstance(options, EmbeddingOptions)
    assert not {"--api-key", "--admin-api-key"} & set(argv)


def test_an_unknown_flag_is_refused_with_a_suggestion() -> None:
    options = GenerationOptions(extra_args=("--enable-metric",))
    with pytest.raises(BadOptions, match=r"--enable-metric; did you mean --enable-metrics") as caught:
        command_line(options, place(), flags_for(VERSIONS[0]))
    assert caught.value.permanent
    with pytest.raises(BadOptions, match=r"zzz$"):
        command_line(GenerationOptions(extra_args=("--zzz",)), place(), flags_for(VERSIONS[0]))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (("--random-seed", "many"), "invalid int"),
        (("--random-seed",), "expected one argument"),
        (("--schedule-policy", "none-such"), "invalid choice"),
        (("--enable-metrics=yes",), "ignored explicit argument"),
        (("stray",), "unrecognized arguments"),
        (("--port", "80"), "not for you to set"),
        (("--tp-size=2",), "the option `tp_size`"),
        (("--dtype", "half"), "the option of that name"),
        (("--api-key", "x"), "keys are made"),
    ],
)
def test_a_wrong_value_is_refused(extra: tuple[str, ...], why: str) -> None:
    with pytest.raises(BadOptions, match=why):
        command_line(GenerationOptions(extra_args=extra), place(), flags_for("0.5.20"))


@pytest.mark.parametrize(
    "extra",
    [
        ("--enable-hicache",),  # another name of one that is not for a profile
        ("--pipeline-parallel-size", "2"),
        ("--gpu-id-step", "2"),
        ("--cpu-offload-gb", "4"),
        ("--gated-launch-port", "4000"),
        ("--ssl-keyfile", "k", "--ssl-certfile", "c"),
    ],
)
def test_what_would_take_what_nobody_booked_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(BadOptions, match="not for you to set"):
        command_line(GenerationOptions(extra_args=extra), place(), flags_for("0.5.23"))


def test_the_installed_version_decides() -> None:
    """The same option is taken by one release and refused by another."""
    newer = GenerationOptions(extra_args=("--cuda-graph-backend-prefill", "disabled"))
    assert command_line(newer, place(), flags_for("0.5.20"))
    with pytest.raises(BadOptions, match=r"0\.5\.10\.post1 has no option"):
        command_line(newer, place(), flags_for("0.5.10.post1"))


def test_versions_between_the_snapshots_use_the_one_before() -> None:
    assert flags_for("0.5.20.post1").known == flags_for("0.5.20").known
    assert flags_for("0.5.20.post1").version == "0.5.20.post1"
    for wrong in ("0.5.9", "0.5.10", "0.9.0", "0.5.20rc1", "unknown"):
        with pytest.raises(BadOptions, match="not supported"):
            flags_for(wrong)


def test_versions_sort_as_releases_do() -> None:
    versions = ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.20", "0.10.0", "1.0.0"]
    assert sorted(versions, key=version_key) == versions


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int3"}, {"tp_size": 0}, {"mem_fraction_static": 1.0}, {"max_loras": -1}, {"stop_timeout_s": 0}],
)
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        GenerationOptions(**wrong)
    with pytest.raises(ValueError):
        EmbeddingOptions(matryoshka=(0,))


@pytest.mark.slow
def test_the_real_parser_takes_them_and_is_the_one_of_the_snapshot(real: Any, helpers: Any) -> None:
    """The installed release's own parser, in its own environment."""
    cases = [argv_of(options, real.version) for options in CASES]
    code = (
        "import argparse, json, sys\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "ServerArgs.add_cli_args(parser)\n"
        "for argv in json.loads(sys.argv[1]): parser.parse_args(argv)\n"
        "print('FLAGS' + json.dumps(sorted(o for a in parser._actions for o in a.option_strings if o[:2] == '--')))\n"
    )
    env = {**os.environ, **real.model().options.env}
    done = subprocess.run([real.python, "-c", code, json.dumps(cases)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FLAGS"))
    assert set(json.loads(line.removeprefix("FLAGS"))) - {"--help"} == set(flags_for(real.version).known)


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import json, sys, sie_adapters_sglang.plugin\n"
        "print(json.dumps([n for n in ('httpx', 'numpy', 'psutil', 'asyncio') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
