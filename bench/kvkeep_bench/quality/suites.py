"""Every suite by name."""

from collections.abc import Mapping

from kvkeep_bench.quality.items import Suite
from kvkeep_bench.quality.languages import languages
from kvkeep_bench.quality.lookups import common_words, many_shot, shared_prefix_keys, uuids
from kvkeep_bench.quality.mixed import multi_query
from kvkeep_bench.quality.needles import needles
from kvkeep_bench.quality.rules import harmful_requests, protected_instructions, refusals
from kvkeep_bench.quality.structured import code, tables

SUITES: Mapping[str, Suite] = {
    "needles": needles,
    "multi-query": multi_query,
    "shared-prefix keys": shared_prefix_keys,
    "UUIDs": uuids,
    "common words": common_words,
    "many-shot": many_shot,
    "languages": languages,
    "code": code,
    "tables": tables,
    "refusals": refusals,
    "harmful requests": harmful_requests,
    "protected instructions": protected_instructions,
}
