"""Prompts: from files and data set names to token ids in a resumable order.

In the order the data flows:

- `adapters.py`: one adapter a data set: which fields it has, how they become question, gold answer and supervised target.
- `arithmetic.py`: the synthetic task, sums to learn from nothing.
- `sources.py`: the grammar of `data.train` and `data.eval`; reads JSONL and Hugging Face data sets into rows.
- `tokenizer.py`: a tokenizer from a directory, every end-of-sequence id, digests of its files; a builder of a small character tokenizer.
- `prompts.py`: rows to `Prompt`s: template, token ids, what is dropped and counted, the fingerprint.
- `order.py`: which prompts each step takes, the same after a resume as without.
"""
