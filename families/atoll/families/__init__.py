"""Loss families: how a batch of recorded samples becomes a training signal and a loss.

Read in this order: `rows` (what is trained), `batching` (which reports form a batch), `family` (the contract),
`signal` and `steps` (what the driver hands to the workers), `aggregation` (the weight of every row), then
`losses/` (torch: what the workers compute). Everything outside `losses/` and a family's `objective.py` is
torch-free.
"""
