#!/bin/sh
# opencode, asked about files. `npm install opencode-ai`
question=$1; shift
for file in "$@"; do set -- "$@" --file "$file"; shift; done
# an agent of few words: its own prompts and tools are 10,000 tokens
export OPENCODE_CONFIG_CONTENT='{"provider": {"cacheclip": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL":
  "'$BASE_URL'", "apiKey": "unused"}, "models": {"'$MODEL'": {"limit": {"context": 8192,
  "output": 64}}}}}, "agent": {"reader": {"mode": "primary", "prompt":
  "Answer in one sentence.", "tools": {"*": false}}}}'
opencode run --model "cacheclip/$MODEL" --agent reader "$question" "$@"
