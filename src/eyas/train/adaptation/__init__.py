"""Further training of an existing drafter on the traffic it serves: the recipe and the judgement."""
