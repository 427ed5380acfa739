"""The rollouter daemon: prompts, admission by the staleness formula, dispatch, engines, following versions, evaluation."""
