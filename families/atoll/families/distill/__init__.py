"""The base of the families that distil a teacher on the student's own samples. It registers no family itself.

Read `options` (the settings), `family` (the torch-free side), `prompts`, then `objective` (what workers compute).
"""
