"""Several tenants share one machine, one store and one copy of the weights. No tenant can see or release another
tenant's chunks, or detect them by timing. A text of two tenants is stored twice."""

from __future__ import annotations

from common import AUXILIARY, PRIMARY, STORE
from langchain_cacheclip import ChatCacheClip

SECRET = "The access code of the seed vault is 4481, and it changes on the first Monday of every month."
PROMPT = f"{SECRET}\n\nWhat is the access code?"


def model(tenant: str) -> ChatCacheClip:
    return ChatCacheClip(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, namespace=tenant, max_tokens=16)


def main() -> None:
    north, south = model("north"), model("south")
    north.engine.precompute([SECRET], source="vault-note")
    for name, llm in (("north", north), ("south", south)):
        stats = llm.invoke(PROMPT).response_metadata["cacheclip"]
        print(f"{name}: hits {stats['hits']}, reused {stats['reused_tokens']} of {stats['prompt_tokens']} tokens")
    print("released:", north.engine.release(sources=["vault-note"]), "of north;", "none of south's is touched")


if __name__ == "__main__":
    main()
