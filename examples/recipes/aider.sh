#!/bin/sh
# aider, asked about files. `pip install aider-chat`
question=$1; shift
# its history would lie in the folder
OPENAI_API_BASE=$BASE_URL OPENAI_API_KEY=unused aider --model "openai/$MODEL" --no-git --no-show-model-warnings \
  --input-history-file /dev/null --chat-history-file /dev/null --no-check-update --analytics-disable --yes-always --chat-mode ask --message "$question" "$@"
