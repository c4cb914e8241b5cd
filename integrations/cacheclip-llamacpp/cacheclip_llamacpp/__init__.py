"""llama.cpp: GGUF files, with weights of 4 to 8 bits. All that touches its API is here, and only its public calls.

``loader.py`` is what cacheclip-rag finds by entry point: it takes names of GGUF files. ``library.py`` finds
llama-cpp-python, ``weights.py`` opens a file and says which models cannot be run, ``vocabulary.py`` makes ids of text,
``tokenizer.py`` text of messages, ``context.py`` holds the KV of many sequences, ``model.py`` is the runtime,
``late_correction.py`` corrects KV that is not recomputed.
"""
