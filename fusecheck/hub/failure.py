"""What a failed download means for the user: our words, since the library's hold URLs, signed ones among them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError
from fusecheck.hub.patterns import SPARED, UNREAD, matches

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_REFUSED = frozenset({400, 401, 403, 404, 410, 451})
"""HTTP answers of the hub that a retry does not change."""


def failure(error: Exception, repo_id: str, revision: str | None) -> FusecheckError:
    """What a failed download means for the user: our words, and of the library's only the name of its exception."""
    from huggingface_hub import constants, errors  # noqa: PLC0415 - a folder must not pay for it

    host = constants.ENDPOINT.partition("://")[2].partition("/")[0].rpartition("@")[2] or "the hub"
    cause = _root(error)
    if isinstance(cause, errors.HFValidationError):
        return UsageError("is no folder here, and no possible name of a repository of the hub", file=repo_id)
    if isinstance(cause, errors.HfHubHTTPError):
        return _answered(cause, repo_id, revision, host)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return _offline(error, repo_id)
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError | TimeoutError):
        return SystemFailure.from_os(cause, str(cause.filename or repo_id), "write to the hub cache")
    if type(cause) is OSError:
        return SystemFailure(f"the download from {host} was cut short", file=repo_id, remedy="run again")
    what = f"is no folder here, and the repository of that name cannot be had from {host}: {type(cause).__name__}"
    return SystemFailure(what, file=repo_id, remedy="check the network and HF_ENDPOINT, and run again")


def _root(error: BaseException) -> BaseException:
    """The hub wraps what happened into `LocalEntryNotFoundError`; an answer of the server is itself."""
    from huggingface_hub import errors  # noqa: PLC0415 - a folder must not pay for it

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _answered(error: HfHubHTTPError, repo_id: str, revision: str | None, host: str) -> FusecheckError:
    """The hub, or the store behind it, answered with an error."""
    from huggingface_hub import constants, errors  # noqa: PLC0415 - a folder must not pay for it

    code = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        remedy = f"accept its licence at {host}/{repo_id}, and set HF_TOKEN to a token of that account"
        return UsageError("is a gated repository, and you are not on its list", file=repo_id, remedy=remedy)
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = "check the spelling of --revision"
        return UsageError(f"has no such revision at {host}", file=repo_id, found=revision or "main", remedy=remedy)
    if isinstance(error, errors.DisabledRepoError):
        return UsageError(f"has been disabled at {host}", file=repo_id)
    if isinstance(error, errors.RepositoryNotFoundError):
        what = f"is neither a folder here nor a repository that {host} shows you"
        return UsageError(what, file=repo_id, remedy="check the spelling; a private one needs HF_TOKEN")
    by_hub = str(error.response.request.url).startswith(f"{constants.ENDPOINT}/")
    if isinstance(error, errors.EntryNotFoundError) or not by_hub or code not in _REFUSED:
        whom = host if by_hub else f"the store behind {host}"
        return SystemFailure(f"cannot be downloaded: {whom} answered {code}", file=repo_id, remedy="run again later")
    what = f"is no folder here, and {host} refuses the repository of that name: it answered {code}"
    return UsageError(what, file=repo_id, remedy="check the spelling, HF_TOKEN and HF_ENDPOINT")


def _offline(error: Exception, repo_id: str) -> FusecheckError:
    """Offline mode, and the cache has nothing of that name, or less than all of it."""
    snapshot: str | None = getattr(error, "snapshot_path", None)
    if snapshot is None:
        what = "is no folder here, and the repository of that name is not in the cache, while HF_HUB_OFFLINE is set"
        return SystemFailure(what, file=repo_id, remedy="fill the cache first, or unset HF_HUB_OFFLINE")
    from huggingface_hub import get_cached_repo_tree  # noqa: PLC0415 - a folder must not pay for it

    names = (file.path for file in get_cached_repo_tree(repo_id, revision=Path(snapshot).name))
    absent = sorted(name for name in names if not (Path(snapshot) / name).exists() and not matches(name, UNREAD))
    missing = [name for name in absent if not matches(name, SPARED)] or absent
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return CheckpointError(  # side files count too: no later check could miss them
        f"the cached snapshot lacks {', '.join(missing[:3])}{more}, and HF_HUB_OFFLINE is set",
        file=repo_id,
        remedy="complete the download",
    )
