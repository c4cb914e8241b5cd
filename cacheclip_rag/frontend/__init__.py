"""What front ends share: the adapters for LlamaIndex and LangChain, and the server."""
