"""Tensor functions over ragged KV caches: attention, KVzip scoring, selection, compaction."""
