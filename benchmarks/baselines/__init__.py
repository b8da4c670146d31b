"""What a user would write instead, each as its own documentation advises, serving the same model on the same device.

pipeline          loading the pipeline, and one call of it: shared by all
bare              the pipeline in a loop, without a server
triton_plain      a Triton Python model that calls the pipeline request by request
triton_batched    a Triton Python model behind Triton's dynamic batcher: one call of the pipeline for each group of
                  requests with the same number of steps, guidance scale and size
pytriton_batch    PyTriton with @batch and @group_by_values
litserve_batch    LitServe with max_batch_size
fastapi_threads   FastAPI with a thread pool and a scheduler for each request, as the guide of `diffusers` has it

Our engine with joint forwards off (`step_batching: off`) is one more; it is a parameter, and needs no file.
"""
