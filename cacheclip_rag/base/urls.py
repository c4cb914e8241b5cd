"""URLs as they are shown: in messages, logs, reprs, JSON and dumps, none has its password."""

from __future__ import annotations

import re

HIDDEN = "***"
_HIDING: tuple[tuple[str, str], ...] = (
    # a password may hold what must not stand in one: these URLs have nothing else with @
    (r"(?s)\b((?:valkey|redis)s?://).*@", rf"\g<1>{HIDDEN}@"),
    (r"(://)[^/?#]*@", rf"\g<1>{HIDDEN}@"),
    (r"(?s)(://)[^/?#@]*:(?!\d*(?:[/?#]|$)).*@", rf"\g<1>{HIDDEN}@"),  # no port: a password with a slash
    (r"([?&][^=&#\s]+=)[^&#\s]+", rf"\g<1>{HIDDEN}"),
)


def shown_url(url: object) -> str:
    """A URL, or a place that is none, without user, password, and values of its query; so is the hot tier in it, which
    may lack its scheme."""
    text, mark, hot = str(url).partition("?hot=")
    for pattern, instead in _HIDING:
        text = re.sub(pattern, instead, text)
    if not mark:
        return text
    return f"{text}{mark}{shown_url(hot)}" if "://" in hot else f"{text}{mark}{_without_user(hot)}"


def _without_user(server: str) -> str:
    return f"{HIDDEN}@{server.rpartition('@')[2]}" if "@" in server else server


def without_secrets(text: str) -> str:
    """A text whose URLs are as they are shown: the last net below messages that show one by :func:`shown_url`. A URL
    ends at a blank or a quote, but for an apostrophe in a password."""
    return re.sub(r"[A-Za-z][\w+.-]*://(?:[^\s'\"<>]|'(?=[^\s\"<>]*@))+", lambda match: shown_url(match[0]), text)
