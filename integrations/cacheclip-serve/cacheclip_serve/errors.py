"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheclip_rag import CacheClipError, ConfigurationError, DocumentError, MissingExtraError, PromptTooLongError

_NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat a request after some errors unless this header is there."""


class RequestError(CacheClipError):
    """A request that is refused, with the status and the error object of its response."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``param`` names the field of the request, such as ``messages[0].content``."""
        super().__init__(message)
        self.message, self.status, self.kind, self.param, self.code = message, status, kind, param, code
        self.headers = dict(headers or {})


def unsupported(param: str, message: str) -> RequestError:
    """The error about a field that would change the answer, and that this server does not follow."""
    return RequestError(message, param=param, code="unsupported_parameter")


def error_of(error: Exception) -> RequestError:
    """The response's error for any error. What is no fault of the request is an internal error, whose text is not
    shown: it may name files of the server."""
    match error:
        case RequestError():
            return error
        case PromptTooLongError():
            return RequestError(str(error), code="context_length_exceeded")
        case MissingExtraError():
            return RequestError(str(error), status=501, kind="server_error", code="not_installed", headers=_NO_RETRY)
        case ConfigurationError() | DocumentError():
            return RequestError(str(error))
        case TimeoutError():
            return RequestError(
                "the answer took longer than this server allows for a request. Ask for fewer tokens (max_tokens).",
                status=504,
                kind="timeout_error",
                code="timeout",
                headers=_NO_RETRY,
            )
    return RequestError(
        "an internal error; the server's log has it.", status=500, kind="server_error", headers=_NO_RETRY
    )


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
