"""What all tests share: no network, no user's caches, GPU tests skipped without a GPU."""

from __future__ import annotations

import os

import pytest

# Before anything imports huggingface_hub, which reads them once: no test may reach the real Hub or a user's token.
os.environ.update(HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
os.environ.pop("HF_TOKEN", None)


@pytest.fixture(scope="session", autouse=True)
def _no_users_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor does what is made for a whole module: λ that another version has kept differ in their last digit."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("user-cache"))


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees λ that another one, or the user, has kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if "gpu" in item.keywords:
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
