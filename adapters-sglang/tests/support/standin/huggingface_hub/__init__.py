"""Stands in for the hub's client: a hub of one model, whose folder ``STANDIN_HUB`` names."""

import os
import time
from pathlib import Path
from types import SimpleNamespace


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class LocalEntryNotFoundError(FileNotFoundError):
    pass


def snapshot_download(repo, *, revision, local_files_only, allow_patterns, ignore_patterns):
    how = repo.partition("/")[2]
    if how == "gated":
        raise GatedRepoError("403")
    if how == "gone" or revision == "gone":
        raise RepositoryNotFoundError("404")
    if how == "down":
        raise ConnectionError("no route")
    if how == "slow":
        time.sleep(3600)
    cache = Path(os.environ["STANDIN_HUB"])
    there = cache / ("whole" if "*.safetensors" in allow_patterns else "about")
    if local_files_only and not (cache / "fetched").exists():
        raise LocalEntryNotFoundError("not cached")
    if "*.safetensors" in allow_patterns:
        (cache / "fetched").touch()
    return str(there)


class HfApi:
    def model_info(self, repo, *, revision, files_metadata):
        names = {"model.safetensors": 5_000_000_000, "config.json": 10, "original/model.safetensors": 7}
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in names.items()])
