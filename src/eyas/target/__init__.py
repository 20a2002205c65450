"""The target: any Hugging Face causal language model whose next tokens a drafter guesses.

`facts` says what a target is without loading it, `locate` finds or makes its folder (hub id, folder, GGUF
file or the embedded default), `model` loads and runs it, `capture` reads its residual stream.
Nothing is imported early: `eyas.target.facts` stays free of torch, `eyas.target.model` does not.
"""
