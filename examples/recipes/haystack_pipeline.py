"""Haystack: a prompt builder and a chat generator, pointed at the server. `pip install haystack-ai`"""

import os
import sys
from pathlib import Path

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

url, model = os.environ["BASE_URL"], os.environ["MODEL"]
template = "{% for each in documents %}{{ each.content }}\n\n{% endfor %}Answer in one sentence. {{ question }}"
pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user(template)], required_variables="*"))
pipeline.add_component("llm", OpenAIChatGenerator(Secret.from_token("unused"), model, api_base_url=url, timeout=600))
pipeline.connect("prompt.prompt", "llm.messages")
documents = [Document(content=Path(name).read_text("utf-8")) for name in sys.argv[2:]]
print(pipeline.run({"prompt": {"documents": documents, "question": sys.argv[1]}})["llm"]["replies"][0].text)
