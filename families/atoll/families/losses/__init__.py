"""The losses in torch, for every backend: tensors and small interfaces in, a partial sum and its gradient out.

Read `batch` (what a loss sees), `vocab` (log-probs over vocabulary shards), `policy_loss`, then `loss_function`, which
a worker calls. Only workers import this package.
"""
