"""The core's tiny models and engine."""

pytest_plugins = ["cacheclip_rag.testing.plugin"]
