"""Pydantic AI: an agent whose model is the server's. `pip install "pydantic-ai-slim[openai]"`"""

import os
import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="unused")
documents = "\n\n".join(Path(name).read_text("utf-8") for name in sys.argv[2:])
agent = Agent(OpenAIChatModel(os.environ["MODEL"], provider=provider), instructions="Answer in one sentence.")
print(agent.run_sync(f"{documents}\n\n{sys.argv[1]}").output)
