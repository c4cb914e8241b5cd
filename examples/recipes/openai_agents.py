"""OpenAI's Agents SDK, which speaks /v1/responses: the client is set once. `pip install openai-agents`"""

import os
import sys
from pathlib import Path

from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="unused"))
set_tracing_disabled(True)
documents = "\n\n".join(Path(name).read_text("utf-8") for name in sys.argv[2:])
agent = Agent("Reader", instructions="Answer in one sentence.", model=os.environ["MODEL"])
print(Runner.run_sync(agent, f"{documents}\n\n{sys.argv[1]}").final_output)
