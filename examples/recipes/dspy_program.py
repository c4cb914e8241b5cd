"""DSPy: a signature with a context, answered by the server. `pip install dspy`"""

import os
import sys
from pathlib import Path

import dspy

dspy.configure(
    lm=dspy.LM(f"openai/{os.environ['MODEL']}", api_base=os.environ["BASE_URL"], api_key="unused", cache=False)
)
documents = [Path(name).read_text("utf-8") for name in sys.argv[2:]]
answer = dspy.Predict("context: list[str], question -> answer")
print(answer(context=documents, question=sys.argv[1]).answer)
