"""The way of one question, from the request to the last token."""
