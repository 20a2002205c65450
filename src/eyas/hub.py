"""Quick check of the Hugging Face hub before a model is loaded.

The hub's client retries for half a minute when it gets no answer. Here one request with a short timeout decides whether
to load from the hub, to load from the local cache, or to raise an error that says why.
"""

import logging
import threading
from typing import Any

from eyas.errors import UserError

logger = logging.getLogger(__name__)
SECONDS = 2.0
"""Timeout of the check, name resolution included."""

_seen: set[tuple[str, str | None]] = set()
"""Models that the hub has: each is checked once per process."""


def hub_options(source: str, *, revision: str | None = None) -> dict[str, Any]:
    """Keyword arguments for the hub's client and transformers to load this hub id."""
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if (source, revision) not in _seen:
        if not _online(source, revision):
            return options | {"local_files_only": True}
        _seen.add((source, revision))
    return options


def _online(source: str, revision: str | None) -> bool:
    """True if the hub has the model, False if only the local cache can be used; raises if neither works."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        _ask(source, revision)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status < 500 and status != 429:
            raise UserError(_refusal(source, revision, status, type(error).__name__)) from error
        reason = f"the hub answers {status}"
    except Exception as error:  # a dozen kinds, of the network, the system and the client
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    else:
        return True
    known = try_to_load_from_cache(source, "config.json", revision=revision)
    if not isinstance(known, str):
        raise UserError(
            f"there is no folder {source!r}, the local cache does not have it and the hub cannot be asked ({reason}); "
            "check the name and the network, or give a folder"
        )
    logger.warning(f"the hub cannot be asked for {source} ({reason}): using what the local cache has of it")
    return False


def _refusal(source: str, revision: str | None, status: int, kind: str) -> str:
    if kind == "RevisionNotFoundError":
        return f"the hub has {source}, but no revision {revision!r} of it; give a branch, a tag or a commit"
    if kind == "GatedRepoError":
        return f"the hub gives {source} only to those who accepted its terms; accept them there and set HF_TOKEN"
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"the hub has {source}, but it holds no config.json; give a model in Hugging Face format"
    return (
        f"the hub has no model {source!r}, or not for everybody (it answers {status}), and there is no such folder "
        "here; check the name, or set HF_TOKEN for a private one"
    )


def _ask(source: str, revision: str | None) -> None:
    """Send one request, in a thread, because name resolution has no timeout of its own."""
    failed: list[Exception] = []

    def ask() -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        try:
            url = hf_hub_url(source, "config.json", revision=revision)
            reply = get_session().head(url, headers=build_hf_headers(), timeout=SECONDS, follow_redirects=False)
            if reply.status_code >= 400:  # a redirect means that the file exists
                hf_raise_for_status(reply)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {SECONDS:g} s")
    if failed:
        raise failed[0]
