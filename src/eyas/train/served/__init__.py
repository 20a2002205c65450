"""States of a target that vLLM servers run: what is asked, how files come and go, and which server is well."""
