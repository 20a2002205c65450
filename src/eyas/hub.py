"""One quick question to the hub before anything is loaded: is there such a model, and can the hub be reached at all.

Its client asks again for half a minute when it is not answered, and says so on the terminal. Here one answer, or a few
seconds without one, decide whether it is asked for files, whether the local cache must do, or what the user is told.
"""

import logging
import threading
from typing import Any

from eyas.errors import UserError

logger = logging.getLogger(__name__)
SECONDS = 2.0
"""For the whole question, the name's resolution included."""


_seen: set[tuple[str, str | None]] = set()
"""What the hub had when it was asked: once a process is enough."""


def hub_options(source: str, *, revision: str | None = None) -> dict[str, Any]:
    """What the hub's client and transformers are to be told when they load this hub id."""
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if (source, revision) not in _seen:
        if not _online(source, revision):
            return options | {"local_files_only": True}
        _seen.add((source, revision))
    return options


def _online(source: str, revision: str | None) -> bool:
    """Whether the hub has it; False if the hub cannot be asked but the local cache has it; refused if neither does."""
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
    except Exception as error:  # the network's, the system's and the client's own, of a dozen kinds
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
    """Ask once, in a thread: resolving a name cannot be given a deadline, waiting for it can."""
    failed: list[Exception] = []

    def ask() -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        try:
            url = hf_hub_url(source, "config.json", revision=revision)
            reply = get_session().head(url, headers=build_hf_headers(), timeout=SECONDS, follow_redirects=False)
            if reply.status_code >= 400:  # a redirect to where the file lies is as good as the file
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
