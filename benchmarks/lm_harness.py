"""Our questions in EleutherAI's lm-eval, through a server, with and without reuse.

    python -m venv lm-env && lm-env/bin/pip install "lm-eval[api]==0.4.13"
    python benchmarks/lm_harness.py --dataset questions.jsonl --limit 50 --folder lm --primary MODEL
    cacheclip serve --primary MODEL --store lm/store
    python benchmarks/lm_harness.py --folder lm --primary MODEL --ask lm-env/bin/lm_eval

The first command writes a task of lm-eval's own kind and its data, and stores the passages; the last one asks the
server twice and prints lm-eval's tables: with reuse, and with ``{"cacheclip": {"method": "full"}}`` in each request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from cacheclip_lab.evaluation.records import read_records

from cacheclip_rag import CacheClipEngine

TASK = """task: passages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answers[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 32, temperature: 0.0}}
process_results: !function judging.judge
metric_list:
- {{metric: f1, aggregation: mean, higher_is_better: true}}
- {{metric: contains, aggregation: mean, higher_is_better: true}}
"""
JUDGE = """# lm-eval has an environment of its own; F1 and normal form are SQuAD's (arXiv:1606.05250)
import collections, re, string


def words(text):
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\\b(a|an|the)\\b", " ", plain).split()


def judge(doc, results):
    own, best = words(results[0]), 0.0
    for right in map(words, doc["answers"]):
        same = sum((collections.Counter(own) & collections.Counter(right)).values())
        best = max(best, 2 * same / (len(own) + len(right)) if same else 0.0)
    contains = any(" ".join(words(answer)) in " ".join(own) for answer in doc["answers"])
    return {"f1": best, "contains": float(contains)}
"""


def write(folder: Path, dataset: str, limit: int, primary: str, auxiliary: str | None) -> None:
    """The task with its data and its scores, and a store of the passages."""
    folder.mkdir(parents=True, exist_ok=True)
    records = read_records(dataset, limit=limit).records
    engine = CacheClipEngine(primary=primary, auxiliary=auxiliary, store=str(folder / "store"))
    with (folder / "data.jsonl").open("w") as data:
        for record in records:
            chunks = [chunk.as_read.strip() for chunk in record.chunks]
            engine.precompute(chunks)
            prompt = "\n\n".join([*chunks, f"Question: {record.question}\nAnswer:"])
            print(json.dumps({"prompt": prompt, "answers": record.answers}), file=data)
    engine.close()
    (folder / "passages.yaml").write_text(TASK.format(data=(folder / "data.jsonl").absolute()))
    (folder / "judging.py").write_text(JUDGE)


def ask(folder: Path, program: str, primary: str, url: str) -> None:
    for name, field in (("with reuse", {}), ("without", {"cacheclip": {"method": "full"}})):
        print(name, flush=True)
        subprocess.run(
            [
                *(program, "--model", "local-chat-completions", "--include_path", str(folder), "--tasks", "passages"),
                *("--model_args", f"model={primary},base_url={url},tokenized_requests=False,max_retries=1"),
                "--apply_chat_template",
                *(("--gen_kwargs", json.dumps(field)) if field else ()),
            ],
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "none")},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dataset")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--ask", metavar="LM_EVAL", help="lm-eval's program")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1/chat/completions")
    args = parser.parse_args()
    if args.ask:
        ask(args.folder, args.ask, args.primary, args.url)
    else:
        write(args.folder, args.dataset, args.limit, args.primary, args.auxiliary)


if __name__ == "__main__":
    main()
