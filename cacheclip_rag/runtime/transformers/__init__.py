"""The runtime for unmodified transformers models. All code that depends on transformers' internals is in this folder;
other modules take only names that ``transformers`` itself exports, such as ``AutoConfig``."""
