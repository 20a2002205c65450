"""The target: any Hugging Face causal language model whose next tokens a drafter guesses.

`facts` reads sizes without loading weights, `locate` finds or makes the folder (hub id, folder, GGUF file or the
embedded default), `model` loads and runs it, `capture` reads its residual stream. `eyas.target.facts` imports no torch.
"""
