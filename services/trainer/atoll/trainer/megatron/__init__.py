"""The Megatron backend: megatron-core on GPUs (NCCL) and, through `cpu`, on CPUs (gloo)."""
