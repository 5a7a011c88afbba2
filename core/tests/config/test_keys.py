"""API keys, and who may be let in without them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core.config import is_loopback, load_config, parse_api_key
from sie_core.errors import ConfigError

Write = Callable[[str], Path]
A, B = (hashlib.sha256(word).hexdigest() for word in (b"a", b"b"))


def test_keys_of_the_list_and_of_the_file(write: Write) -> None:
    path = write(f"server: {{api_keys: ['admin:ops:{A}'], api_keys_file: keys}}\n")
    Path("keys").write_text(f"# ours\n\n  inference : web : {B.upper()}\n")
    server = load_config(path, environ={}).server
    assert server.api_keys == (f"admin:ops:{A}", f"inference:web:{B}")
    assert A not in repr(server)
    key = parse_api_key(server.api_keys[1])
    assert (key.role, key.name, key.sha256) == ("inference", "web", B)
    assert B not in repr(key)


def test_the_variable_wins_over_the_file(write: Write) -> None:
    path = write("server: {api_keys_file: nowhere}\n")
    Path("mine").write_text(f"admin:me:{A}\n")
    assert load_config(path, environ={"SIE_API_KEYS_FILE": "mine"}).server.api_keys == (f"admin:me:{A}",)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("sk-verysecret\n", ["1:1: server.api_keys_file: an API key is written role:name:sha256-of-key"]),
        (f"root:me:{A}\n", ["1:1: server.api_keys_file: the role of an API key"]),
        (f"admin::{A}\n", ["1:1: server.api_keys_file: the name of an API key"]),
        ("admin:me:sk-verysecret\n", ["the hash of API key 'me' must be 64 hex digits, and has 13 characters"]),
        (f"admin:me:{A[:-1]}g\n", ["the hash of API key 'me' must be 64 hex digits, and has 64 characters"]),
        (f"#\nadmin:me:{A}\nadmin:me:{B}\n", ["3:1: server.api_keys_file: the API key 'me' stands here twice"]),
        (f"admin:me:{A}\ninference:you:{A.upper()}\n", ["2:1:", "the API keys 'me' and 'you' are the same key"]),
        ("# none yet\n", ["server.api_keys_file: holds no key"]),
        ("x\ny\n", ["keys:1:1:", "keys:2:1:"]),
    ],
)
def test_bad_key_files(lines: str, expected: list[str], write: Write) -> None:
    path = write("server: {api_keys_file: keys}\n")
    Path("keys").write_text(lines)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    message = str(caught.value)
    for part in expected:
        assert part in message
    assert "verysecret" not in message
    assert A not in message and A[:-1] not in message


def test_key_files_that_are_not_there_or_no_text(write: Write) -> None:
    path = write("server: {api_keys_file: keys}\n")
    with pytest.raises(ConfigError, match=r"keys: server.api_keys_file: can't be read: No such file"):
        load_config(path, environ={})
    Path("keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load_config(path, environ={})
    Path("keys").unlink()
    Path("keys").mkdir()
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_config(path, environ={})


def test_bad_keys_in_the_list_have_their_place(write: Write) -> None:
    path = write(f"server:\n  api_keys:\n  - admin:me:{A}\n  - admin:me:{B}\n  - nonsense\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    assert [(p.line, p.column, p.path) for p in caught.value.problems] == [
        (4, 5, "server.api_keys[1]"),
        (5, 5, "server.api_keys[2]"),
    ]


def test_nobody_else_is_let_in_without_keys(write: Write) -> None:
    path = write("server: {host: 0.0.0.0}\n")
    with pytest.raises(ConfigError, match=r"sie.yaml:1:10: server.host: 0\.0\.0\.0 lets other machines in"):
        load_config(path, environ={})
    with pytest.raises(ConfigError, match=r"^SIE_HOST: server.host: ::"):
        load_config(environ={"SIE_HOST": "::"})
    assert load_config(path, environ={"SIE_HOST": "127.0.0.1"}).server.host == "127.0.0.1"
    assert load_config(path, environ={"SIE_ALLOW_INSECURE_BIND": "1"}).server.host == "0.0.0.0"
    Path("keys").write_text(f"admin:me:{A}\n")
    assert load_config(path, environ={"SIE_API_KEYS_FILE": "keys"}).server.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("allowed_hosts: [sie.example, 'http://x']", "names without scheme, port and path, and 'http://x' is not one"),
        ("allowed_hosts: ['sie.example:8080']", "'sie.example:8080' is not one"),
        ("allowed_hosts: ['[::1]:80']", "'[::1]:80' is not one"),
        ("cors_origins: [app.example]", "origins such as https://app.example, without a path, and 'app.example' is"),
        ("cors_origins: ['https://app.example/']", "'https://app.example/' is not one"),
        ("cors_origins: ['null']", "'null' is not one"),
        ("root_path: sie", "must be a path such as /sie"),
        ("root_path: /a//b", "must be a path such as /sie"),
        ("root_path: /", None),
        ("allowed_hosts: ['*', sie.example, 192.168.1.7, '::1', '[::1]', my_host]", None),
        ("cors_origins: ['*', 'https://app.example', 'http://[::1]:3000', 'chrome-extension://abcdef']", None),
    ],
)
def test_hosts_origins_and_prefixes_are_checked(server: str, message: str | None, write: Write) -> None:
    """F1, G7: a slip in a setting that opens the server is found before it is served."""
    path = write(f"server: {{{server}}}\n")
    if message is None:
        load_config(path, environ={})
        return
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    assert message in str(caught.value)


def test_lists_in_variables_and_flags_have_commas(write: Write) -> None:
    """F1, G7: containers are configured by variables."""
    given = load_config(
        environ={"SIE_ALLOWED_HOSTS": "sie, sie.example"}, flags={"--cors-origins": "https://a.example"}
    )
    assert given.server.allowed_hosts == ("sie", "sie.example")
    assert given.server.cors_origins == ("https://a.example",)
    path = write("server: {allowed_hosts: [a]}\n")
    assert load_config(path, environ={"SIE_ALLOWED_HOSTS": "off"}).server.allowed_hosts == ()


@pytest.mark.parametrize(
    ("server", "warned"),
    [
        ("{}", ""),
        ("{host: 0.0.0.0, allow_insecure_bind: true}", "everybody who can reach 0.0.0.0"),
        ("{cors_origins: ['*']}", "every web page"),
        (f"{{host: 0.0.0.0, cors_origins: ['*'], api_keys: ['admin:me:{'0' * 64}']}}", ""),
    ],
)
def test_what_lets_strangers_in_is_warned_of(server: str, warned: str, write: Write) -> None:
    """F1: asked for in so many words, and still said at every start."""
    warnings = load_config(write(f"server: {server}\n"), environ={}).warnings
    assert (warned in "".join(warnings)) if warned else warnings == ()
