"""A drafter that exists, trained on to the traffic it meets: the recipe, the judgement, the story."""
