"""Options that vLLM cannot follow, and flags of vLLM that contradict ours. Imports neither torch nor vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from cacheclip_rag import ConfigurationError

_NO_EFFECT = {
    "max_ttft_s": "ratios are not chosen by time for vLLM. Give recompute_ratio as a number",
    "min_confidence": "vLLM gives no logits before the answer begins. Leave it out",
    "finish": "answers of vLLM are not verified. Leave it out, or let idle complete their exact KV afterwards",
    "temperature": "give vLLM's own: -- --override-generation-config '{\"temperature\": 0}'",
    "max_tokens": "give vLLM's own: -- --override-generation-config '{\"max_new_tokens\": 256}'",
    "max_running": "give vLLM's own: -- --max-num-seqs 8",
    "max_queue": "vLLM takes every request. Limit them in a proxy",
    "timeout_s": "vLLM has no limit for a request's time. Limit it in a proxy",
    "fallback": "start vLLM itself for models whose KV cannot be reused",
    **dict.fromkeys(("learn", "learned_bytes"), "no texts are learned before vLLM. Leave it out"),
    "hide_hits": "vLLM counts cached tokens itself. Leave it out",
}
"""Settings of ``cacheclip serve`` that change nothing with vLLM, and what to do instead."""
_OURS = {
    "model": "give --primary",
    "served-model-name": "write served_name under [serve] in the file of --settings",
    "host": "give --host before --",
    "port": "give --port before --",
    "dtype": "give --dtype before --",
    "api-key": "give --api-key before --, or set CACHECLIP_API_KEY",
    "uds": "give --host and --port before --",
    "kv-transfer-config": "vLLM takes one connector, and it is cacheclip's",
    "kv-offloading-size": "it replaces cacheclip's connector, and vLLM takes one",
    "kv-offloading-backend": "it replaces cacheclip's connector, and vLLM takes one",
    "worker-cls": "recompute needs cacheclip's",
    "no-enable-prompt-tokens-details": "the counts show what became of a plan",
    "config": "give the flags of the file themselves",
    **dict.fromkeys(("grpc", "headless"), "plans are made before vLLM's HTTP server, in its process"),
    **dict.fromkeys(
        ("api-server-count", "data-parallel-multi-port-external-lb"),
        "every API server would take turns and count for itself. Start this command several times, behind a router",
    ),
    **dict.fromkeys(
        (
            *("tokenizer", "tokenizer-mode", "tokenizer-revision", "revision", "hf-overrides"),
            *("chat-template", "chat-template-content-format", "hf-config-path"),
        ),
        "plans and stored chunks follow the files in the model's folder. Change them there, and ingest again",
    ),
    "enable-lora": "adapters are not supported beside reuse. Start a vLLM of its own for them",
    "enable-sleep-mode": "other weights than those of the stored chunks may be loaded meanwhile",
    "quantization-config": "the keys of stored chunks do not tell it. Give --quantization, a name",
    "default-chat-template-kwargs": "plans do not follow it. Set chat_template_kwargs in each request",
}
"""Flags of vLLM that contradict what this command sets, each with what to do instead."""
_FILES = frozenset(
    {
        *("download-dir", "generation-config", "log-config-file", "lora-modules", "reasoning-parser-plugin"),
        *("ssl-ca-certs", "ssl-certfile", "ssl-keyfile", "tool-parser-plugin"),
    }
)
"""Flags of vLLM whose values are files or folders even if they hold no slash."""
_SHORT = {"-asc": "--api-server-count", "-dpm": "--data-parallel-multi-port-external-lb"}
"""Other names of these flags."""
_WHOLE = ("quantization",)
"""Flags of vLLM that are also the beginnings of others."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if one of the settings that a user gave, by name, has no effect with vLLM."""
    for name, instead in _NO_EFFECT.items():
        if name in settings and settings[name] != "idle":
            raise ConfigurationError(f"{name} has no effect with --backend vllm: {instead}.")


def check_flags(flags: Sequence[str]) -> None:
    """Raise ConfigurationError if a flag for vLLM contradicts what this command sets."""
    for flag in flags:
        flag = _SHORT.get(flag.partition("=")[0], flag)
        meant = next((ours for ours in _OURS if stands_for(flag, ours)), None)
        if meant is not None:
            raise ConfigurationError(f"--{_name(flag)} cannot be passed on to vLLM: {_OURS[meant]}.")


def stands_for(flag: str, name: str) -> bool:
    """Whether vLLM could read a flag as the one that is called ``name``: its parser also takes beginnings of names."""
    given = _name(flag)
    return bool(given) and name.startswith(given) and (given == name or given not in _WHOLE)


def is_on(flags: Sequence[str], name: str) -> bool:
    """Whether a switch of vLLM is on; the last ``--name`` or ``--no-name`` counts."""
    given = (flag for flag in reversed(flags) if stands_for(flag, name) or stands_for(flag, f"no-{name}"))
    return any(stands_for(flag, name) for flag in islice(given, 1))


def value_of(flags: Sequence[str], name: str, short: str | None = None) -> str | None:
    """What a flag of vLLM, also by its name of one letter (``-q``), is set to; None if it is not given."""
    found = None
    for number, flag in enumerate(flags):
        is_short = short is not None and flag.startswith(short)
        if is_short and flag != short:
            found = flag[2:].removeprefix("=")
        elif is_short or stands_for(flag, name):
            _, has_value, value = flag.partition("=")
            found = value if has_value else next(iter(flags[number + 1 :]), None)
    return found


def absolute_paths(flags: Sequence[str]) -> list[str]:
    """The flags with absolute paths for files that exist here, because vLLM runs in another folder."""
    found: list[str] = []
    is_file = False
    for flag in flags:
        is_file = _name(flag) in _FILES if flag.startswith("-") else is_file
        before, sign, value = flag.rpartition("=") if "=" in flag else ("", "", flag)
        may_be = value and not value.startswith("-") and (is_file or os.sep in value)
        found.append(before + sign + os.path.abspath(value) if may_be and os.path.exists(value) else flag)
    return found


def _name(flag: str) -> str:
    """The name in a flag, as it is given: ``--a_b.part=1`` is ``a-b``. Empty if it is none."""
    return flag[2:].partition("=")[0].partition(".")[0].replace("_", "-") if flag.startswith("--") else ""
