"""Other engines, such as vLLM, which decode for comparison or as a teacher."""
